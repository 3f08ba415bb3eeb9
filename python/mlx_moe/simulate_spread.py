"""What several units do with a step: experts, or parts of them, spread over units and links."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from .cost import FP16, Expert, cold_seconds, expert_of
from .devices import Device
from .errors import InvalidArgument
from .simulate_engine import Task, Unit
from .simulate_layers import Dense, Strategy
from .simulate_routing import Routing

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Link:
    """The way to a unit: seconds of a message, and bytes a second. Links of one name are one."""

    name: str
    seconds: float
    bandwidth: float


@dataclass(frozen=True)
class SpreadUnit:
    """One of the units.

    Attributes:
        device: its numbers; `cold_seconds` is paid for each expert, or part of one, with work.
        link: over which rows and weights reach it; None: they are there.
        rows: whether rows travel over the link too, or weights alone.
        watts: beyond idle, while it works.
    """

    name: str
    device: Device
    link: Link | None
    rows: bool = True
    watts: float | None = None


@dataclass(frozen=True, eq=False)
class Spread:
    """Where a layer's experts are in every step.

    Attributes:
        shares: [steps, E, units], parts of each expert; they sum to 1 over the units.
        arriving: [steps, units], bytes of weights that a unit gets for this step.
    """

    shares: Array
    arriving: Array

    def check(self, shape: tuple[int, int, int], name: str) -> None:
        """Raise InvalidArgument where it is not of so many steps, experts and units."""
        steps, _, units = shape
        if self.shares.shape != shape or self.arriving.shape != (steps, units):
            raise InvalidArgument(
                f"{name}: shares {list(self.shares.shape)} and arriving "
                f"{list(self.arriving.shape)}, expected {list(shape)} and {[steps, units]}"
            )
        if not ((self.shares >= 0).all() and np.allclose(self.shares.sum(axis=2), 1)):
            raise InvalidArgument(
                f"{name}: shares of an expert are negative, or do not add up to 1"
            )
        if not ((self.arriving >= 0) & (self.arriving < inf)).all():
            raise InvalidArgument(f"{name}: bytes that arrive are negative, or not finite")


def fixed(shares: Array, steps: int) -> Spread:
    """The same in every step."""
    return Spread(
        np.broadcast_to(shares, (steps, *shares.shape)), np.zeros((steps, shares.shape[1]))
    )


def in_turn(experts: int, units: Sequence[int], count: int) -> Array:
    """Shares [E, count]: whole experts dealt out to some of the units, one after the other."""
    shares = np.zeros((experts, count))
    shares[np.arange(experts), np.array(units)[np.arange(experts) % len(units)]] = 1
    return shares


class OnUnits(Strategy):
    """Layers one after the other, each by all units at once; the first one has what is dense."""

    def __init__(
        self,
        routing: Routing,
        units: Sequence[SpreadUnit],
        spreads: Sequence[Spread],
        dense: Dense | None = None,
    ):
        self.routing, self.members, self.spreads, self.dense = routing, list(units), spreads, dense
        self.units = {u.name: Unit(u.name, u.watts) for u in units}
        self.units |= {u.link.name: Unit(u.link.name, 0.0) for u in units if u.link is not None}
        self.core_watts = 0.0  # the hosts are not part of it
        if dense is not None:
            dense.check(routing.steps)
        for facts, spread in zip(routing.facts, spreads, strict=True):
            spread.check((routing.steps, facts.experts, len(self.members)), facts.name)
        self._seconds = [
            _unit_seconds(self.members, expert_of(facts), loads, spread.shares)
            for facts, loads, spread in zip(routing.facts, routing.loads, spreads, strict=True)
        ]

    def tasks(self, step: int) -> list[Task]:
        tasks: list[Task] = []
        arrivals = [self._weights(layer, step, tasks) for layer in range(len(self.spreads))]
        before: tuple[int, ...] = ()
        for layer in range(len(self.spreads)):
            if self.dense is not None:
                tasks.append(Task(self.members[0].name, self._dense_seconds(step), before))
                before = (len(tasks) - 1,)
            before = self._experts(layer, step, before, arrivals[layer], tasks)
        return tasks

    def _dense_seconds(self, step: int) -> float:
        assert self.dense is not None
        device = self.members[0].device
        computing = float(self.dense.flops[step]) / device["cold_flops"]
        return max(computing, self.dense.bytes / device["cold_bandwidth"])

    def _weights(self, layer: int, step: int, tasks: list[Task]) -> dict[int, int]:
        """Weights on their way since the beginning of the step: the task of each unit's."""
        found = {}
        for number, unit in enumerate(self.members):
            size = float(self.spreads[layer].arriving[step, number])
            if size and unit.link is not None:
                seconds = unit.link.seconds + size / unit.link.bandwidth
                tasks.append(Task(unit.link.name, seconds))
                found[number] = len(tasks) - 1
        return found

    def _experts(
        self,
        layer: int,
        step: int,
        before: tuple[int, ...],
        arrivals: dict[int, int],
        tasks: list[Task],
    ) -> tuple[int, ...]:
        """The tasks of a layer's experts; returns those that end it."""
        ends = []
        for number, unit in enumerate(self.members):
            seconds, rows = (float(x[step, number]) for x in self._seconds[layer])
            if not seconds:
                continue
            rows = min(rows, float(self.routing.tokens[step]))  # a token travels once
            moving = None
            if unit.link is not None and unit.rows:
                size = rows * self.routing.facts[layer].hidden * FP16
                moving = unit.link.seconds + size / unit.link.bandwidth
            waits = before
            if moving is not None:
                assert unit.link is not None
                tasks.append(Task(unit.link.name, moving, before))
                waits = (len(tasks) - 1,)
            if number in arrivals:
                waits = (*waits, arrivals[number])
            tasks.append(Task(unit.name, seconds, waits))
            if moving is not None:
                assert unit.link is not None
                tasks.append(Task(unit.link.name, moving, (len(tasks) - 1,)))
            ends.append(len(tasks) - 1)
        return tuple(ends) or before


def _unit_seconds(
    units: list[SpreadUnit], expert: Expert, loads: Array, shares: Array
) -> tuple[Array, Array]:
    """Seconds of each unit in every step [steps, units], and the assignments that it gets."""
    seconds, rows = np.zeros(shares[:, 0].shape), np.zeros(shares[:, 0].shape)
    for number, unit in enumerate(units):
        own = shares[:, :, number]
        pieces = (own > 0) & (loads > 0)
        part = (own * cold_seconds(unit.device, expert, loads)).sum(axis=1)
        seconds[:, number] = part + pieces.sum(axis=1) * unit.device["cold_seconds"]
        rows[:, number] = (loads * pieces).sum(axis=1)
    return seconds, rows


def device_of(base: Device, name: str, **values: float) -> Device:
    """A profile with other numbers."""
    changed = {key: replace(base.numbers[key], value=value) for key, value in values.items()}
    return replace(base, name=name, numbers=base.numbers | changed)
