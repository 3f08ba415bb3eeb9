"""Find a model's expert layers, swap their forward, and put it back."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from . import core, probe
from .errors import InvalidArgument, NoMoELayers, UnsupportedLayer
from .layers import LINEARS, PROJECTIONS, Layer, replaced_class
from .replacement import ReplacedLayer, Replacement
from .stats import Counters
from .weights import describe, own_class

BACKENDS = ("auto", "stock", "cpu")
OVERFLOWS = ("spill", "prune")

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
    """ "cpu" or "stock" for a `backend` argument; "auto" is "cpu" where MLX runs on the CPU."""
    if backend not in BACKENDS:
        raise InvalidArgument(f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = "cpu" if mx.default_device().type == mx.DeviceType.cpu else "stock"
    if backend == "cpu":  # read here what the environment says, not inside the first layer
        core.isa()
        core.num_threads()
    return backend


def replace_moe_layers(
    model: nn.Module,
    plan: Any = None,
    *,
    backend: str = "auto",
    overflow: str = "spill",
    strict: bool = True,
) -> Replacement:
    """Run the expert layers of `model` through the C++ kernels.

    Every `SwitchGLU` and `SwitchMLP` of mlx-lm, and every module of other code that has their
    children and computes the same, gets a subclass of its own class. Parameters, their names
    and the module tree stay; loading, LoRA, quantising, sharding and saving work as before,
    earlier or later. Training mode and `mx.compile` run stock code. Replacing twice is one.

    Args:
        model: any MLX module; changed in place.
        plan: static executors are not part of this version; must be None.
        backend: "cpu" (the kernels), "stock" (list the layers, run mlx-lm's own code), or
            "auto": "cpu" where MLX's default device is the CPU, else "stock".
        overflow: what a plan does with assignments beyond capacity, "spill" or "prune".
        strict: if False, layers that cannot be replaced stay stock and are listed so.

    Returns:
        The `Replacement`.

    Raises:
        InvalidArgument: an argument is not one of the above, or the CPU kernels cannot run as
            MLX_MOE_ISA or MLX_MOE_NUM_THREADS says.
        NoMoELayers: the model has no expert layers; nothing was changed.
        UnsupportedLayer: a layer cannot be replaced and `strict`; nothing was changed.
    """
    if overflow not in OVERFLOWS:
        raise InvalidArgument(f"overflow is {overflow!r}; expected one of {', '.join(OVERFLOWS)}")
    if plan is not None:
        raise InvalidArgument("plans are not supported in this version; leave plan=None")
    target = resolve_backend(backend)
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
    for module, row in found:
        swap(module, row, replaced_class, "_moe_layer")
    return Replacement([row for _, row in found], model, restore_moe_layers)


def restore_moe_layers(model: nn.Module) -> None:
    """Undo `replace_moe_layers` on every layer of `model`; without any, do nothing."""
    for module in named_modules(model).values():
        unswap(module, "_moe_layer")


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
