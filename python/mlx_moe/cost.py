"""What a layer's experts cost on a device, in seconds, from the numbers of its profile."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .devices import Device
from .layer_facts import LayerFacts, WeightFacts
from .tiers import STEP

Array = NDArray[np.float64]
FP16 = 2  # bytes
WEIGHT_BYTES = {"fp16": FP16, "int8": 1}  # of the static programs
FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MATRICES = {"glu": 3, "mlp": 2}
LARGEST_LOAD = 1 << 14  # no break-even is looked for beyond


@dataclass(frozen=True)
class Expert:
    """Sizes of one expert.

    Attributes:
        hidden, inner: features outside and inside.
        matrices: 3 with a gate, else 2.
        biases: whether the projections add one.
        cold_bytes: of its weights as the model keeps them.
    """

    hidden: int
    inner: int
    matrices: int
    biases: bool
    cold_bytes: float

    @property
    def flops(self) -> float:
        """Multiplications and additions for one token."""
        return 2.0 * self.matrices * self.hidden * self.inner

    def static_bytes(self, weights: str, inner: int | None = None) -> int:
        """Of its weights in a static program, or of `inner` of its inner features."""
        inner = self.inner if inner is None else inner
        rows = (self.matrices - 1) * inner + self.hidden  # of all its matrices
        scales = FP16 * rows if weights == "int8" else 0
        biases = FP16 * rows if self.biases else 0
        return self.matrices * self.hidden * inner * WEIGHT_BYTES[weights] + scales + biases


def expert_of(facts: LayerFacts) -> Expert:
    return _expert(facts, facts.inner, MATRICES[facts.kind], facts.biases)


def shared_expert_of(facts: LayerFacts) -> Expert | None:
    if facts.shared is None:
        return None
    return _expert(facts, facts.shared.inner, MATRICES["glu"], False)


def _expert(facts: LayerFacts, inner: int, matrices: int, biases: bool) -> Expert:
    weights = matrices * facts.hidden * inner
    return Expert(facts.hidden, inner, matrices, biases, weights * bytes_of(facts.weights))


def bytes_of(weights: WeightFacts) -> float:
    """Bytes of one weight as the model keeps it, its share of the scales with it."""
    if weights.bits is None:
        return float(FLOAT_BYTES.get(weights.dtype, FP16))
    scale = 2 * FLOAT_BYTES.get(weights.dtype, FP16) if weights.mode == "affine" else 1
    return weights.bits / 8 + scale / (weights.group_size or 64)


def static_seconds(
    device: Device,
    expert: Expert,
    weights: str,
    experts: int,
    capacity: Array | float,
    inner: int | None = None,
) -> Array:
    """One dispatch of a group: `experts` of `capacity` slots each.

    The weights stream in from memory at every dispatch, as do the tile and the results, and where
    an expert's activations exceed the on-chip memory the rest travels too. Convex in capacity.
    """
    inner = expert.inner if inner is None else inner
    if device.curves is not None:
        return device.curves.static_seconds(expert.hidden, inner, experts, capacity)
    slots = experts * np.asarray(capacity, np.float64)
    compute = slots * expert.flops * inner / expert.inner / _static_flops(device)
    rows = FP16 * 2 * expert.hidden * slots
    activations = FP16 * expert.matrices * inner * np.asarray(capacity, np.float64)
    off_chip = 2 * experts * np.maximum(activations - device["on_chip_bytes"], 0)
    traffic = experts * expert.static_bytes(weights, inner) + rows + off_chip
    return device["dispatch_seconds"] + np.maximum(compute, traffic / device["static_bandwidth"])


def tile_seconds(device: Device, expert: Expert, weights: str, capacity: Array) -> Array:
    """One expert's share of its group's programs at each capacity, dispatching aside."""
    _, parts = package_experts(device, expert, weights)
    widths = [b - a for a, b in splits(expert.inner, parts)]
    alone = [static_seconds(device, expert, weights, 1, capacity, width) for width in widths]
    return np.asarray(np.sum(alone, axis=0) - parts * device["dispatch_seconds"])


def slot_seconds(device: Device, expert: Expert) -> float:
    """Of one slot where computing is what takes the time."""
    return expert.flops / _static_flops(device)


def _static_flops(device: Device) -> float:
    return device["static_flops"] * device["static_efficiency"]


def cold_seconds(device: Device, expert: Expert, loads: Array, speedup: float = 1.0) -> Array:
    """Of each expert on the cold path, for the loads given; the start of the path is not in it."""
    if device.curves is not None:
        return device.curves.cold_seconds(expert.hidden, expert.inner, loads)
    reading = np.where(loads > 0, expert.cold_bytes / device["cold_bandwidth"], 0)
    return np.maximum(loads * expert.flops / (device["cold_flops"] * speedup), reading)


def layer_seconds(device: Device, static: Array | float, cold: Array | float) -> Array:
    """Of a layer: both paths at once, the cold one with its start, and one wait if both run.

    Of the shorter path nothing is left beside the longer, or what measuring both at once showed.
    """
    static, cold = np.asarray(static, np.float64), np.asarray(cold, np.float64)
    cold = np.where(cold > 0, cold + device["cold_seconds"], 0)
    if "sync_seconds" not in device.numbers:
        return cold
    wait = np.where(static > 0, device["sync_seconds"], 0)
    apart = 0.0
    if device.curves is not None and device.curves.overlap is not None:
        apart = 1 - device.curves.overlap
    return np.maximum(static, cold) + apart * np.minimum(static, cold) + wait


def break_even(device: Device, expert: Expert, weights: str, experts: int) -> int | None:
    """The least load from which an expert is faster as one of `experts` in a static program.

    None if it never is, up to loads that no chunk has.
    """
    loads = np.arange(1, LARGEST_LOAD + 1, dtype=np.float64)
    capacity = np.ceil(loads / STEP) * STEP
    static = static_seconds(device, expert, weights, experts, capacity) / experts
    wins = static < cold_seconds(device, expert, loads)
    return int(loads[wins.argmax()]) if wins.any() else None


def package_experts(device: Device, expert: Expert, weights: str) -> tuple[int, int]:
    """Experts that fit one package, and into how many programs one expert must be split."""
    limit, size = device["package_bytes"], expert.static_bytes(weights)
    if size <= limit:
        return int(limit // size), 1
    parts = 2
    while max(expert.static_bytes(weights, b - a) for a, b in splits(expert.inner, parts)) > limit:
        if parts * SPLIT_STEP >= expert.inner:
            break  # one step of inner features is as small as it gets
        parts += 1
    return 1, len(splits(expert.inner, parts))


SPLIT_STEP = 64  # inner features; splits begin at multiples of it


def splits(inner: int, parts: int) -> list[tuple[int, int]]:
    """[0, inner) in at most `parts` ranges of nearly the same length."""
    steps = -(-inner // SPLIT_STEP)
    parts = min(parts, steps)
    edges = [SPLIT_STEP * (steps * part // parts) for part in range(parts)] + [inner]
    return list(zip(edges[:-1], edges[1:], strict=True))
