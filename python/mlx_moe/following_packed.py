"""Experts that are packed for the CPU kernels in place of others."""

from math import inf
from time import perf_counter
from typing import Any

import numpy as np

from . import core
from .cost import Array, expert_of
from .follower import Follower, Ints, cold_costs, start
from .layers import PROJECTIONS, PackedCopies
from .plan import LayerPlan, Plan
from .plan_cpu import packed_bytes
from .replacement import ReplacedLayer
from .schedule import Experts, Placement, Scheduler, Unit
from .weights import Linear


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
    force = [layer.packed]
    size = packed_bytes(expert_of(planned.facts))
    speedup = plan.device["packed_speedup"]
    rate = size / measured_packing(module, layer.kind, row.name)
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
    start(scheduler, [0 if e in planned.packed else 1 for e in range(experts)], items, loads)

    def change(placement: Placement, _: Ints) -> None:
        layer.packed = force[0] = None  # the old copies' memory first
        chosen = placement.experts_of(0)
        copies = tuple(core.Packed(m, chosen) for m in matrices(module, layer.kind, row.name))
        layer.packed = force[0] = PackedCopies(copies, tokens, tuple(chosen))

    def in_force() -> bool:
        return layer.packed is force[0]

    return Follower(row.name, scheduler, tokens, items, change, in_force)


def matrices(module: Any, kind: str, name: str) -> list[core.Matrix]:
    linears = [Linear(module[p], f"{name}.{p}") for p in PROJECTIONS[kind]]
    return [linear.matrix(linear.arrays) for linear in linears]


def measured_packing(module: Any, kind: str, name: str) -> float:
    """Seconds that packing one expert takes, the better of two."""
    best = inf
    for _ in range(2):
        begin = perf_counter()
        for matrix in matrices(module, kind, name):
            core.Packed(matrix, [0])
        best = min(best, perf_counter() - begin)
    return best
