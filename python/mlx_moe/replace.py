"""Find a model's expert layers, swap their forward, and put it back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from . import core, probe
from .errors import InvalidArgument, NoMoELayers, UnsupportedLayer
from .layers import LINEARS, PROJECTIONS, Layer, replaced_class
from .replacement import ReplacedLayer, Replacement
from .static import IMPORTANCES, OVERFLOWS, Importance, Overflow
from .static_load import open_plan
from .static_replace import Prepared, prepare
from .static_shared import shared_class
from .stats import Counters
from .weights import describe, own_class

BACKENDS = ("auto", "stock", "cpu", "host", "coreml")

# Files of mlx_lm.models whose block does `(y * scores[..., None]).sum(axis=-2)` on the output
# and nothing else: these may be given a `Deferred`.
DEFERRED_FAMILIES = frozenset(
    {
        "Klear",
        "afmoe",
        "bailing_hybrid",
        "bailing_moe_linear",
        "bailing_moe_v3",
        "deepseek",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "ernie4_5_moe",
        "exaone_moe",
        "glm4_moe",
        "glm4_moe_lite",
        "granitemoe",
        "granitemoehybrid",
        "hunyuan",
        "jamba",
        "kimi_k3",
        "kimi_linear",
        "laguna",
        "lfm2_moe",
        "mellum",
        "mimo_v2_flash",
        "minimax",
        "minimax_m3_vl",
        "mistral4",
        "mixtral",
        "nemotron_h",
        "olmoe",
        "phimoe",
        "phixtral",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "step3p5",
    }
)


def resolve_backend(backend: str) -> str:
    """ "cpu" or "stock" for a `backend` argument; "auto" is "cpu" where MLX runs on the CPU, and
    "host" is a plan's static half beside "cpu"."""
    check_choice("backend", backend, BACKENDS)
    if backend == "coreml":
        raise InvalidArgument(
            "backend='coreml' is not part of this version; backend='host' runs a plan's programs "
            "on the CPU"
        )
    if backend == "host":
        backend = "cpu"
    if backend == "auto":
        backend = "cpu" if mx.default_device().type == mx.DeviceType.cpu else "stock"
    if backend == "cpu":  # read here what the environment says, not inside the first layer
        core.isa()
        core.num_threads()
    return backend


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise InvalidArgument(f"{name} is {value!r}; expected one of {', '.join(known)}")


def replace_moe_layers(
    model: nn.Module,
    plan: Any = None,
    *,
    artifacts: str | Path | None = None,
    backend: str = "auto",
    overflow: Overflow = "spill",
    importance: Importance = "router",
    checkpoint: str | Path | None = None,
    strict: bool = True,
) -> Replacement:
    """Run the expert layers of `model` through the C++ kernels.

    Every `SwitchGLU` and `SwitchMLP` of mlx-lm, and every module of other code that has their
    children and computes the same, gets a subclass of its own class. Parameters, their names
    and the module tree stay; loading, LoRA, quantising, sharding and saving work as before,
    earlier or later. Training mode and `mx.compile` run stock code. Replacing twice is one.

    Args:
        model: any MLX module; changed in place.
        plan: which experts run where, a `Plan` or the path of one; None for all on one path.
        artifacts: the directory in which the plan's programs were compiled.
        backend: "cpu" (the kernels), "stock" (list the layers, run mlx-lm's own code), "host"
            (a plan's hot experts in half precision on the static shapes of its programs, also
            computed by the CPU; the others on the kernels), or "auto": "cpu" where MLX's default
            device is the CPU, else "stock". "auto" and "cpu" leave a plan's programs alone, and
            the `Replacement` says so.
        overflow: what a plan does with assignments beyond capacity: "spill" computes them on
            the kernels, exactly; "prune" leaves the least important out, as NPUMoE does.
        importance: what pruning goes by, "router" (scores) or "norm" (of the token's input).
        checkpoint: the model's directory, to compare its files with the plan's too.
        strict: if False, layers that cannot be replaced stay stock and are listed so.

    Returns:
        The `Replacement`.

    Raises:
        InvalidArgument: an argument is not one of the above, the CPU kernels cannot run as
            MLX_MOE_ISA or MLX_MOE_NUM_THREADS says, or the plan's layers are not the model's.
        IdentityMismatch: the plan is another model's.
        CorruptFile: the plan or its artifacts are not what was written.
        NoMoELayers: the model has no expert layers; nothing was changed.
        UnsupportedLayer: a layer cannot be replaced and `strict`, or `importance` cannot be
            known in this family.

    Whatever is raised, nothing was changed.
    """
    check_choice("overflow", overflow, OVERFLOWS)
    check_choice("importance", importance, IMPORTANCES)
    target = resolve_backend(backend)
    _check_plan_arguments(plan, artifacts, backend)
    logged: set[str] = set()
    found = [
        (module, _examine(module, name, parent, target, strict, logged))
        for name, module, parent in find_modules(model, lambda m: switch_kind(m) is not None)
    ]
    if not found:
        raise NoMoELayers(
            f"{type(model).__module__}.{type(model).__name__} has no expert layers "
            "(no SwitchGLU, SwitchMLP or module of that shape); nothing was replaced"
        )
    prepared = None
    if plan is not None:
        host = backend == "host"
        opened = open_plan(model, plan, artifacts, host, overflow, importance, checkpoint)
        prepared = prepare(opened, found, named_modules(model), logged)
    return _replace(model, found, prepared)


def _check_plan_arguments(plan: Any, artifacts: Any, backend: str) -> None:
    if plan is None and artifacts is not None:
        raise InvalidArgument("artifacts go with the plan that they were compiled from: give both")
    if plan is None and backend == "host":
        raise InvalidArgument("backend='host' runs a plan's programs: give plan and artifacts")
    if plan is not None and backend == "stock":
        raise InvalidArgument("backend='stock' uses no plan: leave plan=None")


def _replace(
    model: nn.Module, found: list[tuple[Any, ReplacedLayer]], prepared: Prepared | None
) -> Replacement:
    """Change the modules; nothing here fails."""
    shared = prepared.shared if prepared else []
    for module, row in found:
        swap(module, row, replaced_class, "_moe_layer")
    for module, row in shared:
        swap(module, row, shared_class, "_moe_shared")
    rows = [row for _, row in found + shared]
    if prepared is not None:
        prepared.attach(rows)
    note = prepared.opened.note if prepared else None
    return Replacement(rows, model, restore_moe_layers, note)


def restore_moe_layers(model: nn.Module) -> None:
    """Undo `replace_moe_layers` on every layer of `model`; without any, do nothing."""
    for module in named_modules(model).values():
        unswap(module, "_moe_layer")
        unswap(module, "_moe_shared")


def swap(module: Any, row: ReplacedLayer, make_class: Any, attribute: str) -> None:
    """Give `module` the class that `row` asks for, and the row the state that it uses."""
    if row.backend == "stock":
        unswap(module, attribute)
        return
    if attribute in module.__dict__:
        row._layer = module.__dict__[attribute]
        return
    module.__dict__[attribute] = row._layer
    module.__class__ = make_class(type(module))


def unswap(module: Any, attribute: str) -> None:
    if module.__dict__.pop(attribute, None) is not None:
        module.__class__ = type(module)._moe_base


def named_modules(model: Any) -> dict[str, Any]:
    """Every module of `model` by its path; raises InvalidArgument if it is none itself."""
    if not isinstance(model, nn.Module):
        raise InvalidArgument(
            f"expected a model (an mlx.nn.Module), found {type(model).__name__}; "
            "mlx_moe.load(path) loads one"
        )
    return dict(model.named_modules())


def find_modules(model: nn.Module, wanted: Any) -> list[tuple[str, Any, Any]]:
    """(name, module, parent module) of every wanted module, once each, in reading order."""
    modules = named_modules(model)
    found, seen = [], set()
    for name in sorted(modules, key=_reading_order):
        module = modules[name]
        if id(module) in seen or not wanted(module):
            continue
        seen.add(id(module))
        parent = name
        while parent:
            parent = parent.rpartition(".")[0]
            if parent in modules:
                break
        found.append((name, module, modules[parent]))
    return found


def _reading_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def switch_kind(module: Any) -> str | None:
    """ "glu" or "mlp" for an expert layer, by mlx-lm's classes or by shape; else None."""
    if isinstance(module, SwitchGLU):
        return "glu"
    if isinstance(module, SwitchMLP):
        return "mlp"
    if not hasattr(module, "activation"):
        return None
    for kind, names in PROJECTIONS.items():
        if all(_is_stacked(module.get(name)) for name in names):
            return kind
    return None


def _is_stacked(child: Any) -> bool:
    if not isinstance(child, nn.Module):
        return False
    weight = child.get("weight")
    return isinstance(weight, mx.array) and weight.ndim == 3


def _examine(
    module: Any, name: str, parent: Any, target: str, strict: bool, logged: set[str]
) -> ReplacedLayer:
    """The table row of one layer, and the state to put on it; changes nothing."""
    kind = switch_kind(module)
    assert kind is not None
    base = own_class(module)
    family, deferred = _family(parent)
    children = [module[child] for child in PROJECTIONS[kind]]
    layer = Layer(name, kind, deferred, Counters(name, logged))
    activation = getattr(module, "activation", None)
    known = base.__call__ in (SwitchGLU.__call__, SwitchMLP.__call__)
    if target == "cpu" and not known and base is type(module):
        try:
            probe.check_forward(module, kind, name)
        except UnsupportedLayer:
            if strict:
                raise
            target = "stock"
        layer.linears = LINEARS | {type(child) for child in children}
        if probe.is_swiglu(activation):
            layer.swiglus = layer.swiglus | {type(activation)}
    formats = [describe(child) for child in children]
    dtypes = list(dict.fromkeys(dtype for dtype, _ in formats))
    bits = [b for _, b in formats if b is not None]
    first = children[0].get("linear", children[0])
    return ReplacedLayer(
        name,
        "experts",
        family,
        int(first["weight"].shape[0]),
        "+".join(dtypes),
        max(bits, default=None),
        target,
        layer if target == "cpu" else None,
        _top_k(parent),
    )


def _family(parent: Any) -> tuple[str, bool]:
    """The family of the block that calls the layer, and whether it takes a `Deferred`."""
    package, _, family = type(parent).__module__.rpartition(".")
    return family, package == "mlx_lm.models" and family in DEFERRED_FAMILIES


def _top_k(parent: Any) -> int | None:
    for name in ("top_k", "num_experts_per_tok", "num_experts_per_token"):
        if isinstance(value := getattr(parent, name, None), int):
            return value
    return None
