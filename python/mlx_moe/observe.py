"""Watch the expert layers of a model while it runs, replaced or not, and leave it as it was."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .deferred import Deferred
from .find import family_of, find_modules, named_modules, switch_kind
from .layers import Layer, Observer, replaced_class
from .replace import examine, resolve_backend, swap, unswap
from .static_paths import all_cold
from .stats import Counters

_STATE = "_moe_observed"


@contextmanager
def observed(model: nn.Module, observers: dict[str, Observer], backend: str) -> Iterator[None]:
    """While open, `observers[name]` sees each forward of the expert layer `name`.

    Layers that are not replaced are for that time: run by `backend`, or left to stock code where
    that is "stock" or a layer cannot be replaced. Indices of `num_experts` and above stand for
    assignments that reach no expert. Training mode is off while open.
    """
    found = find_modules(model, _is_switch)
    with ExitStack() as stack:
        stack.callback(_set_training, [m for m in named_modules(model).values() if m.training])
        model.eval()
        # Counted is the model itself: what a plan computes in half precision, or leaves out,
        # would change what later layers see.
        stack.enter_context(all_cold(model))
        target, logged = resolve_backend(backend), set[str]()
        for name, module, parent in found:
            if target == "cpu" and "_moe_layer" not in module.__dict__:
                stack.callback(unswap, module, "_moe_layer")
                row = examine(module, name, parent, target, False, logged)
                swap(module, row, replaced_class, "_moe_layer")
            observer = observers[name]
            if hasattr(parent, "zero_expert_num") and hasattr(parent, "router"):
                observer = stack.enter_context(_with_router(parent.router, observer))
            layer = module.__dict__.get("_moe_layer")
            if layer is None:
                layer = _watch_stock(module, name, parent)
                stack.callback(unswap, module, _STATE)
            stack.callback(setattr, layer, "observer", layer.observer)
            layer.observer = observer
        yield


def _is_switch(module: Any) -> bool:
    return switch_kind(module) is not None


def _set_training(modules: list[Any]) -> None:
    for module in modules:
        module._set_training_mode(True)


def _watch_stock(module: Any, name: str, parent: Any) -> Layer:
    """Have a layer tell its observer of each forward, and run stock code."""
    kind = switch_kind(module)
    assert kind is not None
    layer = Layer(name, kind, family_of(parent)[1], Counters(name, set()))
    base = type(module)

    def __call__(self: Any, x: mx.array, indices: mx.array, *args: Any, **kwargs: Any) -> Any:
        call = StockCall(self, layer, x, indices, base.__call__(self, x, indices, *args, **kwargs))
        return Deferred(call) if layer.deferred else call.run()

    module.__dict__[_STATE] = layer
    module.__class__ = type(base.__name__, (base,), {"__call__": __call__, "_moe_base": base})
    return layer


class StockCall:
    """Stock code's lazy result `y`, whose weighted sum the observer waits for."""

    def __init__(self, module: Any, layer: Layer, x: mx.array, indices: mx.array, y: mx.array):
        self.module, self.layer, self.x, self.indices, self.y = module, layer, x, indices, y
        self.shape, self.dtype = tuple(y.shape), y.dtype
        self.observer = layer.observer

    def run(self, scores: mx.array | None = None) -> mx.array:
        if self.observer is not None:
            observer, self.observer = self.observer, None
            observer(self.module, self.layer, self.x, self.indices, scores)
        return self.y if scores is None else (self.y * scores).sum(axis=-2)


@contextmanager
def _with_router(router: Any, observer: Observer) -> Iterator[Observer]:
    """An observer that is told what the router chose, before the block replaces what it counts
    as no expert (identity experts, in longcat_flash) by expert 0 with weight 0."""
    base = type(router)
    chosen: list[tuple[mx.array, mx.array]] = []

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = base.__call__(self, *args, **kwargs)
        chosen[:] = [result]
        return result

    def with_choice(
        module: Any, layer: Layer, x: mx.array, indices: mx.array, _: mx.array | None
    ) -> None:
        ids, scores = chosen.pop()
        observer(module, layer, x, ids, scores[..., None])

    router.__class__ = type(base.__name__, (base,), {"__call__": __call__})
    try:
        yield with_choice
    finally:
        router.__class__ = base
