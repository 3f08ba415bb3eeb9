"""Spreads that the load-balancing scheduler makes, as it would live."""

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from .cost import FP16, expert_of
from .layer_facts import LayerFacts
from .schedule import Experts, Scheduler, Unit
from .simulate_spread import Spread, SpreadUnit

Array = NDArray[np.float64]


def scheduler_of(
    facts: LayerFacts,
    units: Sequence[SpreadUnit],
    shards: int = 1,
    memory: Sequence[float] | None = None,
) -> Scheduler:
    """A layer's scheduler, told what the units' profiles and links say.

    Args:
        shards: parts that an expert can be cut into.
        memory: bytes of this layer's experts that each unit can hold; None: any.
    """
    expert = expert_of(facts)
    found = []
    for number, unit in enumerate(units):
        link = unit.link
        there = 2 * link.seconds if link is not None and unit.rows else 0.0
        found.append(
            Unit(
                unit.name,
                seconds=expert.flops / unit.device["cold_flops"],
                dispatch=unit.device["cold_seconds"] + there,
                bandwidth=unit.device["cold_bandwidth"],
                memory=inf if memory is None else memory[number],
                link=link.bandwidth if link is not None and unit.rows else inf,
                load=link.bandwidth if link is not None else inf,
            )
        )
    rows = 2.0 * FP16 * facts.hidden
    return Scheduler(found, Experts(facts.experts, expert.cold_bytes, rows, shards))


def scheduled(scheduler: Scheduler, before: Array, loads: Array) -> Spread:
    """The placement that is in force in every step, and the weights that come with re-plans.

    Args:
        before: [steps, E], what was routed before; it is placed by these, and told of each.
        loads: [steps, E], of the steps; it is told of each after it.
    """
    scheduler.plan(before.mean(axis=0), float(before.sum()))
    for histogram in before:
        scheduler.observe(histogram)
    size = scheduler.experts.nbytes
    shares, arriving = [], []
    old: Array | None = None
    for histogram in loads:
        placement = scheduler.placement
        assert placement is not None
        now = placement.shares
        came = np.zeros(now.shape[1]) if old is None else np.maximum(now - old, 0).sum(axis=0)
        shares.append(now)
        arriving.append(came * size)
        old = now
        scheduler.observe(histogram)
    return Spread(np.array(shares), np.array(arriving))
