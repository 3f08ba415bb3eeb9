"""Experts of a layer and tier packed into groups, and what groups do with a chunk's loads."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .cost import Expert, cold_seconds, splits, static_seconds
from .devices import Device

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Bundle:
    """Experts that share their programs: one, or the parts of an expert split along ff.

    Attributes:
        experts: in the order of their tiles.
        tier: the most slots of each.
        parts: programs, each dispatched for every tile.
        spill_limit: more overflow than this takes another tile.
    """

    experts: tuple[int, ...]
    tier: int
    parts: int
    spill_limit: int


@dataclass(frozen=True)
class Ran:
    """What bundles do with each chunk.

    Attributes:
        seconds: [chunks], of all dispatches one after the other.
        slots: [chunks], of all tiles at the capacities taken.
        dispatches: [chunks].
        spilled: [chunks, E], assignments left to the cold path; those of other experts are 0.
    """

    seconds: Array
    slots: Array
    dispatches: Array
    spilled: Array


def run_groups(
    device: Device,
    expert: Expert,
    weights: str,
    loads: Array,
    bundles: list[Bundle],
    tiers: tuple[int, ...],
) -> Ran:
    """The static path's way with chunks of loads [chunks, E], as layers take it at run time.

    A bundle takes the smallest tier that its largest bucket fits, at most its own, and another
    tile while more than its spill limit is left over.
    """
    chunks = len(loads)
    seconds, slots, dispatches = np.zeros(chunks), np.zeros(chunks), np.zeros(chunks)
    spilled = np.zeros_like(loads, dtype=np.float64)
    for bundle in bundles:
        members = list(bundle.experts)
        capacities = np.array([*(t for t in tiers if t < bundle.tier), bundle.tier], np.float64)
        cost = _program_seconds(device, expert, weights, bundle, capacities)
        left = loads[:, members].astype(np.float64)
        active = left.max(axis=1) > 0
        while active.any():
            taken = np.searchsorted(capacities, left.max(axis=1))
            taken = np.minimum(taken, len(capacities) - 1)
            capacity = np.where(active, capacities[taken], 0)
            seconds += np.where(active, cost[taken], 0)
            slots += capacity * len(members)
            dispatches += active * bundle.parts
            left = np.maximum(left - capacity[:, None], 0)
            active = active & (left.sum(axis=1) > bundle.spill_limit)
        spilled[:, members] = left
    return Ran(seconds, slots, dispatches, spilled)


def _program_seconds(
    device: Device, expert: Expert, weights: str, bundle: Bundle, capacities: Array
) -> Array:
    """Of one tile at each capacity, all parts."""
    inner = [b - a for a, b in splits(expert.inner, bundle.parts)]
    count = len(bundle.experts)
    return sum(
        (static_seconds(device, expert, weights, count, capacities, width) for width in inner),
        np.zeros(len(capacities)),
    )


def spill_limit(
    device: Device,
    expert: Expert,
    weights: str,
    experts: int,
    tier: int,
    tiers: tuple[int, ...],
    parts: int,
    most: int,
) -> int:
    """The most assignments of one expert for which the cold path beats another tile.

    Of several experts the cold path reads more weights, so that more is spilled than would be
    best; `most` where another tile never pays.
    """
    bundle = Bundle(tuple(range(experts)), tier, parts, 0)
    capacities = np.array([*(t for t in tiers if t < tier), tier], np.float64)
    cost = _program_seconds(device, expert, weights, bundle, capacities)
    loads = np.arange(1, max(most, 1) + 1, dtype=np.float64)
    needed = np.minimum(np.searchsorted(capacities, loads), len(capacities) - 1)
    tiles = np.maximum(np.ceil(loads / tier), 1)
    pays = cost[needed] * tiles < cold_seconds(device, expert, loads)
    return int(pays.argmax()) if pays.any() else most


def pack(loads: Array, experts: Ints, most: int) -> list[tuple[int, ...]]:
    """Groups of at most `most` of the given experts, of nearly the same size, like with like.

    Experts next to each other in mean load share a group: a group takes the capacity of its
    largest bucket, and these are large in the same chunks.
    """
    order = experts[np.argsort(-loads[:, experts].mean(axis=0), kind="stable")]
    count = -(-len(order) // most)
    return [tuple(part.tolist()) for part in np.array_split(order, count)]
