"""Experts that are packed for the CPU kernels in place of others."""

import weakref
from math import inf
from time import perf_counter
from typing import Any

import numpy as np

from . import core
from .cost import Array, expert_of
from .custom import evaluate
from .errors import InvalidArgument, UnsupportedLayer
from .follower import Follower, Ints, cold_costs, placement_of, start
from .layers import PROJECTIONS, Layer, PackedCopies, weight_arrays
from .plan import LayerPlan, Plan
from .plan_cpu import packed_bytes
from .replacement import ReplacedLayer
from .schedule import Experts, Placement, Scheduler, Unit
from .static_replace import read_linears
from .weights import UnknownFormat


def packed_follower(
    row: ReplacedLayer,
    planned: LayerPlan,
    plan: Plan,
    loads: Array | None,
    options: Any,
    module: Any,
) -> Follower:
    """Items are experts; as many as the plan packed can be."""
    layer, experts = row._layer, planned.facts.experts
    if set(layer.packed.experts) != set(planned.packed):
        raise InvalidArgument(
            f"{row.name}: the experts {sorted(layer.packed.experts)} are packed, this plan has "
            f"{sorted(planned.packed)}: follow the plan that the model was replaced with"
        )
    force = [weakref.ref(layer.packed)]  # copies go with their layer
    size = packed_bytes(expert_of(planned.facts))
    speedup = plan.device["packed_speedup"]
    rate = size / measured_packing(module, layer, row.name)
    units = [
        Unit(
            "packed",
            cold_costs(plan.device, planned, speedup)[1],
            bandwidth=plan.device["cold_bandwidth"],
            memory=float(size * len(planned.packed)),
            load=rate,
        ),
        Unit("in place", *cold_costs(plan.device, planned)[::-1], holds_all=True),
    ]
    scheduler = Scheduler(units, Experts(experts, nbytes=size), serial=True, **options)
    items = np.arange(experts)
    tokens = layer.packed.tokens
    start(scheduler, [e in planned.packed for e in range(experts)], items, loads)

    def change(placement: Placement, _: Ints) -> None:
        chosen = tuple(placement.experts_of(0))
        linears = matrices(module, layer, row.name)
        kept = tuple(e for e in layer.packed.experts if e in chosen)
        for members in (kept, chosen):  # the memory of those that leave first
            old = layer.packed.copies
            copies = (core.Packed(m, members, c) for m, c in zip(linears, old, strict=True))
            layer.packed = PackedCopies(tuple(copies), tokens, members)
            force[0] = weakref.ref(layer.packed)
            del old

    def in_force() -> bool:
        return layer.packed is not None and layer.packed is force[0]()

    def now() -> Placement:
        return placement_of([e in layer.packed.experts for e in range(experts)])

    return Follower(row.name, scheduler, tokens, items, change, in_force, now)


def matrices(module: Any, layer: Layer, name: str) -> list[core.Matrix]:
    """The projections' handles; UnsupportedLayer where the kernels cannot read them."""
    linears = read_linears(module, name, PROJECTIONS[layer.kind], layer.linears)
    evaluate(*weight_arrays(linears))
    try:
        return [linear.matrix(linear.arrays) for linear in linears]
    except UnknownFormat as error:
        raise UnsupportedLayer(str(error)) from error


def measured_packing(module: Any, layer: Layer, name: str) -> float:
    """Seconds that packing one expert takes, the better of two."""
    best = inf
    for _ in range(2):
        begin = perf_counter()
        for matrix in matrices(module, layer, name):
            core.Packed(matrix, [0])
        best = min(best, perf_counter() - begin)
    return best
