"""From a calibration to a plan."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .calibration import Calibration
from .cost import Expert, cold_seconds, expert_of, shared_expert_of, static_seconds
from .devices import AUTO, Device, load_device
from .errors import InvalidArgument
from .layer_facts import LayerFacts
from .plan import WEIGHTS, LayerPlan, Plan
from .plan_cpu import plan_cpu
from .plan_layer import Layer, plan_layer
from .residency import Curve, Point, SharedCost, curve, spend
from .chunks import chunk_loads
from .tiers import (
    STEP,
    Ints,
    Tiers,
    best_set,
    expected_overflow,
    grid,
    price_for_overflow,
)

Array = NDArray[np.float64]
PRICES = (1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 40.0, 100.0)  # slots an overflow assignment
NEARLY = 1.005  # as fast: then the plan with less overflow
MEMORY_SHARE = 0.5  # of what the model leaves of the device's memory, by default


@dataclass(frozen=True)
class Options:
    """What was asked for; part of the plan.

    Attributes:
        memory: bytes that hot (packed) copies may take.
        max_tiers: capacities in a layer, at most.
        shared_tiers: one set of capacities for all layers.
        overflow: share of the hot experts' assignments that may be beyond capacity; None: what
            is fastest.
        capacity_factor: all capacities times this.
        force_hot: share of assignments made hot whether that is faster or not; None: no such.
    """

    memory: int
    max_tiers: int
    shared_tiers: bool
    overflow: float | None
    capacity_factor: float
    force_hot: float | None

    def check(self) -> None:
        if self.memory < 0:
            raise InvalidArgument(f"memory is {self.memory}, expected bytes, not negative")
        if self.max_tiers < 1:
            raise InvalidArgument(f"max_tiers is {self.max_tiers}, expected at least 1")
        for name in ("overflow", "force_hot"):
            share = getattr(self, name)
            if share is not None and not 0 < share <= 1:
                raise InvalidArgument(f"{name} is {share}, expected a share between 0 and 1")
        if not 0 < self.capacity_factor < 1e3:
            raise InvalidArgument(
                f"capacity_factor is {self.capacity_factor}, expected a number above 0"
            )


def make_plan(
    calibration: Calibration,
    device: str | Path | Device = AUTO,
    *,
    memory: int | None = None,
    weights: str = "fp16",
    chunk: int | None = None,
    max_tiers: int = 4,
    shared_tiers: bool = False,
    overflow: float | None = None,
    capacity_factor: float = 1.0,
    force_hot: float | None = None,
) -> Plan:
    """Choose tiers, groups and residency for a calibrated model on a device.

    Args:
        calibration: of the model, by `calibrate` or `Calibration.load`.
        device: a built-in profile ("m2-max"), a profile's file, or "auto" for this machine.
        memory: bytes that the hot experts' copies may take; by default half of what the model's
            experts leave of the device's memory.
        weights: of the static programs, "fp16" or "int8".
        chunk: tokens of a prefill chunk, a multiple of the calibration's (the default).
        max_tiers: different capacities in a layer, at most.
        shared_tiers: choose one set of capacities for all layers.
        overflow: share of the hot experts' assignments beyond capacity to aim at; by default
            whatever makes the layer fastest.
        capacity_factor: scales the capacities that were chosen.
        force_hot: make this share of the assignments hot even where that is slower, for runs
            that test the static path; the plan says so.

    Raises:
        InvalidArgument: an unknown device, an argument out of range, or a memory budget that
            `force_hot` does not fit.
    """
    device = load_device(device)
    if weights not in WEIGHTS:
        raise InvalidArgument(f"weights is {weights!r}, expected one of {', '.join(WEIGHTS)}")
    if memory is None:
        memory = default_memory(calibration, device)
    options = Options(memory, max_tiers, shared_tiers, overflow, capacity_factor, force_hot)
    options.check()
    chunk = calibration.chunk if chunk is None else chunk
    loads = chunk_loads(calibration, chunk)
    if device.executor == "cpu":
        if force_hot is not None:
            raise InvalidArgument(
                f"force_hot needs a static executor, and device {device.name!r} has none: plan "
                "for an Apple device (m2-max)"
            )
        layers = plan_cpu(device, calibration.layers, loads, options.memory, chunk)
    else:
        layers = plan_static(device, calibration.layers, loads, weights, chunk, options)
    return Plan(
        calibration.identity,
        device.executor,
        device,
        chunk,
        weights,
        dict(vars(options)),
        tuple(layers),
    )


def default_memory(calibration: Calibration, device: Device) -> int:
    model = sum(expert_of(facts).cold_bytes * facts.experts for facts in calibration.layers)
    return int(max(0.0, device["memory_bytes"] - model) * MEMORY_SHARE)


def plan_static(
    device: Device,
    facts: list[LayerFacts],
    loads: list[Array],
    weights: str,
    chunk: int,
    options: Options,
) -> list[LayerPlan]:
    experts = [expert_of(layer) for layer in facts]
    shared = [_shared_cost(device, layer, weights, chunk) for layer in facts]
    priced = _prices(device, experts, loads, weights, shared, options)
    curves = [
        curve(device, e, weights, x, tiers, s)
        for e, x, (_, tiers), s in zip(experts, loads, priced, shared, strict=True)
    ]
    chosen = _choose(curves, options)
    hot = [np.sort(c.order[: point.count]) for c, point in zip(curves, chosen, strict=True)]
    tiers = _final_tiers(loads, hot, [price for price, _ in priced], options)
    return [
        plan_layer(
            Layer(i, device, facts[i], weights, chunk, loads[i], options.force_hot is not None),
            curves[i],
            chosen[i],
            hot[i],
            tiers[i],
            options.memory,
        )
        for i in range(len(facts))
    ]


def _shared_cost(device: Device, facts: LayerFacts, weights: str, chunk: int) -> SharedCost | None:
    expert = shared_expert_of(facts)
    if expert is None:
        return None
    slots = -(-chunk // STEP) * STEP
    static = float(static_seconds(device, expert, weights, 1, slots))
    cold = float(cold_seconds(device, expert, np.array(float(chunk))))
    return SharedCost(static, cold, expert.static_bytes(weights))


def _prices(
    device: Device,
    experts: list[Expert],
    loads: list[Array],
    weights: str,
    shared: list[SharedCost | None],
    options: Options,
) -> list[tuple[float, Tiers]]:
    """For every layer what overflow costs, and the tiers of all its experts at that."""
    tables = [(capacities := grid(x), expected_overflow(x, capacities)) for x in loads]
    if options.overflow is not None or options.force_hot is not None:
        target = 0.01 if options.overflow is None else options.overflow
        price = price_for_overflow(tables, target, _assignments(loads))
        return [(price, best_set(*table, options.max_tiers, price)) for table in tables]
    return [
        _fastest(device, expert, weights, x, table, cost, options.max_tiers)
        for expert, x, table, cost in zip(experts, loads, tables, shared, strict=True)
    ]


def _fastest(
    device: Device,
    expert: Expert,
    weights: str,
    loads: Array,
    table: tuple[Ints, Array],
    shared: SharedCost | None,
    max_tiers: int,
) -> tuple[float, Tiers]:
    """The price that makes the layer fastest; of nearly equal ones the highest."""
    tried: list[tuple[float, Tiers, float]] = []
    for price in PRICES:
        tiers = best_set(*table, max_tiers, price)
        best = curve(device, expert, weights, loads, tiers, shared).best()
        tried.append((price, tiers, best.seconds))
    least = min(seconds for _, _, seconds in tried)
    price, tiers, _ = [t for t in tried if t[2] <= least * NEARLY][-1]
    return price, tiers


def _assignments(loads: list[Array]) -> float:
    return float(sum(x.mean(axis=0).sum() for x in loads))


def _choose(curves: list[Curve], options: Options) -> list[Point]:
    if options.force_hot is None:
        return spend(curves, options.memory)
    return _forced(curves, options.force_hot, options.memory)


def _forced(curves: list[Curve], share: float, memory: int) -> list[Point]:
    """Enough experts in every layer for the share, and shared ones, whether they win or not."""
    chosen = []
    for c in curves:
        enough = np.flatnonzero(c.hot >= min(share, c.hot[-1]) - 1e-12)[0]
        count = max(int(enough), c.best().count)
        beside = c.shared_bytes or 0
        size = count * c.expert_bytes + beside
        chosen.append(Point(count, c.shared_bytes is not None, size, c.cold))
    if (needed := sum(point.bytes for point in chosen)) > memory:
        raise InvalidArgument(
            f"force_hot={share} needs {needed / 1e9:.2f} GB of hot experts, and the memory budget "
            f"is {memory / 1e9:.2f} GB: lower the one or raise the other"
        )
    return chosen


def _final_tiers(
    loads: list[Array], hot: list[Ints], prices: list[float], options: Options
) -> list[Tiers | None]:
    """Tiers of the hot experts alone, scaled; None for a layer without."""
    some = [i for i, members in enumerate(hot) if len(members)]
    tables = {i: (c := grid(loads[i][:, hot[i]]), _overflow(loads[i], hot[i], c)) for i in some}
    if options.overflow is not None and some:
        assignments = _assignments([loads[i][:, hot[i]] for i in some])
        price = _price_with_tiers(list(tables.values()), options, assignments)
        prices = [price] * len(loads)
    common = _common(tables, prices, options.max_tiers) if options.shared_tiers else None
    tiers: list[Tiers | None] = [None] * len(loads)
    for i, (capacities, overflow) in tables.items():
        if common is not None:
            capacities, overflow = common, _overflow(loads[i], hot[i], common)
        tiers[i] = best_set(capacities, overflow, options.max_tiers, prices[i]).scaled(
            options.capacity_factor
        )
    return tiers


def _overflow(loads: Array, members: Ints, capacities: Ints) -> Array:
    return expected_overflow(loads[:, members], capacities)


def _common(tables: dict[int, tuple[Ints, Array]], prices: list[float], max_tiers: int) -> Ints:
    """One set of capacities for the experts of all layers."""
    longest = max((capacities for capacities, _ in tables.values()), key=len)
    rows = []
    for _, overflow in tables.values():
        rows.append(np.pad(overflow, ((0, 0), (0, len(longest) - overflow.shape[1]))))
    price = float(np.median([prices[i] for i in tables]))
    chosen = best_set(longest, np.concatenate(rows), max_tiers, price)
    return np.array(chosen.capacities)


def _price_with_tiers(
    tables: list[tuple[Ints, Array]], options: Options, assignments: float
) -> float:
    """The price at which no more than the target is beyond the capacities, tiers as they are."""
    assert options.overflow is not None
    start = price_for_overflow(tables, options.overflow, assignments)
    low, high = start / 8, start * 8
    for _ in range(8):
        price = float(np.sqrt(low * high))
        beyond = 0.0
        for capacities, overflow in tables:
            tiers = best_set(capacities, overflow, options.max_tiers, price)
            taken = np.searchsorted(capacities, tiers.of_expert)
            beyond += float(np.take_along_axis(overflow, taken[:, None], axis=1).sum())
        if beyond > options.overflow * assignments:
            low = price
        else:
            high = price
    return high
