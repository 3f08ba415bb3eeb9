"""Residency where MLX computes on the CPU: experts prepacked for the kernels, or read in place."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .cost import Expert, cold_seconds, expert_of
from .devices import Device
from .layer_facts import LayerFacts
from .plan import Expected, LayerPlan, Shared
from .skew import gini, top_share

Array = NDArray[np.float64]
PACKED_BYTES = 2  # of a weight: bf16 tiles
POINTS = 32  # token counts tried for the break-even


def plan_cpu(
    device: Device, facts: list[LayerFacts], loads: list[Array], memory: int, chunk: int
) -> list[LayerPlan]:
    """Prepack the experts that gain most for their bytes, as many as the memory budget holds."""
    gains = [_gain(device, expert_of(f), x) for f, x in zip(facts, loads, strict=True)]
    order = sorted(
        (
            (gain / packed_bytes(expert_of(facts[layer])), layer, int(expert))
            for layer, of_layer in enumerate(gains)
            for expert, gain in enumerate(of_layer)
            if gain > 0
        ),
        key=lambda item: (-item[0], item[1:]),
    )
    packed: list[list[int]] = [[] for _ in facts]
    left = memory
    for _, layer, expert in order:
        size = packed_bytes(expert_of(facts[layer]))
        if size <= left:
            packed[layer].append(expert)
            left -= size
    return [
        _plan_layer(device, facts[i], loads[i], sorted(packed[i]), gains[i], memory, chunk)
        for i in range(len(facts))
    ]


def packed_bytes(expert: Expert) -> int:
    return expert.matrices * expert.hidden * expert.inner * PACKED_BYTES


def _gain(device: Device, expert: Expert, loads: Array) -> Array:
    """Seconds of a chunk that prepacking saves, for each expert."""
    return (_in_place(device, expert, loads) - _packed(device, expert, loads)).mean(axis=0)


def _in_place(device: Device, expert: Expert, loads: Array) -> Array:
    return cold_seconds(device, expert, loads)


def _packed(device: Device, expert: Expert, loads: Array) -> Array:
    """A packed copy is larger, so that few tokens would pay for reading it: the kernels then read
    the weights in place."""
    copy = replace(expert, cold_bytes=packed_bytes(expert))
    fast = cold_seconds(device, copy, loads, speedup=device["packed_speedup"])
    return np.minimum(fast, _in_place(device, expert, loads))


def _plan_layer(
    device: Device,
    facts: LayerFacts,
    loads: Array,
    packed: list[int],
    gains: Array,
    memory: int,
    chunk: int,
) -> LayerPlan:
    expert, mean = expert_of(facts), loads.mean(axis=0)
    in_place = _in_place(device, expert, loads).sum(axis=1).mean()
    saved = float(gains[packed].sum())
    hot = loads[:, packed].sum() / loads.sum() if loads.sum() else 0.0
    shared = Shared(facts.shared.name, facts.shared.inner) if facts.shared else None
    return LayerPlan(
        facts,
        (),
        (),
        _pays_from(device, expert, loads[:, packed], chunk) if packed else None,
        tuple(packed),
        shared,
        None if packed else _why_none(device, expert, mean, gains, memory),
        Expected(
            gini=gini(mean),
            top_quarter=top_share(mean),
            fill=0.0,
            padding=0.0,
            overflow=0.0,
            hot=float(hot),
            bytes=len(packed) * packed_bytes(expert),
            static_ms=float(in_place - saved + device["cold_seconds"]) * 1e3,
            cold_ms=float(in_place + device["cold_seconds"]) * 1e3,
        ),
    )


def _pays_from(device: Device, expert: Expert, loads: Array, chunk: int) -> int:
    """The fewest tokens at which the packed copies save time."""
    for tokens in np.unique(np.linspace(1, chunk, POINTS).astype(int)):
        if _gain(device, expert, loads * (tokens / chunk)).sum() > 0:
            return int(tokens)
    return chunk


def _why_none(device: Device, expert: Expert, mean: Array, gains: Array, memory: int) -> str:
    start = "no prepacked experts here: "
    speedup = device.numbers["packed_speedup"]
    if speedup.value <= 1:
        return f"{start}packed does not pay ({speedup.value:g} times in place: {speedup.source})"
    if gains.max(initial=0) > 0:
        size = packed_bytes(expert) / 1e9
        return (
            f"{start}the memory budget of {memory / 1e9:.2f} GB is spent on other layers or too "
            f"small; one expert takes {size:.3f} GB"
        )
    return (
        f"{start}buckets are small (Gini {gini(mean):.2f}, {mean.max():.0f} tokens at most): "
        "reading the larger copy costs more than it saves"
    )
