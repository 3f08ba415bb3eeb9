"""Which rank has which experts, or slices of them along their inner features (ff)."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .schedule import Experts, Unit, place

Parts = NDArray[np.uint32]  # [E, ranks], of `shards` equal parts of each expert

WHOLE_LANES = 64  # inner features that the kernels like to have together
ROOM = 1.1  # times its even share of the experts' bytes that a rank may hold
DISPATCH = 1.0  # assignments that an expert with work costs beside them
SPLIT_GAIN = 0.01  # of a layer's time that cutting an expert must save


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
        parts = _scheduled(load, ranks, shards)
    return Placement(parts, shards, inner, unit)


def _scheduled(load: NDArray[np.float64], ranks: int, shards: int) -> Parts:
    """By the scheduler, for ranks that are equally fast: time counts in assignments."""
    room = max(ROOM * len(load) / ranks, -(-len(load) // ranks))
    units = [Unit(f"rank {rank}", 1.0, DISPATCH, memory=room) for rank in range(ranks)]
    experts = Experts(len(load), nbytes=1.0, shards=shards)
    return place(load, units, experts, split_gain=SPLIT_GAIN).parts
