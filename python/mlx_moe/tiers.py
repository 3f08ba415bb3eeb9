"""A small set of capacities for experts whose loads are uneven and vary from chunk to chunk.

An expert of capacity C costs C slots in every chunk, used or not, and `price` slots for each
assignment beyond C. Both terms are taken over all chunks of the calibration, so that the tail of
an expert's load decides, not its mean.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidArgument

STEP = 32  # capacities are multiples of it, as the static programs want them
LARGEST_CHUNK = 1 << 20  # tokens


def slots_of(tokens: int) -> int:
    """The capacity that so many tokens of one expert take, which is the most a chunk can."""
    return -(-tokens // STEP) * STEP


Array = NDArray[np.float64]
Ints = NDArray[np.int64]
_PRICES = (1.0, 1e5)  # in slots an overflow assignment; from none to next to no overflow
_HALVINGS = 24


@dataclass(frozen=True)
class Tiers:
    """Capacities, ascending, and which of them each expert has.

    Attributes:
        capacities: multiples of STEP.
        of_expert: [E], each one of `capacities`.
        cost: expected slots and price of overflow of a chunk, all experts and tiers together.
    """

    capacities: tuple[int, ...]
    of_expert: Ints
    cost: float

    def first(self, count: int) -> "Tiers":
        """Of the first experts alone."""
        kept = self.of_expert[:count]
        return Tiers(tuple(np.unique(kept).tolist()), kept, self.cost)

    def scaled(self, factor: float, most: int) -> "Tiers":
        """Capacities times `factor`, in multiples of STEP, at least one and `most` slots."""
        if not 0 < factor < 1e3:
            raise InvalidArgument(f"capacity factor is {factor}, expected a number above 0")
        steps = np.clip(np.floor(self.of_expert * factor / STEP + 0.5), 1, most // STEP)
        scaled = steps.astype(np.int64) * STEP
        return Tiers(tuple(np.unique(scaled).tolist()), scaled, self.cost)


def grid(loads: Array) -> Ints:
    """All capacities that could be of use for loads [chunks, E]."""
    most = int(np.ceil(loads.max(initial=1) / STEP))
    return np.arange(1, max(most, 1) + 1, dtype=np.int64) * STEP


def expected_overflow(loads: Array, capacities: Ints) -> Array:
    """Mean assignments beyond each capacity: [E, len(capacities)] for loads [chunks, E]."""
    beyond = [np.maximum(loads - c, 0).mean(axis=0) for c in capacities]
    return np.stack(beyond, axis=1)


def choose_tiers(loads: Array, max_tiers: int, price: float) -> Tiers:
    """The best set of at most `max_tiers` capacities, exactly.

    Args:
        loads: [chunks, E], tokens of each expert in each chunk.
        max_tiers: how many different capacities there may be.
        price: slots that one overflow assignment costs; above 1.

    Raises:
        InvalidArgument: loads that are none, or numbers out of range.
    """
    check_loads(loads)
    if max_tiers < 1 or not price > 0:
        raise InvalidArgument(f"max_tiers is {max_tiers} and price {price}, expected both above 0")
    capacities = grid(loads)
    return best_set(capacities, expected_overflow(loads, capacities), max_tiers, price)


def best_set(
    capacities: Ints,
    overflow: Array,
    max_tiers: int,
    price: float,
    slots: Array | None = None,
    per_tier: float = 0.0,
) -> Tiers:
    """`choose_tiers` where `expected_overflow` is known already.

    An expert's cost is convex in its capacity, so of any set it takes one of the two members
    around its own optimum, and the cost of a set is a sum over neighbours in it: a shortest path.

    Args:
        slots: what each capacity costs, convex and ascending, where that is not the capacity
            itself: few slots take no less time than the weights take to read.
        per_tier: what each tier costs: a dispatch, in slots.
    """
    cost = (capacities if slots is None else slots) + price * overflow
    own = cost.argmin(axis=1)
    low, high = int(own.min()), int(own.max())  # nothing outside is of use to anyone
    cost, own = cost[:, low : high + 1], own - low
    count = high - low + 1
    below, above = _ends(cost, own)
    between = _between(cost, own)

    reach = below  # cost of all experts up to j, where j is the highest tier so far
    steps: list[Ints] = []
    best, best_path = float("inf"), (1, 0)
    for tiers in range(1, min(max_tiers, count) + 1):
        if tiers > 1:
            through = reach[:, None] + between
            steps.append(through.argmin(axis=0))
            reach = through.min(axis=0)
        total = reach + above + tiers * per_tier
        if total.min() < best * (1 - 1e-9):  # fewer tiers where more are no better
            best, best_path = float(total.min()), (tiers, int(total.argmin()))
    chosen = [best_path[1]]
    for step in reversed(steps[: best_path[0] - 1]):
        chosen.append(int(step[chosen[-1]]))
    chosen.reverse()
    taken = np.array(chosen)[cost[:, chosen].argmin(axis=1)]
    used = np.unique(taken)
    names = capacities[low : high + 1]
    return Tiers(tuple(names[used].tolist()), names[taken], best)


def _ends(cost: Array, own: Ints) -> tuple[Array, Array]:
    """Cost of the experts whose optimum is at most j, and of the others, all at capacity j."""
    at_most = own[:, None] <= np.arange(cost.shape[1])
    below = np.where(at_most, cost, 0).sum(axis=0)
    return below, cost.sum(axis=0) - below


def _between(cost: Array, own: Ints) -> Array:
    """[i, j]: cost of the experts with an optimum in (i, j] where i and j are neighbours."""
    count = cost.shape[1]
    between = np.full((count, count), np.inf)
    order = np.argsort(own, kind="stable")
    cost, own = cost[order], own[order]
    starts = np.searchsorted(own, np.arange(count), side="right")  # experts beyond i
    for i in range(count - 1):
        rest = cost[starts[i] :]
        better = np.minimum(rest[:, i : i + 1], rest[:, i + 1 :])
        better[own[starts[i] :, None] > np.arange(i + 1, count)] = 0
        between[i, i + 1 :] = better.sum(axis=0)
    return between


def price_for_overflow(
    layers: list[tuple[Ints, Array]], target: float, assignments: float
) -> float:
    """The price at which experts of free capacity leave `target` of all assignments over.

    Args:
        layers: (capacities, expected overflow) of every layer, as `best_set` takes them.
        assignments: of one chunk, all layers together.
    """
    if not 0 < target < 1:
        raise InvalidArgument(f"overflow target is {target}, expected a share between 0 and 1")
    low, high = _PRICES
    for _ in range(_HALVINGS):
        price = float(np.sqrt(low * high))
        if overflow_at(layers, price) > target * assignments:
            low = price
        else:
            high = price
    return high


def overflow_at(layers: list[tuple[Ints, Array]], price: float) -> float:
    """Expected overflow of a chunk where every expert has the capacity that is best for it."""
    total = 0.0
    for capacities, overflow in layers:
        own = (capacities + price * overflow).argmin(axis=1)
        total += float(np.take_along_axis(overflow, own[:, None], axis=1).sum())
    return total


def check_loads(loads: Array) -> None:
    if loads.ndim != 2 or 0 in loads.shape:
        raise InvalidArgument(f"loads have shape {loads.shape}, expected [chunks, experts]")
    if not np.isfinite(loads).all() or loads.min() < 0:
        raise InvalidArgument("loads must be finite and not negative")
