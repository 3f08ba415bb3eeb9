"""Which assignments of a forward go to which tile of a static executor."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import core
from .errors import InvalidArgument

Ints = NDArray[np.int32]
Overflow = Literal["spill", "prune"]
Importance = Literal["router", "norm"]
OVERFLOWS = ("spill", "prune")
IMPORTANCES = ("router", "norm")
EXECUTORS = ("host", "coreml")  # backends that run a plan's programs
UNLIMITED = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Group:
    """Experts that share one program.

    Attributes:
        name: the plan's id (of the first part).
        experts: numbers in the layer, int32 [G], in the order of the tile.
        capacities: that the program was compiled for, ascending; the last is the tier.
        programs: the executor's numbers, one for each part of the inner features.
        spill_limit: overflow above it takes another tile.
    """

    name: str
    experts: Ints
    capacities: tuple[int, ...]
    programs: tuple[int, ...]
    spill_limit: int

    def tiles(self, loads: Ints) -> list[int]:
        """Capacities of the tiles that loads [G] take: none for no load, else the smallest that
        fits the largest load, or the tier and, while more than spill_limit is over, another."""
        chosen: list[int] = []
        left = loads
        while (largest := int(left.max(initial=0))) > 0:
            if chosen and int(left.sum()) <= self.spill_limit:
                break
            fits = (c for c in self.capacities if c >= largest)
            chosen.append(next(fits, self.capacities[-1]))
            left = np.maximum(left - chosen[-1], 0)
        return chosen


@dataclass(frozen=True)
class Tile:
    """One tile of a group and the assignments in it, bucket by bucket.

    Attributes:
        order: assignments, int32 [n].
        offsets: where each bucket of `experts` begins in `order`.
        experts: which buckets, int32 [G].
    """

    group: Group
    capacity: int
    order: Ints
    offsets: Ints
    experts: Ints


@dataclass(frozen=True)
class Split:
    """What becomes of every assignment of a forward: in a tile, cold, spilled or pruned.

    Attributes:
        tiles: with the assignments that they hold.
        cold: assignments of experts without a group, bucket by bucket.
        overflow: assignments of hot experts that no tile has room for.
        extra: tiles beyond the first of a group.
    """

    tiles: list[Tile]
    cold: Ints
    overflow: Ints
    extra: int


def tile_load(tile: Tile) -> int:
    """Assignments in a tile."""
    return int((tile.offsets[tile.experts + 1] - tile.offsets[tile.experts]).sum())


@dataclass
class StaticLayer:
    """The static half of a layer.

    Attributes:
        executor: has the groups' programs.
        groups: with distinct experts; all others are cold.
        experts: in the layer.
        static_from: tokens from which this path is taken; None for never.
        cold_groups: of the plan, whose programs the executor does not run.
        most: assignments of each expert that may go into tiles, int32 [E]; evaluation lowers
            it to see what smaller capacities would do.
    """

    name: str
    executor: Any
    groups: Sequence[Group]
    experts: int
    static_from: int | None
    overflow: Overflow = "spill"
    importance: Importance = "router"
    cold_groups: int = 0
    hot: NDArray[np.bool_] = field(init=False, repr=False)
    most: Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.most = np.full(self.experts, UNLIMITED, np.int32)
        self.hot = np.zeros(self.experts, bool)
        for group in self.groups:
            outside = group.experts.size == 0 or group.experts.max() >= self.experts
            if outside or group.experts.min() < 0 or self.hot[group.experts].any():
                raise InvalidArgument(
                    f"{self.name}: group {group.name} has the experts {group.experts.tolist()}; "
                    f"expected ones of {self.experts} that no other group has"
                )
            self.hot[group.experts] = True

    def takes(self, tokens: int) -> bool:
        """Whether a forward of so many tokens goes this way."""
        return bool(self.groups) and self.static_from is not None and tokens >= self.static_from

    def split(self, ids: Any, importance: NDArray[np.float32] | None = None) -> Split:
        """Buckets, capacities and tiles for expert ids [T, k].

        Args:
            importance: by assignment, [T * k]; the highest of a bucket are kept. Without it
                the first are.
        """
        order, offsets = core.bucket(ids, self.experts)
        loads = np.minimum(np.diff(offsets), self.most)
        chosen = [group.tiles(loads[group.experts]) for group in self.groups]
        limits = np.full(self.experts, UNLIMITED, np.int32)
        for group, tiles in zip(self.groups, chosen, strict=True):
            limits[group.experts] = np.minimum(sum(tiles), self.most[group.experts])
        mode: Overflow = "spill" if importance is None else "prune"
        kept, kept_offsets, overflow = core.capacity(order, offsets, limits, importance, mode)
        placed = [
            tile
            for group, tiles in zip(self.groups, chosen, strict=True)
            for tile in _tiles(group, tiles, kept, kept_offsets)
        ]
        cold = kept[np.repeat(~self.hot, np.diff(kept_offsets))]
        return Split(placed, cold, overflow, sum(max(len(tiles) - 1, 0) for tiles in chosen))


def _tiles(group: Group, capacities: list[int], kept: Ints, offsets: Ints) -> list[Tile]:
    """A group's tiles, each with the next assignments of its experts' buckets."""
    if len(capacities) == 1:  # the buckets as they are
        return [Tile(group, capacities[0], kept, offsets, group.experts)]
    tiles = []
    begin, end = offsets[group.experts], offsets[group.experts + 1]
    for capacity in capacities:
        stop = np.minimum(begin + capacity, end)
        parts = [kept[a:b] for a, b in zip(begin, stop, strict=True)]
        own = np.concatenate([[0], np.cumsum(stop - begin)]).astype(np.int32)
        local = np.arange(group.experts.size, dtype=np.int32)
        tiles.append(Tile(group, capacity, np.concatenate(parts), own, local))
        begin = stop
    return tiles
