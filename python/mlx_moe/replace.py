"""Swap the forward of a model's expert layers, and put it back."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from . import core, probe, top_k
from .distributed_replace import Shared, check_alone, check_restorable, is_shared, share, unshare
from .errors import InvalidArgument, NoMoELayers, UnsupportedLayer
from .expert_memory import ExpertMemory
from .find import family_of, find_modules, named_modules, switch_kind
from .layers import LINEARS, PROJECTIONS, Layer, replaced_class
from .replacement import ReplacedLayer, Replacement
from .static import EXECUTORS, IMPORTANCES, OVERFLOWS, Importance, Overflow
from .static_load import open_plan
from .static_replace import Prepared, detach, prepare
from .static_shared import shared_class
from .stats import Counters
from .store_replace import PreparedStore, is_stored, open_store, report_of, restore_experts
from .stored_layer import stored_class
from .weights import describe, own_class

BACKENDS = ("auto", "stock", "cpu", "host", "coreml")


def resolve_backend(backend: str) -> str:
    """ "cpu" or "stock" for a `backend` argument; "auto" is "cpu" where MLX runs on the CPU, and
    "host" and "coreml" are a plan's static half beside "cpu"."""
    check_choice("backend", backend, BACKENDS)
    if backend == "coreml" and (missing := core.coreml_missing()):
        raise InvalidArgument(
            f"backend='coreml': {missing}; backend='host' runs a plan's programs on the CPU"
        )
    if backend in EXECUTORS:
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
    expert_memory: int | str | ExpertMemory | None = None,
    checkpoint: str | Path | None = None,
    group: Any = None,
    strict: bool = True,
) -> Replacement:
    """Run the expert layers of `model` through the C++ kernels.

    Every `SwitchGLU` and `SwitchMLP` of mlx-lm, and every module of other code that has their
    children and computes the same, gets a subclass of its own class. Parameters, their names
    and the module tree stay; loading, LoRA, quantising, sharding and saving work as before,
    earlier or later. Training mode and `mx.compile` run stock code. Replacing twice is one, with
    the plan of the last call or none.

    Args:
        model: any MLX module; changed in place.
        plan: which experts run where, a `Plan` or the path of one; None for all on one path.
        artifacts: the directory in which the plan's programs were compiled.
        backend: "cpu" (the kernels), "stock" (list the layers, run mlx-lm's own code), "host"
            (a plan's hot experts in half precision on the static shapes of its programs, also
            computed by the CPU; the others on the kernels), "coreml" (the same programs in Core
            ML, on macOS; experts of those that do not land on the Neural Engine are computed
            with the others), or "auto": "cpu" where MLX's default device is the CPU, else
            "stock". "auto" and "cpu" leave a plan's programs alone, and the `Replacement` says
            so. Where MLX computes on the GPU, "host" and "coreml" leave all that is not in a
            program to MLX.
        overflow: what a plan does with assignments beyond capacity: "spill" computes them on
            the path of the others, exactly; "prune" leaves the least important out, as NPUMoE does.
        importance: what pruning goes by, "router" (scores) or "norm" (of the token's input).
        expert_memory: keep the experts in the checkpoint's files and at most so much of them in
            memory: bytes, "8GB", "25%" of all experts, "auto" for what is free, or an
            `ExpertMemory`. Load the model lazily, so that they were never read. Where the backend
            is stock, MLX's operations compute from slots in MLX's arrays. Training,
            gradients, `mx.compile`, adapters on experts, saving and quantising raise
            ExpertsOnDisk instead of running stock code.
        checkpoint: the model's directory: expert_memory reads it, group reads from it this
            rank's experts and no others, and a plan's files are compared with it.
        group: of `mx.distributed`, or `mlx_moe.distributed.Ranks`: each rank takes its share of
            the experts, and lets go of the others. Every rank calls this in the same way.
        strict: if False, layers that cannot be replaced stay stock and are listed so.

    Returns:
        The `Replacement`.

    Raises:
        InvalidArgument: an argument is not one of the above, there is no Core ML here, the CPU
            kernels cannot run as MLX_MOE_ISA or MLX_MOE_NUM_THREADS says, or the plan's layers
            are not the model's.
        RankMismatch, RankLost: the ranks of `group` do not fit together, or one of them ended.
        IdentityMismatch: the plan is another model's.
        CorruptFile: the plan or its artifacts are not what was written.
        NoMoELayers: the model has no expert layers; nothing was changed.
        UnsupportedLayer: a layer cannot be replaced and `strict`, `importance` cannot be
            known in this family, or its loader computes the experts from what is in the files.
        MemoryLimit: expert_memory cannot hold one token's experts of a layer.

    Whatever is raised, nothing was changed.
    """
    check_choice("overflow", overflow, OVERFLOWS)
    check_choice("importance", importance, IMPORTANCES)
    target = resolve_backend(backend)
    _check_plan_arguments(plan, artifacts, backend)
    if group is not None:
        check_alone(plan=plan, expert_memory=expert_memory)
    if not isinstance(checkpoint, str | os.PathLike | None):
        raise InvalidArgument(
            f"checkpoint is {checkpoint!r}; expected the directory that the model was loaded from"
        )
    if expert_memory is not None:
        ExpertMemory.of(expert_memory).check()
    logged: set[str] = set()
    modules = find_modules(model, lambda m: switch_kind(m) is not None)
    kept = backend == "auto" and any(is_stored(module) for _, module, _ in modules)
    if target == "stock" and (expert_memory is not None or kept):
        target = "mlx"  # its operations, on slots
    kernels = "cpu" if group is not None else target  # where ranks have their parts in any case
    found = [
        (module, examine(module, name, parent, kernels, strict, logged))
        for name, module, parent in modules
    ]
    all_modules = named_modules(model)
    for _, row in found:
        row._top_k = top_k.of_layer(all_modules, row.name)
    if not found:
        raise NoMoELayers(
            f"{type(model).__module__}.{type(model).__name__} has no expert layers "
            "(no SwitchGLU, SwitchMLP or module of that shape); nothing was replaced"
        )
    if group is not None:
        _check_not_elsewhere(found, is_stored)
        return _replace(model, found, None, None, share(model, found, group, checkpoint, target))
    _check_not_elsewhere(found, is_shared)
    store = prepared = None
    if expert_memory is not None:
        memory = ExpertMemory.of(expert_memory)
        store = open_store(model, found, memory, checkpoint, target == "mlx")
    try:
        if plan is not None:
            on_disk = store.stored if store else None
            opened = open_plan(
                model, plan, artifacts, backend, overflow, importance, checkpoint, on_disk
            )
            stored = store is not None or any(is_stored(module) for module, _ in found)
            prepared = prepare(opened, found, all_modules, logged, stored)
        if target == "stock":
            restore_experts(model)
    except BaseException:
        if store is not None:
            store.store.close()
        raise
    return _replace(model, found, prepared, store)


def _check_plan_arguments(plan: Any, artifacts: Any, backend: str) -> None:
    if plan is None and artifacts is not None:
        raise InvalidArgument("artifacts go with the plan that they were compiled from: give both")
    if plan is None and backend in EXECUTORS:
        raise InvalidArgument(f"{backend=} runs a plan's programs: give plan and artifacts")
    if plan is not None and backend == "stock":
        raise InvalidArgument("backend='stock' uses no plan: leave plan=None")


def _check_not_elsewhere(found: list[tuple[Any, ReplacedLayer]], elsewhere: Any) -> None:
    if any(elsewhere(module) for module, _ in found):
        raise InvalidArgument(
            "the model's experts are on disk or shared over ranks already; "
            "restore_moe_layers(model) first"
        )


def _replace(
    model: nn.Module,
    found: list[tuple[Any, ReplacedLayer]],
    prepared: Prepared | None,
    store: PreparedStore | None,
    ranked: Shared | None = None,
) -> Replacement:
    """Change the modules; nothing here fails."""
    shared = prepared.shared if prepared else []
    for module in named_modules(model).values():
        unswap(module, "_moe_shared")  # an earlier call's plan goes
    for module, row in found:
        if store is not None and not is_stored(module):
            unswap(module, "_moe_layer")
        make_class = replaced_class if store is None else stored_class
        swap(module, row, make_class, "_moe_layer")
    for module, row in shared:
        swap(module, row, shared_class, "_moe_shared")
    rows = [row for _, row in found + shared]
    detach([row for _, row in found])
    if prepared is not None:
        prepared.attach(rows)
    if store is not None:
        store.attach(found)
    if ranked is not None:
        ranked.attach()
    notes = [part.note for part in (prepared and prepared.opened, store, ranked) if part]
    note = "\n".join(text for text in notes if text) or None
    return Replacement(rows, model, restore_moe_layers, note, report_of(found))


def restore_moe_layers(model: nn.Module) -> None:
    """Undo `replace_moe_layers` on every layer of `model`; without any, do nothing.

    Experts that stay on disk become lazily loaded arrays of the same files. Raises FileChanged,
    with nothing changed, if these are no longer what they were, and InvalidArgument if experts of
    other ranks were let go.
    """
    check_restorable(list(named_modules(model).values()))
    restore_experts(model)
    for module in named_modules(model).values():
        unswap(module, "_moe_layer")
        unswap(module, "_moe_shared")


def swap(module: Any, row: ReplacedLayer, make_class: Any, attribute: str) -> None:
    """Give `module` the class that `row` asks for, and the row the state that it uses."""
    if row._layer is None:
        unswap(module, attribute)
        return
    if attribute in module.__dict__:
        row._layer = module.__dict__[attribute]
        return
    module.__dict__[attribute] = row._layer
    module.__class__ = make_class(type(module))


def unswap(module: Any, attribute: str) -> None:
    layer = module.__dict__.pop(attribute, None)
    if layer is None:
        return
    module.__class__ = type(module)._moe_base
    unshare(module, layer)
    if attribute == "_moe_layer":  # a `Replacement` keeps it for its counters alone
        if layer.follower is not None:
            layer.counters.schedule = partial(dict, layer.follower.stats())
        layer.follower = layer.packed = layer.static = None


def examine(
    module: Any, name: str, parent: Any, target: str, strict: bool, logged: set[str]
) -> ReplacedLayer:
    """The table row of one layer, and the state to put on it; changes nothing."""
    kind = switch_kind(module)
    assert kind is not None
    base = own_class(module)
    family, deferred = family_of(parent)
    children = [module[child] for child in PROJECTIONS[kind]]
    layer = Layer(name, kind, deferred, Counters(name, logged))
    activation = getattr(module, "activation", None)
    known = base.__call__ in (SwitchGLU.__call__, SwitchMLP.__call__)
    if target == "mlx" and not known and base.__module__.partition(".")[0] != "mlx_lm":
        # Its code would see slots where it expects experts, and may count on their numbers.
        if strict:
            raise UnsupportedLayer(
                f"{name} is a {base.__module__}.{base.__name__}, and MLX's operations compute "
                "experts that stay on disk only in layers of mlx-lm: use backend='cpu', or load "
                "without expert_memory"
            )
        target = "stock"
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
        None if target == "stock" else layer,
    )
