"""One layer's plan on a static executor: groups, what they are expected to bring, or why not."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .cost import (
    Expert,
    break_even,
    cold_seconds,
    expert_of,
    layer_seconds,
    package_experts,
    shared_expert_of,
    splits,
)
from .devices import Device
from .grouping import Bundle, Ran, pack, run_groups, spill_limit
from .layer_facts import LayerFacts
from .plan import Expected, Group, LayerPlan, Shared
from .residency import Curve, Point
from .skew import gini, top_share
from .tiers import STEP, Ints, Tiers, slots_of

Array = NDArray[np.float64]
FLAT = 0.2  # Gini below which a refusal is put down to flat routing
PATIENCE = 2  # fewer hot experts tried in a row without a gain
TIMES_CHUNKS = 32  # of the calibration, enough to time fewer tokens


@dataclass(frozen=True)
class Layer:
    """What planning knows of a layer before it knows what is hot."""

    number: int
    device: Device
    facts: LayerFacts
    weights: str
    chunk: int
    loads: Array
    forced: bool

    @property
    def expert(self) -> Expert:
        return expert_of(self.facts)

    @property
    def shared(self) -> Expert | None:
        return shared_expert_of(self.facts)


@dataclass(frozen=True)
class Timed:
    """A layer's chunks: seconds as planned and all cold, and what the groups did."""

    seconds: float
    cold: float
    ran: Ran


def plan_layer(
    layer: Layer, curve: Curve, chosen: Point, hot: Ints, tiers: Tiers | None, memory: int
) -> LayerPlan:
    """The plan of a layer whose experts `hot`, best first, were chosen for `tiers`."""
    beside = _shared_bundle(layer) if chosen.shared else None
    if tiers is None and beside is None:
        return _without(layer, _why_none(layer, curve, memory))
    if tiers is not None and not layer.forced:
        tiers = _as_many_as_pay(layer, hot, tiers, beside)
        hot = hot[: len(tiers.of_expert)]
    bundles = [] if tiers is None else _bundles(layer, hot, tiers)
    capacities = tiers.capacities if tiers else ()
    start = _static_from(layer, bundles, beside, capacities)
    timed = time_layer(layer, bundles, beside, capacities, layer.loads)
    if start is None:
        return _without(
            layer,
            f"no static path here: {timed.seconds * 1e3:.2f} ms a chunk with it, and "
            f"{timed.cold * 1e3:.2f} ms without",
        )
    if (slower := _measured_slower(layer, bundles, beside, capacities)) is not None:
        return _without(layer, slower)
    dropped = (chosen.count - len(hot)) * curve.expert_bytes
    return LayerPlan(
        layer.facts,
        capacities,
        _groups(bundles, layer.expert.inner, f"l{layer.number:02}.g"),
        start,
        (),
        _shared_plan(layer, beside),
        None,
        _expected(layer, hot, tiers, chosen.bytes - dropped, timed),
    )


def _as_many_as_pay(layer: Layer, hot: Ints, tiers: Tiers, beside: Bundle | None) -> Tiers:
    """The tiers of the first of the hot experts, as many as make the layer fastest.

    How many was chosen before their tiers and groups were known; the last may not pay any more.
    """
    best, seconds, worse = tiers, np.inf, 0
    for count in range(len(hot), 0, -1):
        some = tiers.first(count)
        bundles = _bundles(layer, hot[:count], some)
        timed = time_layer(layer, bundles, beside, some.capacities, layer.loads)
        worse += 1
        if timed.seconds < seconds:
            best, seconds, worse = some, timed.seconds, 0
        if worse > PATIENCE:
            break
    return best


def _bundles(layer: Layer, hot: Ints, tiers: Tiers) -> list[Bundle]:
    most, parts = package_experts(layer.device, layer.expert, layer.weights)
    bundles = []
    for tier in tiers.capacities:
        for experts in pack(layer.loads, hot[tiers.of_expert == tier], most):
            limit = spill_limit(
                layer.device,
                layer.expert,
                layer.weights,
                len(experts),
                tier,
                tiers.capacities,
                parts,
                layer.chunk * layer.facts.top_k,
            )
            bundles.append(Bundle(experts, tier, parts, limit))
    return bundles


def _shared_bundle(layer: Layer) -> Bundle | None:
    """The shared expert sees every token: its tier is the chunk, and nothing is over."""
    if layer.shared is None:
        return None
    _, parts = package_experts(layer.device, layer.shared, layer.weights)
    return Bundle((0,), slots_of(layer.chunk), parts, 0)


def time_layer(
    layer: Layer,
    bundles: list[Bundle],
    beside: Bundle | None,
    tiers: tuple[int, ...],
    loads: Array,
) -> Timed:
    """Expected seconds of chunks of `loads` [chunks, E], static and cold path at once."""
    device, expert = layer.device, layer.expert
    ran = run_groups(device, expert, layer.weights, loads, bundles, tiers)
    hot = np.zeros(loads.shape[1], bool)
    hot[[e for bundle in bundles for e in bundle.experts]] = True
    left = np.where(hot, ran.spilled, loads)
    static = ran.seconds
    cold = cold_seconds(device, expert, left).sum(axis=1)
    without = cold_seconds(device, expert, loads).sum(axis=1)
    if layer.shared is not None:
        tokens = loads.sum(axis=1, keepdims=True) / layer.facts.top_k
        alone = cold_seconds(device, layer.shared, tokens)[:, 0]
        without = without + alone
        if beside is None:
            cold = cold + alone
        else:
            groups = run_groups(device, layer.shared, layer.weights, tokens, [beside], tiers)
            static = static + groups.seconds
    planned = layer_seconds(device, static, cold).mean()
    return Timed(float(planned), float(layer_seconds(device, 0.0, without).mean()), ran)


def _static_from(
    layer: Layer, bundles: list[Bundle], beside: Bundle | None, tiers: tuple[int, ...]
) -> int | None:
    """The token count from which the static path is faster, up to a whole chunk; None if it is
    not even then. A forced one starts with the smallest tile."""
    if layer.forced:
        return min(STEP, layer.chunk)
    step = max(STEP, layer.chunk // 32)
    counts = range(layer.chunk, 0, -step)
    sample = layer.loads[:: max(1, len(layer.loads) // TIMES_CHUNKS)]
    start = None
    for tokens in counts:
        loads = layer.loads if tokens == layer.chunk else sample * (tokens / layer.chunk)
        timed = time_layer(layer, bundles, beside, tiers, loads)
        if timed.seconds >= timed.cold:
            break
        start = tokens
    return start


def _measured_slower(
    layer: Layer, bundles: list[Bundle], beside: Bundle | None, tiers: tuple[int, ...]
) -> str | None:
    """The reason against a static path whose times as measured, not as the numbers have them, are
    no less than the cold path's; None without measurements, or where they bear it out."""
    device = layer.device.by_measurement()
    if device is None or layer.forced:
        return None
    timed = time_layer(replace(layer, device=device), bundles, beside, tiers, layer.loads)
    if timed.seconds < timed.cold:
        return None
    return (
        f"no static path here: as measured, {timed.seconds * 1e3:.2f} ms a chunk with it, and "
        f"{timed.cold * 1e3:.2f} ms without"
    )


def _groups(bundles: list[Bundle], inner: int, prefix: str) -> tuple[Group, ...]:
    groups: list[Group] = []
    for bundle in bundles:
        for split in splits(inner, bundle.parts):
            groups.append(
                Group(
                    f"{prefix}{len(groups):02}",
                    bundle.experts,
                    bundle.tier,
                    split,
                    bundle.parts,
                    bundle.spill_limit,
                )
            )
    return tuple(groups)


def _shared_plan(layer: Layer, beside: Bundle | None) -> Shared | None:
    facts = layer.facts.shared
    if facts is None:
        return None
    bundles = [beside] if beside else []
    return Shared(facts.name, facts.inner, _groups(bundles, facts.inner, f"l{layer.number:02}.s"))


def _expected(layer: Layer, hot: Ints, tiers: Tiers | None, size: int, timed: Timed) -> Expected:
    loads = layer.loads
    mean, ran = loads.mean(axis=0), timed.ran
    routed = float(loads[:, hot].sum())
    spilled = float(ran.spilled.sum())
    served = routed - spilled
    slots = float(ran.slots.sum())
    own = 0.0 if tiers is None else float(tiers.of_expert.sum()) * len(loads)
    fits = 0.0 if tiers is None else float(np.minimum(loads[:, hot], tiers.of_expert).sum())
    return Expected(
        gini=gini(mean),
        top_quarter=top_share(mean),
        fill=fits / own if own else 0.0,
        padding=1 - served / slots if slots else 0.0,
        overflow=spilled / routed if routed else 0.0,
        hot=served / float(loads.sum()) if loads.sum() else 0.0,
        bytes=size,
        static_ms=timed.seconds * 1e3,
        cold_ms=timed.cold * 1e3,
    )


def _without(layer: Layer, reason: str) -> LayerPlan:
    """A layer left to the cold path."""
    if (measurements := layer.device.measurements) is not None:
        reason += f" (measured on this device, {measurements.date})"
    timed = time_layer(layer, [], None, (), layer.loads)
    none = np.zeros(0, np.int64)
    return LayerPlan(
        layer.facts,
        (),
        (),
        None,
        (),
        _shared_plan(layer, None),
        reason,
        _expected(layer, none, None, 0, timed),
    )


def _why_none(layer: Layer, curve: Curve, memory: int) -> str:
    """Why nothing is hot: the budget, flat routing, or experts that a dispatch costs too much."""
    best = curve.best()
    if best.bytes:
        smallest = min(point.bytes for point in curve.points if point.bytes)
        return (
            f"no static path here: the memory budget of {memory / 1e9:.2f} GB is too small; one "
            f"expert takes {smallest / 1e9:.3f} GB, the best for this layer {best.bytes / 1e9:.2f}"
        )
    mean = layer.loads.mean(axis=0)
    most, _ = package_experts(layer.device, layer.expert, layer.weights)
    together = min(most, layer.facts.experts)
    least = break_even(layer.device, layer.expert, layer.weights, together)
    reason = "no expert is full enough"
    if least is None:
        reason = "the experts are too small for a dispatch"
    elif gini(mean) < FLAT:
        reason = "routing is flat"
    wins = "never wins" if least is None else f"wins from {least} on"
    return (
        f"no static path here: {reason} (Gini {gini(mean):.2f}): the fullest gets "
        f"{mean.max():.0f} of {layer.chunk} tokens, and the static executor {wins}"
    )
