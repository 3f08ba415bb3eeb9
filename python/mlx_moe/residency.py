"""Which experts are hot: where the static executor wins, within a memory budget."""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .cost import Expert, cold_seconds, layer_seconds, package_experts, tile_seconds
from .devices import Device
from .tiers import Tiers

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SharedCost:
    """A layer's shared expert, in seconds of a chunk."""

    static: float
    cold: float
    bytes: int


@dataclass(frozen=True)
class Point:
    """A choice for one layer: the first `count` experts of a curve's order, and the shared one."""

    count: int
    shared: bool
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Curve:
    """What a layer takes with more and more experts hot.

    Attributes:
        order: experts by what the cold path saves, or saves for each second of the static
            executor; those that it does not win for after them, by load.
        winners: how many of them the static executor wins for.
        hot: [E + 1], share of all assignments computed statically with the first n hot.
        points: choices among the winners, the first with nothing hot.
        expert_bytes, shared_bytes: of each hot copy; None where there is no shared expert.
    """

    order: Ints
    winners: int
    hot: Array
    points: list[Point]
    expert_bytes: int
    shared_bytes: int | None

    @property
    def cold(self) -> float:
        """Seconds with nothing hot."""
        return self.points[0].seconds

    def best(self, budget: float = np.inf) -> Point:
        """The fastest choice of at most `budget` bytes; of equals the smallest."""
        fits = [point for point in self.points if point.bytes <= budget]
        return min(fits, key=lambda p: (p.seconds, p.bytes))


def curve(
    device: Device,
    expert: Expert,
    weights: str,
    loads: Array,
    tiers: Tiers,
    shared: SharedCost | None = None,
) -> Curve:
    """Expected seconds of a layer for loads [chunks, E] and every number of hot experts.

    Groups are not known yet: as many programs are dispatched as packages of each tier are full,
    at the tier's capacity.
    """
    most, parts = package_experts(device, expert, weights)
    capacity = tiers.of_expert.astype(np.float64)
    over = np.maximum(loads - capacity, 0)
    cold, spilled = cold_seconds(device, expert, loads), cold_seconds(device, expert, over)
    busy = tile_seconds(device, expert, weights, capacity)

    saved = (cold - spilled).mean(axis=0)
    spent = busy + parts * device["dispatch_seconds"] / most
    wins = saved > spent
    winners = int(wins.sum())
    size = expert.static_bytes(weights)
    kept = (loads - over).mean(axis=0) / max(loads.mean(axis=0).sum(), 1e-12)

    best: Curve | None = None
    for gain in (saved, saved / spent):  # which is better depends on which path is the longer
        order = np.lexsort((-np.where(wins, gain, loads.mean(axis=0)), ~wins))
        programs = parts * _programs(tiers, order, most)
        static = _first(busy[order]) + device["dispatch_seconds"] * programs
        left = cold.sum(axis=1, keepdims=True) - _first((cold - spilled)[:, order])
        points = _points(device, static[: winners + 1], left[:, : winners + 1], size, shared)
        shared_bytes = shared.bytes if shared else None
        found = Curve(order, winners, _first(kept[order]), points, size, shared_bytes)
        if best is None or found.best().seconds < best.best().seconds:
            best = found
    assert best is not None
    return best


def _points(
    device: Device, static: Array, left: Array, size: int, shared: SharedCost | None
) -> list[Point]:
    """Choices for static seconds [n + 1] and cold ones [chunks, n + 1] with 0 to n hot experts."""
    points = []
    for hot in (False, True) if shared else (False,):
        beside = shared or SharedCost(0, 0, 0)
        more_static = beside.static if hot else 0
        more_cold = 0 if hot else beside.cold
        seconds = layer_seconds(device, static + more_static, left + more_cold).mean(axis=0)
        points += [
            Point(n, hot, n * size + (beside.bytes if hot else 0), float(each))
            for n, each in enumerate(seconds)
        ]
    return points


def _first(values: Array) -> Array:
    """Sums of the first 0, 1, ... values along the last axis."""
    sums = np.cumsum(values, axis=-1)
    return np.concatenate([np.zeros_like(sums[..., :1]), sums], axis=-1)


def _programs(tiers: Tiers, order: Ints, most: int) -> Array:
    """Packages needed for the first n experts of an order, each of one tier."""
    total = np.zeros(len(order) + 1)
    for capacity in tiers.capacities:
        total += np.ceil(_first((tiers.of_expert[order] == capacity).astype(np.float64)) / most)
    return total


def spend(curves: list[Curve], budget: float) -> list[Point]:
    """A choice for every layer, together at most `budget` bytes, by benefit per byte.

    Layers first take the steps along the lower hull of their curves, steepest first; a layer
    whose next step is too large takes the best that still fits.
    """
    chosen = [curve.points[0] for curve in curves]
    hulls = [_hull(curve.points) for curve in curves]
    steps: list[tuple[float, int, int]] = []
    for layer, hull in enumerate(hulls):
        _push(steps, layer, hull, 1)
    left = budget
    while steps:
        _, layer, step = heapq.heappop(steps)
        target = hulls[layer][step]
        if target.bytes - chosen[layer].bytes <= left:
            left -= target.bytes - chosen[layer].bytes
            chosen[layer] = target
            _push(steps, layer, hulls[layer], step + 1)
            continue
        best = curves[layer].best(chosen[layer].bytes + left)
        if best.seconds < chosen[layer].seconds:
            left -= best.bytes - chosen[layer].bytes
            chosen[layer] = best
    return chosen


def _push(steps: list[tuple[float, int, int]], layer: int, hull: list[Point], step: int) -> None:
    if step < len(hull):
        here, there = hull[step - 1], hull[step]
        slope = (there.seconds - here.seconds) / (there.bytes - here.bytes)
        heapq.heappush(steps, (slope, layer, step))


def _hull(points: list[Point]) -> list[Point]:
    """The lower convex hull from the first point down to the fastest."""
    hull: list[Point] = []
    for point in sorted(points, key=lambda p: (p.bytes, p.seconds)):
        if hull and point.seconds >= hull[-1].seconds:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        if hull and point.bytes == hull[-1].bytes:
            continue
        hull.append(point)
    return hull


def _above(a: Point, b: Point, c: Point) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b.seconds - a.seconds) * (c.bytes - a.bytes) >= (c.seconds - a.seconds) * (
        b.bytes - a.bytes
    )
