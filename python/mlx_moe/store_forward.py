"""The arithmetic of an expert layer on matrices of a store, whole or by some assignments."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from . import core
from .custom import evaluate, filled
from .store_files import StoredExperts
from .weights import promote

Matrices = Sequence[core.Matrix]


class Forward(Protocol):
    """What `StoredLayer.run` needs of a layer. Arrays that come in are evaluated.

    Attributes:
        bucketed: tokens whose assignments `whole` buckets together before a weighted sum; None for
            all of them.
    """

    bucketed: int | None

    def whole(
        self, x: mx.array, ids: mx.array, scores: mx.array | None, matrices: Matrices
    ) -> mx.array:
        """Outputs [T, k, D] for x [T, K] and ids [T, k], or their weighted sum [T, D]."""
        ...

    def rows(self, x: mx.array, ids: mx.array, matrices: Matrices) -> mx.array:
        """Outputs [n, D] of one expert each, ids [n, 1], for x [n, K] (not evaluated yet): the
        bits that `whole` gives these assignments."""
        ...

    def weighted(self, y: mx.array, scores: mx.array, matrices: Matrices) -> mx.array:
        """The weighted sum [T, D] that `whole` would give for outputs y [T, k, D]."""
        ...


class Glu:
    """silu(gate) * up in one call of the kernels, without biases before it."""

    bucketed: int | None = 2048  # as in ffn.cpp

    def __init__(self, experts: StoredExperts):
        self.width = list(experts.outputs.values())[-1]
        self.dtypes = [dtype for dtypes in experts.dtypes.values() for dtype in dtypes]

    def whole(
        self, x: mx.array, ids: mx.array, scores: mx.array | None, matrices: Matrices
    ) -> mx.array:
        x = self._cast(x)
        if scores is None:
            return filled((*ids.shape, self.width), x.dtype, core.swiglu, x, ids, *matrices)
        shape, dtype = (len(x), self.width), promote(x.dtype, scores.dtype)
        return filled(shape, dtype, core.swiglu_combine, x, ids, scores, *matrices)

    def rows(self, x: mx.array, ids: mx.array, matrices: Matrices) -> mx.array:
        x = self._cast(x)
        evaluate(ids)
        y = filled((*ids.shape, self.width), x.dtype, core.swiglu, x, ids, *matrices)
        return y.reshape(-1, self.width)

    def weighted(self, y: mx.array, scores: mx.array, matrices: Matrices) -> mx.array:
        shape, dtype = (len(y), self.width), promote(y.dtype, scores.dtype)
        return filled(shape, dtype, core.weighted_sum, y, scores, *matrices)

    def _cast(self, x: mx.array) -> mx.array:
        x = x.astype(promote(x.dtype, *self.dtypes))
        evaluate(x)
        return x


class Chain:
    """Any activation: one call a projection, and MLX's own arithmetic between them."""

    bucketed: int | None = None

    def __init__(self, experts: StoredExperts, activation: Callable[..., mx.array]):
        """activation: as the module has it; it takes (up, gate), or fc1's output alone."""
        self.experts, self.activation = experts, activation

    def whole(
        self, x: mx.array, ids: mx.array, scores: mx.array | None, matrices: Matrices
    ) -> mx.array:
        *names, last = self.experts.projections
        grouped = [self._grouped(x, ids, *pair) for pair in zip(names, matrices, strict=False)]
        hidden = self.activation(*grouped[::-1])
        hidden = mx.contiguous(hidden.reshape(*ids.shape, -1))
        y = self._grouped(hidden, ids, last, matrices[-1]).reshape(*ids.shape, -1)
        return y if scores is None else self.weighted(y, scores, matrices)

    def rows(self, x: mx.array, ids: mx.array, matrices: Matrices) -> mx.array:
        y = self.whole(x, ids, None, matrices)
        return y.reshape(len(ids), -1)

    def weighted(self, y: mx.array, scores: mx.array, _: Matrices) -> mx.array:
        return (y * scores.reshape(*y.shape[:-1], 1)).sum(axis=-2)

    def _grouped(self, x: mx.array, ids: mx.array, name: str, matrix: core.Matrix) -> mx.array:
        x = x.astype(promote(x.dtype, *self.experts.dtypes[name]))
        evaluate(x, ids)
        shape = (*ids.shape, self.experts.outputs[name])
        # As the module calls its activation: [..., k, 1, N].
        return filled(shape, x.dtype, core.grouped, x, ids, matrix)[..., None, :]


def forward_of(experts: StoredExperts, activation: Any, swiglu: bool) -> Forward:
    """The forward of a layer; `swiglu`: its activation is known to be silu(gate) * up."""
    inner = list(experts.projections.values())[:-1]
    if swiglu and len(inner) == 2 and not any(projection.has_bias for projection in inner):
        return Glu(experts)
    return Chain(experts, activation)
