"""Simulated latency, energy and processor time of a routing, strategy by strategy."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .devices import Device
from .errors import InvalidArgument
from .planner import experts_bytes, make_plan
from .progress import progress_bar
from .simulate_engine import joules, run
from .simulate_layers import AllCold, ColdPath, Dense, OnPrograms, Strategy, naive, of_plan
from .simulate_routing import Routing
from .simulate_units import Machine

STRATEGIES = ("cpu", "cold", "naive", "plan", "plan-cpu", "forced")
FORCED = 0.9  # of the assignments, of the strategy `forced`


@dataclass(frozen=True)
class Outcome:
    """Means over the steps, of all layers together.

    Attributes:
        strategy: its name.
        seconds, p95_seconds: of a step.
        joules: of a step, idling aside; None where a unit's watts or the host are not known.
        idle_joules: what the idle machine draws meanwhile; None where that is not known.
        cpu_seconds: of all cores together; None where the host is not known.
        dispatches: of static programs, in a step.
        busy: share of the time that each unit works.
        hot_bytes: of copies beside the model's own weights.
        note: what there is to say of it.
    """

    strategy: str
    seconds: float
    p95_seconds: float
    joules: float | None
    idle_joules: float | None
    cpu_seconds: float | None
    dispatches: float
    busy: dict[str, float]
    hot_bytes: int
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def simulate(
    routing: Routing,
    device: Device,
    strategies: tuple[str, ...] = STRATEGIES,
    *,
    memory: int | None = None,
    weights: str = "fp16",
    force_hot: float = FORCED,
    dense: Dense | None = None,
    progress: bool = False,
) -> list[Outcome]:
    """Every strategy over the same steps, those that planning did not see.

    Args:
        routing: its every other step is planned by, the others are simulated.
        strategies: of STRATEGIES: `cpu` (all experts on the processor), `cold` (on the cold path:
            the GPU of an Apple device), `naive` (one static program for each expert, one capacity
            for all), `plan` (what `make_plan` chooses), `plan-cpu` (the same with the processor
            as the cold path) and `forced` (as `plan`, with `force_hot` of the assignments hot
            whether that is faster or not).
        memory: bytes for hot experts, as `make_plan` takes it.
        weights: of static programs.
        dense: what layers compute beside their experts, of the simulated steps.
        progress: show a progress bar on stderr if it takes more than two seconds.

    Raises:
        InvalidArgument: a strategy that there is not, or that the device has no unit for; an
            argument that `make_plan` refuses.
    """
    machine = Machine(device)
    seen, rest = routing.halves()
    found = []
    with progress_bar(progress, total=len(strategies) * rest.steps, unit="step") as bar:
        for name in strategies:
            bar.set_description(name)
            built, note = _strategy(name, machine, seen, rest, memory, weights, force_hot, dense)
            room = _room(machine.device, routing, built.hot_bytes, memory)
            notes = ", ".join(part for part in (note, room) if part)
            idle = machine.number("idle_watts")
            found.append(outcome(name, built, rest.steps, idle, notes, bar))
    return found


def _room(device: Device, routing: Routing, hot_bytes: int, memory: int | None) -> str:
    """What there is to say where the memory is too small."""
    if memory is not None:
        if hot_bytes <= memory:
            return ""
        return f"its copies take {hot_bytes / 1e9:.3g} GB, of {memory / 1e9:.3g} GB for them"
    needed = hot_bytes + experts_bytes(routing.facts)
    if needed <= device["memory_bytes"]:
        return ""
    return f"takes {needed / 1e9:.3g} GB, of {device['memory_bytes'] / 1e9:.3g} GB of memory"


def _strategy(
    name: str,
    machine: Machine,
    seen: Routing,
    rest: Routing,
    memory: int | None,
    weights: str,
    force_hot: float,
    dense: Dense | None,
) -> tuple[Strategy, str]:
    if name not in STRATEGIES:
        raise InvalidArgument(f"no strategy {name!r}, expected of {', '.join(STRATEGIES)}")
    cold = ColdPath.of(machine)
    if name == "cpu":
        return AllCold(machine, rest, ColdPath.on_host(machine), dense), ""
    if name == "cold":
        return AllCold(machine, rest, cold, dense), ""
    device = machine.device
    if device.executor != "static":
        raise InvalidArgument(
            f"strategy {name!r} needs a static executor, and device {device.name!r} has none: "
            "simulate an Apple device (m2-max), or take cold"
        )
    if name == "naive":
        programs = naive(machine, seen, weights)
        note = f"capacity {next(p.tiers[0] for p in programs if p)}"
        return OnPrograms(machine, rest, cold, programs, weights, dense), note
    forced = name == "forced"
    if name == "plan-cpu":
        cold = ColdPath.on_host(machine)
    plan = make_plan(
        seen.calibration(),
        cold.device,
        memory=1 << 62 if forced else memory,
        weights=weights,
        force_hot=force_hot if forced else None,
    )
    hot = [layer.expected.hot for layer in plan.layers]
    static = sum(layer.static_from is not None for layer in plan.layers)
    note = f"{np.mean(hot):.0%} of assignments hot, {static} of {len(hot)} layers"
    return OnPrograms(machine, rest, cold, of_plan(plan, forced), weights, dense), note


def outcome(
    name: str,
    strategy: Strategy,
    steps: int,
    idle_watts: float | None,
    note: str = "",
    bar: Any = None,
) -> Outcome:
    """Run every step on its own: the units begin it idle."""
    lines = []
    for step in range(steps):
        lines.append(run(strategy.tasks(step), strategy.units))
        if bar is not None:
            bar.update()
    seconds = np.array([line.seconds for line in lines])
    energies = [joules(line, strategy.units, strategy.core_watts) for line in lines]
    known = [e for e in energies if e is not None] if strategy.counts_cpu_time else []
    total = float(seconds.sum())
    return Outcome(
        name,
        float(seconds.mean()),
        float(np.quantile(seconds, 0.95)),
        float(np.mean(known)) if len(known) == len(energies) else None,
        None if idle_watts is None else float(seconds.mean()) * idle_watts,
        float(np.mean([line.cpu_seconds for line in lines])) if strategy.counts_cpu_time else None,
        float(np.mean([line.tasks.get("static", 0) for line in lines])),
        {
            unit: sum(line.working[unit] for line in lines) / total if total else 0.0
            for unit in strategy.units
        },
        strategy.hot_bytes,
        note,
    )
