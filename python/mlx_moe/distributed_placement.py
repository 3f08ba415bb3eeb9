"""Which rank has which experts, or slices of them along their inner features (ff)."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Parts = NDArray[np.uint32]  # [E, ranks], of `shards` equal parts of each expert

WHOLE_LANES = 64  # inner features that the kernels like to have together


@dataclass(frozen=True)
class Slice:
    """Inner features begin to end of one expert."""

    expert: int
    begin: int
    end: int


@dataclass(frozen=True)
class Placement:
    """Who has what of one layer.

    Attributes:
        parts: shards of each expert on each rank, [E, ranks]; rank 0's come first along ff.
        shards: that every expert is cut into; 1 where they cannot be cut.
        inner, unit: inner features, and the number that cuts are multiples of.
    """

    parts: Parts
    shards: int
    inner: int
    unit: int

    def slices(self, rank: int) -> list[Slice]:
        """What a rank holds."""
        ends = np.cumsum(self.parts.astype(np.int64), axis=1)
        begins = ends - self.parts
        return [
            Slice(e, self._cut(begins[e, rank]), self._cut(ends[e, rank]))
            for e in range(len(self.parts))
            if self.parts[e, rank]
        ]

    def _cut(self, shard: int) -> int:
        blocks = self.inner // self.unit
        return (
            self.inner if shard == self.shards else int(shard) * blocks // self.shards * self.unit
        )

    def share(self, rank: int) -> float:
        """Of all the layer's expert bytes."""
        held = sum(s.end - s.begin for s in self.slices(rank))
        return held / (len(self.parts) * self.inner)


def unit_of(inner: int, group_size: int) -> int:
    """Cuts are made where a quantisation group of the down projection ends (0: not quantised)."""
    lanes = math.lcm(WHOLE_LANES, group_size or 1)
    return lanes if inner % lanes == 0 else group_size or 1


def place_layer(
    load: NDArray[np.float64], ranks: int, inner: int, group_size: int, split: str
) -> Placement:
    """Place a layer's experts so that no rank has to wait long for another.

    Args:
        load: [E], assignments that are expected of each expert.
        split: "all", "none", or "auto".
    """
    unit = unit_of(inner, group_size)
    cut = split != "none" and inner // unit >= ranks
    shards = ranks if cut else 1
    if cut and split == "all":
        parts = np.ones((len(load), ranks), np.uint32)
    else:
        parts = place(load, ranks, shards)
    return Placement(parts, shards, inner, unit)


def place(load: NDArray[np.float64], ranks: int, shards: int) -> Parts:
    """Longest first to the rank that has least to do and room; what is left over of an even
    number for each rank, and the expert that one would wait for, is cut where that is possible."""
    count = len(load)
    cut = shards == ranks
    left_over = count % ranks if cut else 0
    room = np.full(ranks, -(-(count - left_over) // ranks))
    order = np.argsort(-load, kind="stable")
    parts = np.zeros((count, ranks), np.uint32)
    todo = np.zeros(ranks)
    for place, expert in enumerate(order):
        if place < left_over:  # the hottest
            parts[expert] = 1
            todo += load[expert] / ranks
            continue
        rank = min((r for r in range(ranks) if room[r]), key=lambda r: (todo[r], r))
        parts[expert, rank] = shards
        todo[rank] += load[expert]
        room[rank] -= 1
    if cut:
        _cut_hot(load, parts, todo)
    return parts


def _cut_hot(load: NDArray[np.float64], parts: Parts, todo: NDArray[np.float64]) -> None:
    """Cut an expert of each rank at a time, the hottest ones, while that evens the work."""
    ranks = parts.shape[1]
    while todo.max() > 1.02 * todo.mean():
        hottest = []
        for rank in range(ranks):
            whole = np.flatnonzero(parts[:, rank] > 1)
            if not len(whole):
                return
            hottest.append(whole[np.argmax(load[whole])])
        after = todo.copy()
        for rank, expert in enumerate(hottest):
            after += load[expert] / ranks
            after[rank] -= load[expert]
        if after.max() >= todo.max():
            return
        parts[hottest] = 1
        todo[:] = after
