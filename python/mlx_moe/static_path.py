"""What a replaced layer keeps of its static half, and whether its weights are still those."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from . import core, static_flow
from .static import StaticLayer
from .static_flow import Cold
from .stats import StaticCounters


class Watched:
    """Knows whether arrays are still what they were, in a microsecond each.

    A second handle on every buffer keeps MLX from writing to it in place or giving its address
    to another, so that the same addresses are the same values.
    """

    def __init__(self, arrays: Sequence[mx.array]):
        self._handles = [mx.stop_gradient(a) for a in arrays]
        mx.eval(self._handles)
        self._addresses = core.addresses(self._handles)

    def same(self, arrays: Sequence[mx.array]) -> bool:
        """`arrays` must be evaluated."""
        return core.addresses(arrays) == self._addresses


class StaticPath:
    """The static half of one layer, with its counters.

    Args:
        arrays: the weights that were compiled, all of the layer's.
        ops: the cold path is MLX's own operations, see `cold_ops`; else the CPU kernels.
    """

    def __init__(
        self,
        layer: StaticLayer,
        counters: StaticCounters,
        arrays: Sequence[mx.array],
        ops: bool = False,
    ):
        self.layer: StaticLayer | None = layer
        self.counters = counters
        self.ops = ops
        self._watched: Watched | None = Watched(arrays)

    def takes(self, tokens: int) -> bool:
        """Whether a forward of so many tokens goes this way."""
        return self.layer is not None and self.layer.takes(tokens)

    def current(self, arrays: Sequence[mx.array]) -> bool:
        """Whether `arrays`, evaluated, are what was compiled; if not, this path is closed."""
        if self.layer is None:
            return False
        if self._watched is None:
            self._watched = Watched(arrays)
        if self._watched.same(arrays):
            return True
        self.layer = self._watched = None
        self.counters.add(stale=1)
        self.counters.log_once(
            "stale",
            "the weights have changed since they were compiled: the static path is closed; "
            "compile again and replace the layers anew",
        )
        return False

    def run(
        self,
        x: mx.array,
        ids: mx.array,
        scores: mx.array | None,
        cold: Cold,
        width: int,
        dtype: mx.Dtype,
        whole: Callable[[], mx.array] | None = None,
    ) -> mx.array:
        """See static_flow.run."""
        assert self.layer is not None
        return static_flow.run(self.layer, self.counters, x, ids, scores, cold, width, dtype, whole)

    def __deepcopy__(self, memo: dict[int, Any]) -> "StaticPath":
        """Of a copied model: the programs are shared, the weights are watched from now on."""
        other = StaticPath.__new__(StaticPath)
        other.layer, other._watched, other.ops = self.layer, None, self.ops
        cold_groups = self.counters.counts["cold_groups"]
        other.counters = StaticCounters(self.counters.name, set(), cold_groups)
        return other
