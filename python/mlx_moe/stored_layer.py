"""The forward of an expert layer whose experts are in a store."""

import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx

from . import core
from .custom import CannotEvaluate, eager, evaluate, token_rows
from .deferred import Deferred
from .errors import ExpertsOnDisk, InvalidArgument
from .layers import INDEX_DTYPES, Layer
from .static import Ints
from .static_path import StaticPath
from .store_bank_ops import BankLayer
from .store_forward import Forward, Glu, forward_of
from .stored_linear import INSTEAD
from .weights import FLOATS, promote, subclass


@dataclass
class Stored:
    """What replacement keeps of a layer in a store.

    Attributes:
        layer: reads and runs its experts: a `StoredLayer`, or a `BankLayer` in MLX's operations.
        placeholders: what stands in the module for their arrays, by projection and key.
        dtypes: of the experts' floating-point arrays.
    """

    layer: Any
    placeholders: dict[tuple[str, str], mx.array]
    dtypes: tuple[mx.Dtype, ...] = field(init=False)
    width: int = field(init=False)
    addresses: list[int] = field(init=False)

    def __post_init__(self) -> None:
        experts = self.layer.experts
        self.dtypes = tuple({d: None for dtypes in experts.dtypes.values() for d in dtypes})
        self.width = list(experts.outputs.values())[-1]
        mx.eval(list(self.placeholders.values()))  # a copy's are lazy
        self.addresses = core.addresses(list(self.placeholders.values()))

    def changed(self, module: Any) -> str | None:
        """The first parameter that is no longer what replacement put there."""
        for (child, key), array in self.placeholders.items():
            if module[child].get(key) is not array:
                return f"{child}.{key}"
        arrays = list(self.placeholders.values())
        mx.eval(arrays)  # what changes an array in place, as `linear.bias /= 2`, waits in it
        now = zip(self.placeholders, core.addresses(arrays), self.addresses, strict=True)
        return next((f"{child}.{key}" for (child, key), here, then in now if here != then), None)

    def first_values(self, projection: str, count: int) -> bytes:
        """Of the first row of a projection's first expert's weight."""
        weight = self.placeholders[projection, "weight"]
        names = self.layer.experts.projections[projection].names[0]
        size = min(count, weight.shape[-1]) * weight.itemsize
        return self.layer.store.checkpoint.first_bytes(names[0], size)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stored":
        """Of a copied model: the store is shared, the placeholders are the copy's own."""
        return Stored(self.layer, copy.deepcopy(self.placeholders, memo))


@cache
def stored_class(base: type) -> type:
    """The subclass of `base` (made once) whose instances run from a store."""

    def __call__(self: Any, x: mx.array, indices: mx.array) -> Any:
        return forward(self, self._moe_layer, x, indices)

    return subclass(base, __call__=__call__)


def forward(module: Any, layer: Layer, x: mx.array, indices: mx.array) -> Any:
    """Outputs [..., k, D] of the experts `indices` [..., k] for `x` [..., K], as stock's.

    Raises:
        ExpertsOnDisk: their weights are needed in memory: in training mode, for gradients, under
            `mx.compile`, or because the module's parameters are no longer the placeholders.
        InvalidArgument: x or indices are not as stock takes them.
        ReadFailed, FileChanged, StoreBusy, StoreClosed: see errors.
    """
    stored: Stored = layer.stored
    tokens = x.size // x.shape[-1] if x.size else 0
    layer.counters.called(tokens)
    layer.top_k = indices.shape[-1]
    _check(stored, module, layer, x, indices)
    if isinstance(stored.layer, BankLayer):
        in_ops = BankCall(stored.layer, module, layer, x, indices)
        return Deferred(in_ops) if layer.deferred and layer.observer else in_ops.run()
    static = layer.static if layer.static is not None and layer.static.takes(tokens) else None
    call = StoredCall(stored, module, layer, x, indices, static)
    watched = layer.observer is not None or static is not None
    return Deferred(call) if layer.deferred and (call.fused or watched) else call.run()


def _check(stored: Stored, module: Any, layer: Layer, x: mx.array, indices: mx.array) -> None:
    if module.training:
        raise ExpertsOnDisk(f"{layer.name}: experts that stay on disk cannot be trained; {INSTEAD}")
    if (changed := stored.changed(module)) is not None:
        raise ExpertsOnDisk(
            f"{layer.name}.{changed} was changed, loaded, wrapped in an adapter or quantised, and "
            f"its experts stay on disk as the checkpoint has them; {INSTEAD}"
        )
    if x.dtype not in FLOATS or not mx.issubdtype(indices.dtype, mx.integer):
        raise InvalidArgument(f"{layer.name}: x is {x.dtype}, indices are {indices.dtype}")
    if x.shape[:-1] != indices.shape[:-1] or not indices.shape[-1]:
        raise InvalidArgument(f"{layer.name}: x is {x.shape}, indices are {indices.shape}")


def no_gradients(name: str) -> Any:
    """What stands for the stock forward where derivatives are asked for."""

    def stock(*_: mx.array) -> mx.array:
        raise ExpertsOnDisk(f"{name}: experts that stay on disk have no gradients; {INSTEAD}")

    return stock


def cannot_trace(name: str) -> ExpertsOnDisk:
    return ExpertsOnDisk(
        f"{name}: experts that stay on disk are read as the routing asks for them, which "
        f"mx.compile and mx.vmap cannot trace; {INSTEAD}"
    )


class BankCall:
    """One forward in MLX's operations (see `deferred.Experts`)."""

    def __init__(self, bank: BankLayer, module: Any, layer: Layer, x: mx.array, indices: mx.array):
        self.bank, self.module, self.layer, self.x, self.indices = bank, module, layer, x, indices
        dtypes = [d for own in bank.experts.dtypes.values() for d in own]
        self.dtype = promote(x.dtype, *dtypes)
        self.shape = (*indices.shape, list(bank.experts.outputs.values())[-1])

    def run(self, scores: mx.array | None = None) -> mx.array:
        if self.layer.observer is not None:
            self.layer.observer(self.module, self.layer, self.x, self.indices, scores)
        # Their graph would be of slots that hold other experts by the time it runs.
        x = eager(lambda x: x, no_gradients(self.layer.name), [self.x])
        try:
            y = self.bank.run(self.module, x, self.indices)
        except CannotEvaluate:
            raise cannot_trace(self.layer.name) from None
        return y if scores is None else (y * scores).sum(axis=-2)


class StoredCall:
    """One forward on the CPU kernels (see `deferred.Experts`)."""

    __slots__ = (
        *("dtype", "forward", "fused", "indices", "layer", "module", "observer", "shape"),
        *("static", "stored", "x"),
    )

    def __init__(
        self,
        stored: Stored,
        module: Any,
        layer: Layer,
        x: mx.array,
        indices: mx.array,
        static: StaticPath | None,
    ):
        self.stored, self.module, self.layer = stored, module, layer
        self.x, self.indices, self.static = x, indices, static
        self.observer = layer.observer
        swiglu = layer.kind == "glu" and type(module.activation) in layer.swiglus
        self.forward: Forward = forward_of(stored.layer.experts, module.activation, swiglu)
        self.fused = isinstance(self.forward, Glu)
        self.shape = (*indices.shape, stored.width)
        self.dtype = promote(x.dtype, *stored.dtypes)

    def run(self, scores: mx.array | None = None) -> mx.array:
        if self.observer is not None:
            observer, self.observer = self.observer, None
            observer(self.module, self.layer, self.x, self.indices, scores)
        if scores is not None and not self.fused and self.static is None:
            return (self.run() * scores).sum(axis=-2)
        arrays = [self.x] if scores is None else [self.x, scores]
        try:
            return eager(self._compute, no_gradients(self.layer.name), arrays)
        except CannotEvaluate:
            raise cannot_trace(self.layer.name) from None

    def _compute(self, x: mx.array, scores: mx.array | None = None) -> mx.array:
        ids = self.indices
        if ids.dtype not in INDEX_DTYPES:
            ids = ids.astype(mx.int32)
        x, ids = token_rows(x, x.shape[-1]), token_rows(ids, ids.shape[-1])
        weights = None if scores is None else token_rows(scores, ids.shape[-1])
        evaluate(x, ids, *([] if weights is None else [weights]))
        if self.static is not None:
            return self._static(self.static, x, ids, weights)
        y = self.stored.layer.run(x, ids, weights, self.forward)
        self.layer.counters.ran(1 if self.fused else len(self.stored.layer.experts.projections))
        return y.reshape(self._shape(scores))

    def _static(
        self, static: StaticPath, x: mx.array, ids: mx.array, scores: mx.array | None
    ) -> mx.array:
        """Hot assignments on the static executor, the others from the store meanwhile."""
        flat, k = ids.reshape(-1), ids.shape[-1]

        def cold(assignments: Ints) -> mx.array:
            chosen = mx.array(assignments)
            rows, experts = x[chosen // k], flat[chosen][:, None]
            evaluate(rows, experts)
            y = self.stored.layer.run(rows, experts, None, self.forward)
            evaluate(y)
            return y.reshape(-1, self.stored.width)

        weights = None
        if scores is not None:
            weights = scores.astype(mx.float32)
            evaluate(weights)
        shape, dtype = self._shape(scores), self.dtype
        if scores is not None:
            dtype = promote(dtype, scores.dtype)
        y = static.run(x, ids, weights, cold, self.stored.width, dtype)
        return y.reshape(shape)

    def _shape(self, scores: mx.array | None) -> tuple[int, ...]:
        return self.shape if scores is None else (*self.shape[:-2], self.shape[-1])
