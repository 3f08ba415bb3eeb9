"""What overflow costs beside empty slots, and the tiers that follow: fastest, or at a target."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .cost import Expert, slot_seconds, tile_seconds
from .devices import Device
from .residency import Curve, SharedCost, curve
from .tiers import Ints, Tiers, best_set, expected_overflow, grid, price_for_overflow

Array = NDArray[np.float64]
PRICES = (1.0, 2.0, 4.0, 8.0, 16.0, 50.0)  # slots an overflow assignment, tried for speed
NEARLY = 1.005  # as fast: then the tiers with less overflow
EMPTY = 0.05  # of a slot's time, for one that takes none: it is still filled and copied
FORCED_OVERFLOW = 0.01  # aimed at where hot experts are forced and nothing else is asked for
TIMED_CHUNKS = 48  # of the calibration, to compare prices by
REFITS, FEWEST_REFIT = 3, 4  # times, and experts
ROUNDS = 8  # of halving the price's logarithm


@dataclass(frozen=True)
class Table:
    """A layer's experts at every capacity.

    Attributes:
        capacities: ascending.
        overflow: [E, len(capacities)], expected beyond each.
        slots: what each capacity costs, in slots; None: itself.
        per_tier: what a tier costs, in slots.
    """

    capacities: Ints
    overflow: Array
    slots: Array | None = None
    per_tier: float = 0.0

    def best(self, max_tiers: int, price: float) -> Tiers:
        return best_set(self.capacities, self.overflow, max_tiers, price, self.slots, self.per_tier)

    def beyond(self, tiers: Tiers) -> float:
        """Expected overflow of a chunk at these tiers."""
        taken = np.searchsorted(self.capacities, tiers.of_expert)
        return float(np.take_along_axis(self.overflow, taken[:, None], axis=1).sum())


@dataclass(frozen=True)
class Timing:
    """Of one layer, what time depends on beside its loads."""

    device: Device
    expert: Expert
    weights: str
    shared: SharedCost | None

    def table(self, loads: Array, capacities: Ints | None = None) -> Table:
        """Costs in time: few slots take no less than the weights take to read."""
        plain = table(loads, capacities)
        slot = slot_seconds(self.device, self.expert)
        tiles = tile_seconds(
            self.device, self.expert, self.weights, plain.capacities.astype(np.float64)
        )
        slots = tiles / slot + EMPTY * plain.capacities
        return replace(plain, slots=slots, per_tier=self.device["dispatch_seconds"] / slot)


def table(loads: Array, capacities: Ints | None = None) -> Table:
    """Costs in slots."""
    capacities = grid(loads) if capacities is None else capacities
    return Table(capacities, expected_overflow(loads, capacities))


@dataclass(frozen=True)
class Tried:
    """Tiers for all experts of a layer, and the seconds of a chunk with the best choice of hot."""

    seconds: float
    price: float
    tiers: Tiers
    curve: Curve


def fastest(timing: Timing, loads: Array, max_tiers: int) -> tuple[float, Tiers]:
    """The price, and tiers, that make a layer fastest; of nearly equal ones the highest price.

    First over prices, with tiers for all experts; then again and again for the experts that are
    hot with the best of those and as many more, since the others should not have a say.
    """
    plain, timed = table(loads), timing.table(loads)
    sample = loads[:: -(-len(loads) // TIMED_CHUNKS)]
    tried = [
        _try(timing, sample, price, costs.best(max_tiers, price))
        for price in PRICES
        for costs in (replace(timed, per_tier=0.0), timed)
    ]
    best = _best(tried)
    for _ in range(REFITS):
        count = best.curve.best().count
        some = best.curve.order[: max(2 * count, FEWEST_REFIT)]
        for per_tier in (0.0, timed.per_tier):
            chosen = replace(timed, overflow=timed.overflow[some], per_tier=per_tier)
            kept = np.isin(plain.capacities, chosen.best(max_tiers, best.price).capacities)
            tiers = replace(
                timed,
                capacities=plain.capacities[kept],
                overflow=timed.overflow[:, kept],
                slots=None if timed.slots is None else timed.slots[kept],
                per_tier=0.0,
            ).best(max_tiers, best.price)
            tried.append(_try(timing, sample, best.price, tiers))
        again = _best(tried)
        if again is best:
            break
        best = again
    return best.price, best.tiers


def _try(timing: Timing, loads: Array, price: float, tiers: Tiers) -> Tried:
    of_layer = curve(timing.device, timing.expert, timing.weights, loads, tiers, timing.shared)
    return Tried(of_layer.best().seconds, price, tiers, of_layer)


def _best(tried: list[Tried]) -> Tried:
    least = min(t.seconds for t in tried)
    return max((t for t in tried if t.seconds <= least * NEARLY), key=lambda t: t.price)


def at_target(loads: list[Array], target: float, max_tiers: int) -> tuple[float, list[Tiers]]:
    """The price for all layers, and tiers, with the least padding at a share of overflow."""
    tables = [table(x) for x in loads]
    assignments = float(sum(x.mean(axis=0).sum() for x in loads))
    start = price_for_overflow([(t.capacities, t.overflow) for t in tables], target, assignments)
    low, high = start / 8, start * 8
    best = [t.best(max_tiers, high) for t in tables]
    for _ in range(ROUNDS):
        price = float(np.sqrt(low * high))
        tiers = [t.best(max_tiers, price) for t in tables]
        beyond = sum(t.beyond(chosen) for t, chosen in zip(tables, tiers, strict=True))
        if beyond > target * assignments:
            low = price
        else:
            high, best = price, tiers
    return high, best


def common(tables: list[Table], prices: list[float], max_tiers: int) -> Ints:
    """One set of capacities for the experts of all layers, at their median price."""
    longest = max(tables, key=lambda t: len(t.capacities))
    rows = [
        np.pad(t.overflow, ((0, 0), (0, len(longest.capacities) - len(t.capacities))))
        for t in tables
    ]
    joined = replace(longest, overflow=np.concatenate(rows))
    return np.array(joined.best(max_tiers, float(np.median(prices))).capacities)
