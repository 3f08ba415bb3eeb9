"""The forward of one expert layer of a store: whole, or in waves if it asks for more than fits."""

import sys
import traceback
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from . import core
from .cache_policies import waves
from .custom import evaluate
from .errors import InvalidArgument
from .store_files import StoredExperts
from .store_forward import Forward

if TYPE_CHECKING:
    from .store import ExpertStore


class StoredLayer:
    """One expert layer of a store.

    Attributes:
        capacity: experts of this layer that the limit can hold at a time.
    """

    def __init__(self, store: "ExpertStore", number: int, experts: StoredExperts):
        self.store, self.number, self.experts = store, number, experts
        self.capacity = store.memory // store._core.slot_bytes[number]

    def __deepcopy__(self, memo: dict[int, Any]) -> "StoredLayer":
        return self

    def run(
        self, x: mx.array, ids: mx.array, scores: mx.array | None, forward: Forward
    ) -> mx.array:
        """Outputs [T, k, D], or their weighted sum [T, D] where there are scores.

        The bits are those of `forward` with all experts in memory, whatever the limit.

        Args:
            x: [T, K], evaluated and contiguous.
            ids: uint32 or int32 [T, k], evaluated.
            scores: [T, k], evaluated, or None.
            forward: the arithmetic, see `store_forward`.

        Raises:
            ReadFailed, FileChanged, StoreBusy, StoreClosed: see errors.
        """
        handled = sys.exc_info()[1]  # the caller's, while it calls us
        try:
            found = self._run(x, np.array(ids), ids, scores, forward)
        except BaseException as error:  # in a forked child always
            _let_go(error, handled)
            raise
        if self.number == 0:
            self.store.keep_counts()
        return found

    def _run(
        self,
        x: mx.array,
        chosen: NDArray[Any],
        ids: mx.array,
        scores: mx.array | None,
        forward: Forward,
    ) -> mx.array:
        store = self.store
        if chosen.size > self.capacity:
            wanted = np.unique(chosen).astype(np.int64)
            if len(wanted) > self.capacity:
                if not 0 <= wanted[0] <= wanted[-1] < self.experts.experts:
                    raise InvalidArgument(
                        f"{self.experts.name}: expert {wanted[-1]} of {self.experts.experts}"
                    )
                store.ahead.routed(self.number, chosen)
                return self._in_waves(x, chosen, scores, forward, wanted)
        with store._core.acquire(self.number, chosen) as held:  # which checks the experts
            store.ahead.routed(self.number, chosen)
            store.ahead.guess(self.number, chosen)
            return forward.whole(x, ids, scores, held.matrices)

    def _held(self, experts: NDArray[np.int64]) -> core.Acquired:
        return self.store._core.acquire(self.number, experts.astype(np.int32))

    def _in_waves(
        self,
        x: mx.array,
        ids: NDArray[Any],
        scores: mx.array | None,
        forward: Forward,
        wanted: NDArray[np.int64],
    ) -> mx.array:
        """Some experts at a time; what they give is put in the order of the assignments at last."""
        reader, k = self.store._core, ids.shape[1]
        there = np.isin(wanted, reader.resident(self.number))
        parts = waves(wanted, there, self.capacity)
        block = None if scores is None else forward.bucketed
        flat, y = ids.reshape(-1), None
        for i, part in enumerate(parts):
            with self._held(part) as held:
                if i + 1 < len(parts):
                    reader.prefetch(self.number, parts[i + 1].astype(np.int32))
                for place in _blocks(np.flatnonzero(np.isin(flat, part)), block, k):
                    tokens, experts = mx.array(place // k), mx.array(flat[place][:, None])
                    rows = forward.rows(x[tokens], experts, held.matrices)
                    if y is None:
                        y = mx.zeros((len(flat), rows.shape[-1]), rows.dtype)
                    evaluate(rows, y)
                    _bits(y)[place] = _bits(rows)
                matrices = held.matrices if i + 1 == len(parts) else None
        assert y is not None
        y = y.reshape(*ids.shape, -1)
        evaluate(y)
        assert matrices is not None
        return y if scores is None else forward.weighted(y, scores, matrices)


def _let_go(error: BaseException, handled: BaseException | None) -> None:
    """Whoever keeps an error keeps the frames that it came through; these let go of slots.

    handled: what came before, whose frames are not ours.
    """
    causes = [error]
    for cause in causes:
        traceback.clear_frames(cause.__traceback__)
        for before in (cause.__cause__, cause.__context__):
            if before is not None and before is not handled and before not in causes:
                causes.append(before)


def _bits(array: mx.array) -> NDArray[Any]:
    """The memory of an evaluated array, by row; writable."""
    return np.array(array.view({2: mx.uint16, 4: mx.uint32}[array.itemsize]), copy=False)


def _blocks(places: NDArray[Any], tokens: int | None, k: int) -> list[NDArray[Any]]:
    """Assignments that the kernels would bucket together with all experts in memory."""
    if tokens is None:
        return [places]
    edges = np.flatnonzero(np.diff(places // (tokens * k))) + 1
    return [block for block in np.split(places, edges) if len(block)]
