"""Counts of one expert layer's routing, in memory that does not grow with the text but for one
row of loads to a chunk."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# A logarithmic bin is the exponent of a float32 with its first mantissa bits: 64 to an octave.
MANTISSA_BITS = 6
SHIFT = 23 - MANTISSA_BITS
BINS_PER_OCTAVE = 1 << MANTISSA_BITS
LOWEST = (127 - 24) * BINS_PER_OCTAVE  # 2^-24; what is smaller counts as that
HIGHEST = (127 + 40) * BINS_PER_OCTAVE - 1  # 2^40; what is larger counts as that
# Of a quantile, relative: half a bin, within 2^-24 and 2^40.
QUANTILE_ERROR = 0.5 / BINS_PER_OCTAVE
PENDING = 1 << 16  # assignments that are counted at a time


def log_bins(values: Array) -> NDArray[np.uint16]:
    """The bins of the magnitudes of float32 values, of any shape."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & 0x7FFFFFFF
    return np.clip(bits >> SHIFT, LOWEST, HIGHEST).astype(np.uint16)


class LogHistograms:
    """For each of E experts how many values fell into each bin; as wide as the values need."""

    def __init__(self, experts: int):
        self.first = 0  # the bin that column 0 stands for
        self.counts: Array = np.zeros((experts, 0), np.uint32)

    def add(self, experts: Array, bins: Array) -> None:
        """Count bins[i] for experts[i]; both flat."""
        if not len(bins):
            return
        self._cover(int(bins.min()), int(bins.max()))
        rows, width = self.counts.shape
        codes = experts.astype(np.int64) * width + (bins.astype(np.int64) - self.first)
        counted = np.bincount(codes, minlength=rows * width).reshape(rows, width)
        self.counts += counted.astype(np.uint32)

    def _cover(self, low: int, high: int) -> None:
        width = self.counts.shape[1]
        if not width:
            self.first = low
        before = max(0, self.first - low)
        after = max(0, high + 1 - self.first - width)
        if before or after:
            self.counts = np.pad(self.counts, ((0, 0), (before, after)))
            self.first -= before

    def quantiles(self, probabilities: tuple[float, ...]) -> NDArray[np.float32]:
        """[E, Q]: the middle of the bin that holds the ceil(p * n)-th smallest of n values.

        NaN for an expert without values. The relative error is at most QUANTILE_ERROR.
        """
        experts, width = self.counts.shape
        result = np.full((experts, len(probabilities)), np.nan, np.float32)
        if not width:
            return result
        below = self.counts.cumsum(axis=1, dtype=np.int64)
        total = below[:, -1]
        edges = (np.arange(self.first, self.first + width + 1, dtype=np.uint32) << SHIFT).view(
            np.float32
        )
        middles = (edges[:-1] + edges[1:]) / 2
        for q, probability in enumerate(probabilities):
            rank = np.clip(np.ceil(probability * total), 1, None)
            at = (below >= rank[:, None]).argmax(axis=1)
            result[:, q] = np.where(total > 0, middles[at], np.nan)
        return result


class LayerCounts:
    """What one layer of E experts did: a forward is staged, then committed as one chunk.

    Attributes:
        loads: uint32 [E] for each committed chunk.
        scored: whether scores came with every forward so far.
    """

    def __init__(self, experts: int):
        self.experts = experts
        self.loads: list[NDArray[np.uint32]] = []
        self.scored = True
        self.scores, self.norms = LogHistograms(experts), LogHistograms(experts)
        # Ordered pairs of slots; row and column E are assignments that do not count.
        self._pairs = np.zeros((experts + 1) ** 2, np.uint64)
        self._staged: list[tuple[Array, Array, Array | None]] = []
        self._pending: list[tuple[Array, Array, Array | None]] = []
        self._assignments = 0

    def stage(self, ids: Array, norms: Array, scores: Array | None = None) -> None:
        """One forward: ids [T, k] (E and more do not count), norms [T], scores [T, k]."""
        ids = np.minimum(ids, self.experts).astype(np.int32)
        if scores is None:
            self._staged.append((ids, log_bins(norms), None))
            return
        ids[scores == 0] = self.experts
        self._staged.append((ids, log_bins(norms), log_bins(scores)))

    def discard(self) -> None:
        """Forget what is staged."""
        self._staged = []

    def commit(self) -> None:
        """Count what is staged as one chunk."""
        row = np.zeros(self.experts + 1, np.int64)
        for ids, _, scores in self._staged:
            row += np.bincount(ids.ravel(), minlength=self.experts + 1)
            self.scored = self.scored and scores is not None
            self._assignments += ids.size
        self.loads.append(row[:-1].astype(np.uint32))
        self._pending += self._staged
        self._staged = []
        if self._assignments >= PENDING:
            self.flush()

    def flush(self) -> None:
        """Count what was put off: many chunks at a time cost less than each alone."""
        groups: dict[tuple[int, bool], list[tuple[Array, Array, Array | None]]] = {}
        for forward in self._pending:
            groups.setdefault((forward[0].shape[1], forward[2] is None), []).append(forward)
        for forwards in groups.values():
            ids = np.concatenate([f[0] for f in forwards])
            counts = ids < self.experts
            rows = np.nonzero(counts)[0]
            self.norms.add(ids[counts], np.concatenate([f[1] for f in forwards])[rows])
            scores = [f[2] for f in forwards if f[2] is not None]
            if scores:
                self.scores.add(ids[counts], np.concatenate(scores)[counts])
            self._count_pairs(ids)
        self._pending, self._assignments = [], 0

    def _count_pairs(self, ids: Array) -> None:
        first, second = np.triu_indices(ids.shape[1], 1)
        codes = ids[:, first] * (self.experts + 1) + ids[:, second]
        counted = np.bincount(codes.ravel(), minlength=len(self._pairs))
        self._pairs += counted.astype(np.uint64)

    def coactivation(self) -> NDArray[np.uint64]:
        """[E, E]: tokens that went to both; on the diagonal the expert's assignments."""
        self.flush()
        pairs = self._pairs.reshape(self.experts + 1, -1)[:-1, :-1]
        together = pairs + pairs.T
        totals = np.sum(self.loads, axis=0, dtype=np.uint64) if self.loads else 0
        np.fill_diagonal(together, totals)
        return together

    def state(self) -> dict[str, Array]:
        """Everything that is committed, as arrays."""
        self.flush()
        return {
            "loads": np.array(self.loads, np.uint32).reshape(-1, self.experts),
            "pairs": self._pairs,
            "scored": np.array(self.scored),
            "scores": self.scores.counts,
            "scores_first": np.array(self.scores.first),
            "norms": self.norms.counts,
            "norms_first": np.array(self.norms.first),
        }

    def set_state(self, state: dict[str, Array]) -> None:
        """What `state` gave; ValueError or KeyError if it is of another shape."""
        if state["pairs"].shape != self._pairs.shape or state["loads"].shape[1] != self.experts:
            raise ValueError(f"not the counts of {self.experts} experts")
        self.loads = list(state["loads"].astype(np.uint32))
        self._pairs = state["pairs"].astype(np.uint64)
        self.scored = bool(state["scored"])
        for name in ("scores", "norms"):
            histograms: LogHistograms = getattr(self, name)
            histograms.counts = state[name].astype(np.uint32).reshape(self.experts, -1)
            histograms.first = int(state[f"{name}_first"])
