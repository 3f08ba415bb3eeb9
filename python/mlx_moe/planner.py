"""From a calibration to a plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .calibration import Calibration
from .chunks import chunk_loads
from .cost import cold_seconds, expert_of, shared_expert_of, static_seconds
from .devices import AUTO, Device, load_device
from .errors import InvalidArgument
from .layer_facts import LayerFacts
from .plan import WEIGHTS, LayerPlan, Plan
from .plan_cpu import plan_cpu
from .plan_layer import Layer, plan_layer
from .pricing import FORCED_OVERFLOW, Timing, at_target, common, fastest, table
from .progress import progress_bar
from .residency import Curve, Point, SharedCost, curve, spend
from .tiers import Ints, Tiers, slots_of

Array = NDArray[np.float64]
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

    @property
    def target(self) -> float | None:
        """The share of overflow to aim at; None: whatever is fastest."""
        if self.overflow is None and self.force_hot is not None:
            return FORCED_OVERFLOW
        return self.overflow

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
    progress: bool = False,
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
        progress: show a progress bar on stderr if it takes more than two seconds.

    Raises:
        InvalidArgument: no calibration, an unknown device, an argument out of range, or a memory
            budget that `force_hot` does not fit.
    """
    if not isinstance(calibration, Calibration):
        raise InvalidArgument(
            f"calibration is a {type(calibration).__name__}; expected a Calibration, as "
            "Calibration.load(path) gives it"
        )
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
        layers = plan_static(device, calibration.layers, loads, weights, chunk, options, progress)
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
    left = device["memory_bytes"] - experts_bytes(calibration.layers)
    return int(max(0.0, left) * MEMORY_SHARE)


def experts_bytes(layers: Sequence[LayerFacts]) -> float:
    """Of all routed experts as the model keeps them."""
    return sum(expert_of(facts).cold_bytes * facts.experts for facts in layers)


def plan_static(
    device: Device,
    facts: list[LayerFacts],
    loads: list[Array],
    weights: str,
    chunk: int,
    options: Options,
    progress: bool,
) -> list[LayerPlan]:
    timings = [
        Timing(device, expert_of(layer), weights, _shared_cost(device, layer, weights, chunk))
        for layer in facts
    ]
    bar = progress_bar(progress, total=2 * len(facts), unit="layer")
    priced = _price(timings, loads, options, bar)
    curves = [
        curve(device, timing.expert, weights, x, tiers, timing.shared)
        for timing, x, (_, tiers) in zip(timings, loads, priced, strict=True)
    ]
    chosen = _choose(curves, options)
    hot = [c.order[: point.count] for c, point in zip(curves, chosen, strict=True)]
    tiers = _final_tiers(timings, loads, hot, [price for price, _ in priced], chunk, options)
    layers = []
    for i in range(len(facts)):
        forced = options.force_hot is not None
        layer = Layer(i, device, facts[i], weights, chunk, loads[i], forced)
        layers.append(plan_layer(layer, curves[i], chosen[i], hot[i], tiers[i], options.memory))
        bar.update()
    bar.close()
    return layers


def _shared_cost(device: Device, facts: LayerFacts, weights: str, chunk: int) -> SharedCost | None:
    expert = shared_expert_of(facts)
    if expert is None:
        return None
    static = float(static_seconds(device, expert, weights, 1, slots_of(chunk)))
    cold = float(cold_seconds(device, expert, np.array(float(chunk))))
    return SharedCost(static, cold, expert.static_bytes(weights))


def _price(
    timings: list[Timing], loads: list[Array], options: Options, bar: Any
) -> list[tuple[float, Tiers]]:
    """For every layer what overflow costs, and the tiers of all its experts at that."""
    if options.target is not None:
        price, tiers = at_target(loads, options.target, options.max_tiers)
        bar.update(len(loads))
        return [(price, of_layer) for of_layer in tiers]
    priced = []
    for timing, x in zip(timings, loads, strict=True):
        priced.append(fastest(timing, x, options.max_tiers))
        bar.update()
    return priced


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
    timings: list[Timing],
    loads: list[Array],
    hot: list[Ints],
    of_layer: list[float],
    chunk: int,
    options: Options,
) -> list[Tiers | None]:
    """Tiers of the hot experts alone, scaled; None for a layer without."""
    some = [i for i, members in enumerate(hot) if len(members)]
    if not some:
        return [None] * len(loads)
    own = {i: loads[i][:, hot[i]] for i in some}
    prices = {i: of_layer[i] for i in some}
    if options.target is not None:
        price, best = at_target(list(own.values()), options.target, options.max_tiers)
        prices = dict.fromkeys(some, price)
    else:
        best = [timings[i].table(own[i]).best(options.max_tiers, prices[i]) for i in some]
    if options.shared_tiers:
        one = common([table(x) for x in own.values()], list(prices.values()), options.max_tiers)
        best = [table(own[i], one).best(len(one), prices[i]) for i in some]
    scaled = {
        i: t.scaled(options.capacity_factor, slots_of(chunk))
        for i, t in zip(some, best, strict=True)
    }
    return [scaled.get(i) for i in range(len(loads))]
