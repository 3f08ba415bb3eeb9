"""What one machine does with a step, strategy by strategy, as tasks of its units."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .cost import Expert, cold_seconds, expert_of, package_experts, shared_expert_of
from .devices import Device
from .errors import InvalidArgument
from .grouping import Bundle, run_groups
from .plan import LayerPlan, Plan
from .simulate_engine import Task, Unit
from .simulate_routing import Routing
from .simulate_units import COLD, HOST, STATIC, Machine
from .tiers import STEP

Array = NDArray[np.float64]
NAIVE_OVERFLOW = 0.01  # of all assignments, beyond the one capacity of the naive strategy


@dataclass(frozen=True)
class Dense:
    """What a layer has to compute beside its experts, on the cold path's unit.

    Attributes:
        flops: [steps].
        bytes: of weights, read in every step.
    """

    flops: Array
    bytes: float

    def check(self, steps: int) -> None:
        """Raise InvalidArgument where it is not of so many steps, or cannot be."""
        if self.flops.shape != (steps,) or not np.isfinite([*self.flops, self.bytes]).all():
            raise InvalidArgument(
                f"dense: {list(self.flops.shape)} FLOPs and {self.bytes} bytes, expected [{steps}] "
                "finite ones, of the steps that are simulated"
            )
        if min(*self.flops, self.bytes) < 0:
            raise InvalidArgument("dense: negative FLOPs or bytes")


class Strategy(ABC):
    """A way to do the steps of a routing.

    Attributes:
        units: that there are.
        core_watts: of a busy core of the host.
        counts_cpu_time: whether its tasks' processor time is all that there is.
        hot_bytes: of copies beside the model's own weights.
    """

    units: dict[str, Unit]
    core_watts: float | None
    counts_cpu_time: bool = True
    hot_bytes: int = 0

    @abstractmethod
    def tasks(self, step: int) -> list[Task]:
        """All layers of one step, one after the other."""


@dataclass(frozen=True)
class ColdPath:
    """Where what is not static is computed.

    Attributes:
        device: whose numbers it costs.
        cores: of the host that are busy meanwhile.
    """

    device: Device
    unit: str
    cores: float

    @staticmethod
    def of(machine: Machine) -> "ColdPath":
        return ColdPath(machine.device, COLD, machine.cold_cores)

    @staticmethod
    def on_host(machine: Machine) -> "ColdPath":
        return ColdPath(machine.on_host(), HOST, machine.cores)

    def task(self, seconds: float, after: tuple[int, ...]) -> Task:
        """Of so much work; one core of the host starts it."""
        start = self.device["cold_seconds"]
        cpu = self.cores * (start + seconds) if self.cores else start
        return Task(self.unit, start + seconds, after, None if self.cores else seconds, cpu)


class MachineStrategy(Strategy):
    """Layers one after the other on one machine; the experts of each are up to `experts`."""

    def __init__(
        self, machine: Machine, routing: Routing, cold: ColdPath, dense: Dense | None = None
    ):
        self.machine, self.routing, self.cold, self.dense = machine, routing, cold, dense
        self.units, self.core_watts = machine.units, machine.core_watts
        self.counts_cpu_time = machine.counts_cpu_time
        if dense is not None:
            dense.check(routing.steps)

    def tasks(self, step: int) -> list[Task]:
        tasks: list[Task] = []
        for layer in range(len(self.routing.facts)):
            if self.dense is not None:
                tasks.append(self.cold.task(self._dense_seconds(step), _last(tasks)))
            self.experts(layer, step, tasks)
        return tasks

    def _dense_seconds(self, step: int) -> float:
        assert self.dense is not None
        device = self.cold.device
        computing = float(self.dense.flops[step]) / device["cold_flops"]
        return max(computing, self.dense.bytes / device["cold_bandwidth"])

    @abstractmethod
    def experts(self, layer: int, step: int, tasks: list[Task]) -> None:
        """Append the tasks of a layer's experts, the last of them last."""


class AllCold(MachineStrategy):
    """Every expert on the cold path."""

    def __init__(
        self, machine: Machine, routing: Routing, cold: ColdPath, dense: Dense | None = None
    ):
        super().__init__(machine, routing, cold, dense)
        self._seconds = [_cold(cold.device, routing, i) for i in range(len(routing.facts))]

    def experts(self, layer: int, step: int, tasks: list[Task]) -> None:
        tasks.append(self.cold.task(float(self._seconds[layer][step]), _last(tasks)))


@dataclass(frozen=True, eq=False)
class Programs:
    """A layer's static programs.

    Attributes:
        beside: of the shared expert, if that is hot.
        start: tokens from which they are used.
    """

    bundles: list[Bundle]
    beside: Bundle | None
    tiers: tuple[int, ...]
    start: int


class OnPrograms(MachineStrategy):
    """Some experts in static programs, the others and what is over on the cold path meanwhile."""

    def __init__(
        self,
        machine: Machine,
        routing: Routing,
        cold: ColdPath,
        programs: list[Programs | None],
        weights: str,
        dense: Dense | None = None,
    ):
        super().__init__(machine, routing, cold, dense)
        self.programs = programs
        self._all_cold = AllCold(machine, routing, cold)
        self._layers = [
            None if found is None else _Run(self, i, found, weights)
            for i, found in enumerate(programs)
        ]
        self.hot_bytes = sum(run.bytes for run in self._layers if run is not None)

    def experts(self, layer: int, step: int, tasks: list[Task]) -> None:
        run, found = self._layers[layer], self.programs[layer]
        if run is None or found is None or self.routing.tokens[step] < found.start:
            self._all_cold.experts(layer, step, tasks)
            return
        if moving := float(run.moving[step]):
            tasks.append(self._on_all_cores(moving, tasks))
        begun = _last(tasks)
        waits = []
        dispatch = self.machine.device["dispatch_seconds"]
        for seconds, count in zip(run.seconds[:, step], run.dispatches[:, step], strict=True):
            for _ in range(int(count)):
                each = float(seconds) / int(count)
                tasks.append(Task(STATIC, each, begun, max(each - dispatch, 0.0), dispatch))
                waits.append(len(tasks) - 1)
        if cold := float(run.cold[step]):
            tasks.append(self.cold.task(cold, begun))
            waits.append(len(tasks) - 1)
        wait = self.machine.device["sync_seconds"] if run.dispatches[:, step].any() else 0.0
        tasks.append(Task(HOST, wait, tuple(waits) or begun, cpu_seconds=wait))
        if moving:
            tasks.append(self._on_all_cores(moving, tasks))

    def _on_all_cores(self, seconds: float, tasks: list[Task]) -> Task:
        cpu_seconds = seconds * self.machine.cores
        return Task(HOST, seconds, _last(tasks), cpu_seconds=cpu_seconds)


class _Run:
    """What a layer's programs do with every step: [bundles, steps] and [steps]."""

    def __init__(self, strategy: OnPrograms, layer: int, programs: Programs, weights: str):
        routing, machine = strategy.routing, strategy.machine
        facts, loads, device = routing.facts[layer], routing.loads[layer], machine.device
        expert, shared = expert_of(facts), shared_expert_of(facts)
        jobs: list[tuple[Expert, Bundle, Array]] = [(expert, b, loads) for b in programs.bundles]
        tokens = routing.tokens[:, None].astype(np.float64)
        if programs.beside is not None and shared is not None:
            jobs.append((shared, programs.beside, tokens))
        ran = [
            run_groups(device, of, weights, given, [bundle], programs.tiers)
            for of, bundle, given in jobs
        ]
        self.seconds = np.array([r.seconds for r in ran]).reshape(len(ran), -1)
        self.dispatches = np.array([r.dispatches for r in ran]).reshape(len(ran), -1)
        left, left_beside = loads.copy(), tokens
        for r, (of, bundle, _) in zip(ran, jobs, strict=True):
            if of is expert:
                members = list(bundle.experts)
                left[:, members] = r.spilled[:, members]
            else:
                left_beside = r.spilled
        cold = strategy.cold.device
        self.cold = cold_seconds(cold, expert, left).sum(axis=1)
        hot_rows = (loads - left).sum(axis=1)
        if shared is not None:
            self.cold = self.cold + cold_seconds(cold, shared, left_beside)[:, 0]
            hot_rows = hot_rows + (tokens - left_beside)[:, 0]
        self.moving = machine.move_seconds(expert, hot_rows)
        self.bytes = sum(of.static_bytes(weights) * len(b.experts) for of, b, _ in jobs)


def of_plan(plan: Plan, forced: bool) -> list[Programs | None]:
    """A plan's programs; `forced` ones are used at any number of tokens."""
    return [_of_layer(layer, forced) for layer in plan.layers]


def _of_layer(layer: LayerPlan, forced: bool) -> Programs | None:
    if layer.static_from is None:
        return None
    bundles = [
        Bundle(group.experts, group.tier, group.parts, group.spill_limit)
        for group in layer.groups
        if group.split[0] == 0  # the other parts of an expert come with its first
    ]
    beside = None
    if layer.shared and layer.shared.groups:
        first = layer.shared.groups[0]
        beside = Bundle(first.experts, first.tier, first.parts, first.spill_limit)
    return Programs(bundles, beside, layer.tiers, 0 if forced else layer.static_from)


def naive(machine: Machine, routing: Routing, weights: str) -> list[Programs | None]:
    """A dispatch for each expert that has tokens, all of one capacity: the least that leaves
    NAIVE_OVERFLOW of the assignments over."""
    capacity = one_capacity(routing.loads)
    found: list[Programs | None] = []
    for facts in routing.facts:
        _, parts = package_experts(machine.device, expert_of(facts), weights)
        never = int(facts.top_k * routing.tokens.max()) + 1  # what is over is not tiled again
        bundles = [Bundle((e,), capacity, parts, never) for e in range(facts.experts)]
        found.append(Programs(bundles, None, (capacity,), 0))
    return found


def one_capacity(loads: list[Array]) -> int:
    """The least multiple of STEP with at most NAIVE_OVERFLOW of all assignments over."""
    most = max(float(x.max()) for x in loads)
    allowed = NAIVE_OVERFLOW * sum(float(x.sum()) for x in loads)

    def enough(capacity: int) -> bool:
        return sum(float(np.maximum(x - capacity, 0).sum()) for x in loads) <= allowed

    capacities = range(STEP, int(most) + 2 * STEP, STEP)  # the last holds the most
    return capacities[bisect_left(capacities, True, key=enough)]


def _cold(device: Device, routing: Routing, layer: int) -> Array:
    """Seconds of all of a layer's experts, the shared one too, in every step."""
    facts = routing.facts[layer]
    seconds = cold_seconds(device, expert_of(facts), routing.loads[layer]).sum(axis=1)
    if (shared := shared_expert_of(facts)) is not None:
        tokens = routing.tokens[:, None].astype(np.float64)
        seconds = seconds + cold_seconds(device, shared, tokens)[:, 0]
    return seconds


def _last(tasks: list[Task]) -> tuple[int, ...]:
    return (len(tasks) - 1,) if tasks else ()
