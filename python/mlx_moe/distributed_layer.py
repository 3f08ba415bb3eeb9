"""The forward of an expert layer of which every rank has a part: partial sums, added up."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from . import core
from .custom import CannotEvaluate, eager, evaluate, token_rows
from .deferred import Deferred
from .distributed import CHECKS, Ranks
from .distributed_placement import Placement, Slice
from .errors import InvalidArgument, RankMismatch
from .layers import PROJECTIONS, Layer, replaced_class
from .stats import Counters, RankCounters
from .store_files import PARTS
from .weights import FLOATS, own_class, promote

log = logging.getLogger("mlx_moe")


class PartCounters(Counters):
    """Counts what the parts of a layer run, not that they were called."""

    def __init__(self, whole: Counters):
        super().__init__(whole.name, whole._logged)
        self._whole = whole

    def called(self, tokens: int) -> None:
        pass

    def ran(self, kernels: int) -> None:
        self._whole.ran(kernels)

    def left_small(self) -> None:
        self._whole.left_small()

    def fell_back(self, reason: str, detail: str) -> None:
        self._whole.fell_back(reason, detail)


def matching_rows(ids: NDArray[Any], own: NDArray[Any]) -> NDArray[np.int32]:
    """[T * k]: for each assignment of `own` [T, k] the row of the same one of `ids` [T, k].

    Those of other experts, which scores a rounding apart choose, take what is left over.
    """
    order = np.zeros_like(own)
    for row, (theirs, mine) in enumerate(zip(ids.tolist(), own.tolist(), strict=True)):
        left = list(range(len(theirs)))
        found = {}
        for at, expert in enumerate(mine):
            if (there := next((i for i in left if theirs[i] == expert), None)) is not None:
                left.remove(there)
                found[at] = there
        order[row] = [found[at] if at in found else left.pop(0) for at in range(len(mine))]
    first = np.arange(len(ids), dtype=np.int32)[:, None] * ids.shape[1]
    return (first + order).reshape(-1).astype(np.int32)


@dataclass
class Part:
    """Slices of one width, as a replaced expert layer of their own.

    Attributes:
        module: its experts are the slices.
        table: int32 [E], the number here of each of the layer's experts, -1 for none.
    """

    module: Any
    table: NDArray[np.int32]
    lazy_table: mx.array = field(init=False)

    def __post_init__(self) -> None:
        self.lazy_table = mx.array(self.table)
        mx.eval(self.lazy_table)

    @classmethod
    def of(cls, module: Any, layer: Layer, pieces: Sequence[Slice], experts: int) -> "Part":
        """Take over a module that has the slices as its experts."""
        own = Layer(layer.name, layer.kind, True, PartCounters(layer.counters))
        own.linears, own.swiglus = layer.linears, layer.swiglus
        module.__dict__["_moe_layer"] = own
        module.__dict__["_training"] = False  # model.eval() does not come here; the layer checks
        module.__class__ = replaced_class(own_class(module))
        table = np.full(experts, -1, np.int32)
        table[[piece.expert for piece in pieces]] = np.arange(len(pieces), dtype=np.int32)
        return cls(module, table)

    def rows(self, x: mx.array, ids: NDArray[Any]) -> mx.array:
        """Outputs [n, D] for x [T, K] and ids [T, m] with n = T * m."""
        y = self.module(x, mx.array(ids))
        y = y.__mlx_array__() if isinstance(y, Deferred) else y
        return mx.contiguous(y.reshape(-1, y.shape[-1]))

    def sums(self, x: mx.array, ids: NDArray[Any], scores: NDArray[Any]) -> mx.array:
        """Weighted sums f32 [T, D]."""
        return (self.module(x, mx.array(ids)) * mx.array(scores)[..., None]).sum(axis=-2)


class RankedExperts:
    """One expert layer of several ranks.

    Attributes:
        parts: what this rank holds.
        nbytes, total_bytes: of this rank's expert weights, and of the whole layer's.
        eager: run at once on the kernels; otherwise as a lazy MLX graph.
    """

    def __init__(
        self,
        ranks: Ranks,
        number: int,
        layer: Layer,
        placement: Placement,
        parts: Sequence[Part],
        *,
        eager: bool,
        nbytes: int,
        total_bytes: int,
    ):
        self.ranks, self.number, self.name, self.kind = ranks, number, layer.name, layer.kind
        self.placement, self.parts, self.eager = placement, list(parts), eager
        self.nbytes, self.total_bytes = nbytes, total_bytes
        self.calls = 0
        self.counters = RankCounters(ranks.size)
        self.held: dict[tuple[str, str], mx.array] = {}  # placeholders on the module
        self.originals: dict[tuple[str, str], mx.array] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "RankedExperts":
        return self

    def forward(self, module: Any, layer: Layer, x: mx.array, indices: mx.array) -> Any:
        """As `layers.forward`."""
        self._check(module, x, indices)
        call = RankedCall(self, module, layer, x, indices)
        return Deferred(call) if layer.deferred else call.run()

    def _check(self, module: Any, x: mx.array, indices: mx.array) -> None:
        if module.training:
            raise InvalidArgument(
                f"{self.name}: training is not supported while its experts are shared over ranks; "
                "model.eval(), or load the model without group"
            )
        for (child, part), array in self.held.items():
            if module[child].get(part) is not array:
                raise InvalidArgument(
                    f"{self.name}.{child}: weights, adapters or sharding came after the experts "
                    "were shared over ranks; do that before replace_moe_layers(group=...)"
                )
        if x.dtype not in FLOATS or x.shape[:-1] != indices.shape[:-1] or x.ndim < 2:
            raise InvalidArgument(
                f"{self.name}: x is {x.dtype} {list(x.shape)} and the indices "
                f"{list(indices.shape)}: one row of experts for each row of x is expected"
            )

    def partial(
        self,
        x: mx.array,
        ids: NDArray[Any],
        scores: NDArray[np.float32] | None,
        out: NDArray[np.float32],
    ) -> None:
        """Write this rank's part: sums [T, D], or rows [T * k, D] where there are no scores.

        x [T, K] evaluated; out holds zeros.
        """
        k, flat = ids.shape[1], ids.reshape(-1)
        rows, places = [], []
        for part in self.parts:
            local = part.table[ids]
            here = local >= 0
            if not here.any():
                continue
            if scores is not None and (len(ids) == 1 or here.all()):
                mine, weights = local[here].reshape(len(ids), -1), scores[here]
                out += np.array(part.sums(x, mine, weights.reshape(mine.shape)))
                continue
            place = np.flatnonzero(here).astype(np.int32)
            found = part.rows(x[mx.array(place // k)], part.table[flat[place]][:, None])
            if scores is None:
                out[place] += np.array(found.astype(mx.float32))
            else:
                rows.append(found)
                places.append(place)
        if rows and scores is not None:
            evaluate(*rows)
            core.combine(rows, places, scores, out, True)


class RankedCall:
    """One forward (see `deferred.Experts`)."""

    def __init__(
        self, experts: RankedExperts, module: Any, layer: Layer, x: mx.array, indices: mx.array
    ):
        self.experts, self.module, self.layer, self.x = experts, module, layer, x
        self.indices = indices
        self.observer = layer.observer
        linears = [module[child] for child in PROJECTIONS[layer.kind]]
        self.shape = (*indices.shape, int(linears[-1]["weight"].shape[-2]))
        floats = [a.dtype for linear in linears for a in map(linear.get, PARTS) if a is not None]
        self.dtype = promote(x.dtype, *[dtype for dtype in floats if dtype in FLOATS])

    def run(self, scores: mx.array | None = None) -> mx.array:
        if self.observer is not None:
            observer, self.observer = self.observer, None
            observer(self.module, self.layer, self.x, self.indices, scores)
        given = [self.x] if scores is None else [self.x, scores]

        def derivative(*_: mx.array) -> mx.array:
            raise InvalidArgument(
                f"{self.layer.name}: there are no gradients while its experts are shared over ranks"
            )

        if not self.experts.eager:
            return eager(self._lazy, derivative, given)
        try:
            return eager(self._compute, derivative, given)
        except CannotEvaluate:
            return eager(self._lazy, derivative, given)

    def _result(self, scores: mx.array | None) -> tuple[tuple[int, ...], mx.Dtype]:
        if scores is None:
            return self.shape, self.dtype
        return (*self.shape[:-2], self.shape[-1]), promote(self.dtype, scores.dtype)

    def _compute(self, x: mx.array, scores: mx.array | None = None) -> mx.array:
        k = self.indices.shape[-1]
        x = token_rows(x, x.shape[-1])
        ids = token_rows(self.indices.astype(mx.int32), k)
        weights = None if scores is None else token_rows(scores.astype(mx.float32), k)
        evaluate(x, ids, *([] if weights is None else [weights]))
        chosen, shares = np.array(ids), None if weights is None else np.array(weights)
        shape, dtype = self._result(scores)
        if not chosen.size:
            return mx.zeros(shape, dtype)
        total = self._summed(x, chosen, shares)
        return total.reshape(shape).astype(dtype)

    def _summed(
        self, x: mx.array, own: NDArray[Any], scores: NDArray[np.float32] | None
    ) -> mx.array:
        """The sum over ranks, f32 and flat, by rank 0's routing."""
        experts, ranks = self.experts, self.experts.ranks
        experts.calls += 1
        what = f"{experts.name}, call {experts.calls}"
        ids = own
        if ranks.sends_routing:
            x, ids, scores = self._of_first(x, own, scores, what)
        total, alike = self._attempt(x, ids, scores, what)
        if not alike and not ranks.sends_routing:
            ranks.sends_routing = True  # all ranks saw the same sum: they all do this
            log.warning(
                "%s: the ranks route differently; from here on rank 0 sends its routing, which "
                "takes a message more for each layer",
                experts.name,
            )
            x, ids, scores = self._of_first(x, own, scores, what)
            total, alike = self._attempt(x, ids, scores, what)
        if not alike:
            raise RankMismatch(
                f"{what}: the ranks are not at the same place of the same program; start all of "
                "them with the same command"
            )
        if ids is not own and scores is None:  # the block weighs the rows by its own scores
            total = total.reshape(ids.size, -1)[mx.array(matching_rows(ids, own))].reshape(-1)
        return total

    def _of_first(
        self, x: mx.array, ids: NDArray[Any], scores: NDArray[np.float32] | None, what: str
    ) -> tuple[mx.array, NDArray[Any], NDArray[np.float32] | None]:
        """Rank 0's. With its x too, what it gets does not depend on what the others make of theirs:
        blocks weigh the rows of families that do not hand us their scores by each rank's own."""
        own = [x, mx.array(ids), *([] if scores is None else [mx.array(scores)])]
        x, sent, *weights = self.experts.ranks.routing(*own, what=what)
        return x, np.array(sent), np.array(weights[0]) if weights else None

    def _attempt(
        self, x: mx.array, ids: NDArray[Any], scores: NDArray[np.float32] | None, what: str
    ) -> tuple[mx.array, bool]:
        """The sum, and whether all ranks computed theirs from the same routing."""
        experts, ranks, width = self.experts, self.experts.ranks, self.shape[-1]
        begun = perf_counter()
        if ids.min() < 0 or ids.max() >= len(experts.placement.parts):
            raise InvalidArgument(
                f"{experts.name}: expert {ids.max()} of {len(experts.placement.parts)}"
            )
        rows = ids.size if scores is None else len(ids)
        buffer = np.zeros(rows * width + CHECKS, np.float32)
        experts.partial(x, ids, scores, buffer[:-CHECKS].reshape(rows, width))
        facts = (experts.number, experts.calls, ids.shape, ids)
        buffer[-CHECKS:] = ranks.checksums(*facts, *([] if scores is None else [scores]))
        computed = perf_counter()
        total = ranks.all_sum(mx.array(buffer), what)
        done = perf_counter()
        experts.counters.add(len(ids), done - begun, done - computed)
        alike = not np.array(total, copy=False)[-CHECKS:].any()
        return total[:-CHECKS], alike

    def _lazy(self, x: mx.array, scores: mx.array | None = None) -> mx.array:
        """A graph of stock's operations; assignments of others' experts are computed with this
        rank's first one and left out."""
        ranks, ids = self.experts.ranks, self.indices.astype(mx.int32)
        if ranks.sends_routing:
            x, ids, *sent = ranks.lazy_routing(x, ids, *([] if scores is None else [scores]))
            scores = sent[0] if sent else None
        total = mx.zeros(self.shape, mx.float32)
        for part in self.experts.parts:
            local = part.lazy_table[ids]
            y = own_class(part.module).__call__(part.module, x, mx.maximum(local, 0))
            total += mx.where((local >= 0)[..., None], y, 0)
        if scores is not None:
            total = (total * scores).sum(axis=-2)
        total = ranks.lazy_sum(total)
        if ranks.sends_routing and scores is None:  # as `matching_rows`, a place for a place
            same = self.indices.astype(mx.int32)[..., :, None] == ids[..., None, :]
            places = mx.where(same.any(axis=-1), same.argmax(axis=-1), mx.arange(ids.shape[-1]))
            total = mx.take_along_axis(total, places[..., None], axis=-2)
        return total.astype(self._result(scores)[1])
