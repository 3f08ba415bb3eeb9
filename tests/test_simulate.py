"""The simulator: its events by hand and against another schedule, its costs against the plan's."""

from dataclasses import replace

import numpy as np
import pytest
from plan_data import facts, skewed

from mlx_moe.calibration import Calibration
from mlx_moe.chunks import chunk_loads
from mlx_moe.cost import cold_seconds, expert_of, static_seconds
from mlx_moe.devices import Device, load_device
from mlx_moe.errors import CorruptFile, InvalidArgument
from mlx_moe.planner import make_plan
from mlx_moe.simulate import outcome, simulate
from mlx_moe.simulate_engine import Task, Unit, joules, run
from mlx_moe.simulate_layers import (
    AllCold,
    ColdPath,
    Dense,
    OnPrograms,
    naive,
    of_plan,
    one_capacity,
)
from mlx_moe.simulate_routing import (
    Histograms,
    Routing,
    of_histograms,
)
from mlx_moe.simulate_schedule import scheduled, scheduler_of
from mlx_moe.simulate_spread import Link, OnUnits, Spread, SpreadUnit, device_of, fixed, in_turn
from mlx_moe.simulate_units import Machine

UNITS = {"a": Unit("a", 2.0), "b": Unit("b", 3.0), "host": Unit("host", 0.0)}
LARGE = 1 << 45


@pytest.mark.parametrize(
    ("tasks", "ends"),
    [
        ([], []),
        ([Task("a", 2), Task("b", 3)], [2, 3]),
        ([Task("a", 2), Task("a", 3)], [2, 5]),
        ([Task("a", 2), Task("b", 1, (0,)), Task("b", 5)], [2, 6, 5]),  # ready first, not listed
        ([Task("a", 2), Task("a", 1, (0,)), Task("b", 2), Task("a", 4, (2,))], [2, 3, 2, 7]),
        ([Task("a", 0), Task("b", 0, (0,)), Task("a", 1, (0, 1))], [0, 0, 1]),
    ],
)
def test_events_by_hand(tasks: list[Task], ends: list[float]) -> None:
    line = run(tasks, UNITS)
    assert line.ends == ends and line.seconds == max(ends, default=0)


@pytest.mark.parametrize("tasks", [[Task("a", 1, (0,))], [Task("a", 1, (5,))]])
def test_tasks_that_can_never_start(tasks: list[Task]) -> None:
    with pytest.raises(ValueError, match="wait"):
        run(tasks, UNITS)


def by_ticks(tasks: list[Task]) -> list[float]:
    """The same schedule, whole seconds one after the other."""
    ends = [-1] * len(tasks)
    ready: dict[int, int] = {}
    now, busy = 0, {name: (-1, 0) for name in UNITS}
    while -1 in ends:
        for name, (task, until) in busy.items():
            if task >= 0 and until == now:
                ends[task], busy[name] = now, (-1, 0)
        for i, task in enumerate(tasks):
            if i not in ready and all(0 <= ends[j] <= now for j in task.after):
                ready[i] = now
        for name, (task, _) in busy.items():
            left = [i for i in ready if tasks[i].unit == name and ends[i] < 0]
            left = [i for i in left if i not in (t for t, _ in busy.values())]
            if task < 0 and left:
                first = min(left, key=lambda i: (ready[i], i))
                busy[name] = (first, now + int(tasks[first].seconds))
        now += 1
    return ends


@pytest.mark.parametrize("seed", range(30))
def test_events_against_a_schedule_by_ticks(seed: int) -> None:
    random = np.random.default_rng(seed)
    tasks = [
        Task(
            str(random.choice(list(UNITS))),
            int(random.integers(1, 6)),
            tuple(int(j) for j in random.choice(i, min(i, random.integers(0, 3)), replace=False)),
        )
        for i in range(25)
    ]
    assert run(tasks, UNITS).ends == by_ticks(tasks)


def test_energy_is_of_work_and_cores() -> None:
    tasks = [Task("a", 2), Task("b", 4, working=1, cpu_seconds=3), Task("host", 1, cpu_seconds=1)]
    assert joules(run(tasks, UNITS), UNITS, 5.0) == 2 * 2 + 1 * 3 + 4 * 5
    assert joules(run(tasks, UNITS), UNITS, None) is None
    unknown = UNITS | {"a": Unit("a")}
    assert joules(run(tasks, unknown), unknown, 5.0) is None
    assert joules(run(tasks[1:], unknown), unknown, 5.0) == 1 * 3 + 4 * 5


def routing_of(made: Calibration) -> Routing:
    loads = chunk_loads(made, made.chunk)
    tokens = np.full(len(loads[0]), made.chunk, np.int64)
    return Routing("made-up", made.layers, tokens, loads, "a test")


@pytest.mark.parametrize(
    ("options", "device", "force"),
    [
        ({"chunk": 2048, "experts": 32, "top_k": 4}, "m3-max", None),
        ({"chunk": 512, "experts": 32, "top_k": 4, "shared": 4096, "skew": 0.5}, "m4", 0.8),
        ({"chunk": 512, "experts": 8, "hidden": 4096, "inner": 14336}, "m1", 0.7),  # split
        ({"chunk": 64}, "m2", None),  # nothing static
    ],
)
def test_a_plan_takes_what_planning_expected(options, device: str, force: float | None) -> None:
    made = skewed(**options)
    plan = make_plan(made, device, memory=LARGE, force_hot=force)
    machine, routing = Machine(load_device(device)), routing_of(made)
    cold = ColdPath.of(machine)
    planned = OnPrograms(machine, routing, cold, of_plan(plan, force is not None), plan.weights)
    found = outcome("plan", planned, routing.steps, None)
    all_cold = outcome("cold", AllCold(machine, routing, cold), routing.steps, None)
    expected = [layer.expected for layer in plan.layers]
    assert found.seconds * 1e3 == pytest.approx(sum(e.static_ms for e in expected), rel=1e-9)
    assert all_cold.seconds * 1e3 == pytest.approx(sum(e.cold_ms for e in expected), rel=1e-9)
    assert planned.hot_bytes == sum(e.bytes for e in expected)
    assert (found.dispatches > 0) == any(layer.all_groups for layer in plan.layers)
    assert found.joules is None and found.idle_joules is None  # no watts in these profiles


def test_few_tokens_stay_on_the_cold_path_unless_forced() -> None:
    made = skewed(chunk=2048, experts=32, top_k=4)
    plan = make_plan(made, "m3-max", memory=LARGE)
    start = max(layer.static_from or 0 for layer in plan.layers)
    assert start > 1
    routing = replace(routing_of(made), tokens=np.full(24, 1, np.int64))
    machine = Machine(load_device("m3-max"))
    for forced in (False, True):
        strategy = OnPrograms(machine, routing, ColdPath.of(machine), of_plan(plan, forced), "fp16")
        assert (outcome("plan", strategy, 2, None).dispatches > 0) == forced


def test_naive_dispatches_every_expert_that_has_tokens() -> None:
    layer = facts(experts=4, hidden=4096, inner=14336)  # two programs to an expert
    loads = np.array([[300.0, 20, 0, 700], [0, 0, 0, 1024]])
    routing = Routing("x", [layer], np.array([512, 512]), [loads], "a test")
    machine = Machine(load_device("m3-max"))
    programs = naive(machine, routing, "fp16")
    assert programs[0] is not None and programs[0].tiers == (1024,)
    strategy = OnPrograms(machine, routing, ColdPath.of(machine), programs, "fp16")
    assert [run(strategy.tasks(i), strategy.units).tasks["static"] for i in range(2)] == [6, 2]
    each = [
        float(static_seconds(machine.device, expert_of(layer), "fp16", 1, 1024, width))
        for width in (7168, 7168)
    ]
    seconds = run(strategy.tasks(1), strategy.units).seconds
    assert seconds == pytest.approx(sum(each) + machine.device["sync_seconds"])


@pytest.mark.parametrize(
    ("loads", "capacity"),
    [
        ([[10.0, 20.0]], 32),
        ([[0.0, 0.0]], 32),
        ([[1000.0, 10.0]], 1000),
        ([[1000.0, 5.0], [1.0, 1.0]], 1000),
        ([[100.0] * 99 + [200.0]], 128),
    ],
)
def test_one_capacity_leaves_a_hundredth_over(loads, capacity: int) -> None:
    found = one_capacity([np.array(loads)])
    assert found % 32 == 0 and found - 32 < capacity <= found + 10


def test_energy_and_processor_time_of_one_layer_by_hand() -> None:
    device = load_device("m2-max")
    known = {name: number.value for name, number in device.simulation.items()}
    core = known["host_watts"] / known["host_cores"]
    layer, tokens = facts(experts=4), 256
    loads = np.array([[256.0, 128, 100, 28]])
    routing = Routing("x", [layer], np.array([tokens]), [loads], "a test")
    dense = Dense(np.array([1e9]), 1e6)
    cpu, cold = simulate(routing, device, ("cpu", "cold"), dense=dense)

    on_gpu = cold_seconds(device, expert_of(layer), loads).sum() + 1e9 / device["cold_flops"]
    start = 2 * device["cold_seconds"]
    assert cold.seconds == pytest.approx(on_gpu + start)
    assert cold.cpu_seconds == pytest.approx(start)
    assert cold.joules == pytest.approx(on_gpu * known["cold_watts"] + start * core)
    assert cold.idle_joules == pytest.approx(cold.seconds * known["idle_watts"])

    work = (loads.sum() * expert_of(layer).flops + 1e9) / known["host_flops"] + 2 * 2e-5
    assert cpu.seconds == pytest.approx(work)
    assert cpu.cpu_seconds == pytest.approx(work * known["host_cores"])
    assert cpu.joules == pytest.approx(work * known["host_watts"])


def test_static_work_costs_packing_and_dispatching() -> None:
    device = load_device("m2-max")
    layer = facts(experts=2)
    loads = np.array([[256.0, 256.0]])
    routing = Routing("x", [layer], np.array([256]), [loads], "a test")
    machine = Machine(device)
    strategy = OnPrograms(
        machine, routing, ColdPath.of(machine), naive(machine, routing, "fp16"), "fp16"
    )
    found = outcome("naive", strategy, 1, None)
    known = {name: number.value for name, number in device.simulation.items()}
    one = float(static_seconds(device, expert_of(layer), "fp16", 1, 256))
    moving = 2 * (2 * 2 * 512 * 2048) / known["host_bandwidth"]  # twice a copy of the rows
    assert found.seconds == pytest.approx(2 * one + 2 * moving + device["sync_seconds"])
    waiting = 2 * device["dispatch_seconds"] + device["sync_seconds"]
    assert found.cpu_seconds == pytest.approx(2 * moving * known["host_cores"] + waiting)
    working = 2 * (one - device["dispatch_seconds"])
    core = known["host_watts"] / known["host_cores"]
    expected = working * known["static_watts"] + (found.cpu_seconds or 0) * core
    assert found.joules == pytest.approx(expected)


def plain(name: str, **values: float) -> Device:
    return device_of(load_device("cpu"), name, **values)


def test_units_work_at_once_and_links_one_after_the_other() -> None:
    layer = facts(experts=4, hidden=64, inner=32)
    loads = np.array([[3.0, 1, 1, 2]])
    routing = Routing("x", [layer], np.array([2]), [loads], "a test")
    fast = plain("fast", cold_flops=1e6, cold_bandwidth=1e12, cold_seconds=1e-3)
    slow = plain("slow", cold_flops=5e5, cold_bandwidth=1e12, cold_seconds=2e-3)
    link = Link("link", 0.1, 1e4)
    units = [
        SpreadUnit("u0", fast, None, watts=10.0),
        SpreadUnit("u1", slow, link, watts=1.0),
        SpreadUnit("u2", slow, link, rows=False),
    ]
    shares = np.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [0.5, 0.5, 0]])
    arriving = np.array([[0.0, 1e4, 2.5e4]])
    strategy = OnUnits(routing, units, [Spread(shares[None], arriving)], Dense(np.array([2e6]), 0))
    line = run(strategy.tasks(0), strategy.units)
    one = 2 * 3 * 64 * 32
    first = (3 + 0.5 * 2) * one / 1e6 + 2e-3
    second = (1 + 0.5 * 2) * one / 5e5 + 4e-3
    third = one / 5e5 + 2e-3
    rows = 0.1 + 2 * 64 * 2 / 1e4  # three assignments there and back, of two tokens
    weights = (0.1 + 1) + (0.1 + 2.5)  # on their way since the beginning, one after the other
    assert line.working == pytest.approx(
        {"u0": 2.0 + first, "u1": second, "u2": third, "link": weights + 2 * rows}
    )
    assert line.ends[0:2] == pytest.approx([1.1, weights]) and weights > 2.0
    assert line.seconds == pytest.approx(weights + rows + second + rows)  # rows waited for the link
    third_end = next(
        end for end, task in zip(line.ends, strategy.tasks(0), strict=True) if task.unit == "u2"
    )
    assert third_end == pytest.approx(weights + third)  # and computing for its weights
    known = {**strategy.units, "u2": Unit("u2", 0.0)}
    assert joules(line, known, 0.0) == pytest.approx(10 * (2.0 + first) + second)


def test_experts_in_turn_and_split_take_their_shares() -> None:
    shares = in_turn(5, [1, 2], 3)
    np.testing.assert_array_equal(shares.argmax(axis=1), [1, 2, 1, 2, 1])
    np.testing.assert_array_equal(shares.sum(axis=1), 1)
    layer = facts(experts=1, top_k=1, hidden=64, inner=32)
    routing = Routing("x", [layer], np.array([8]), [np.array([[8.0]])], "a test")
    unit = plain("u", cold_flops=1e6, cold_bandwidth=1e12, cold_seconds=1e-9)
    units = [SpreadUnit(f"u{i}", unit, None) for i in range(4)]
    whole, split = (
        outcome("x", OnUnits(routing, units, [fixed(shares, 1)]), 1, None).seconds
        for shares in (in_turn(1, [0], 4), np.full((1, 4), 0.25))
    )
    assert whole / split == pytest.approx(4, rel=1e-3)


def test_a_scheduler_follows_routing_and_pays_for_what_it_moves() -> None:
    layer = facts(experts=8, hidden=256, inner=256)
    unit = plain("u", cold_flops=1e9, cold_bandwidth=1e12, cold_seconds=1e-6)
    units = [SpreadUnit(f"u{i}", unit, Link(f"l{i}", 1e-6, 1e11)) for i in range(2)]
    hot_even = np.array([40.0, 1, 40, 1, 40, 1, 40, 1])  # dealt out in turn, all on one unit
    before = np.tile(hot_even, (4, 1))
    start = scheduled(scheduler_of(layer, units), before, before).shares[0]
    together = np.flatnonzero((start[:, 0] == start[0, 0]) & (hot_even == 40))[:2]
    assert len(together) == 2  # these two will be the hot ones
    hot_two = np.where(np.isin(np.arange(8), together), 80.0, 1.0)
    loads = np.concatenate([np.tile(hot_even, (4, 1)), np.tile(hot_two, (12, 1))])
    spread = scheduled(scheduler_of(layer, units), before, loads)
    np.testing.assert_allclose(spread.shares.sum(axis=2), 1)
    work = (spread.shares * loads[:, :, None]).sum(axis=1)  # [steps, units]
    assert work[0].max() <= 0.51 * loads[0].sum()  # as it was before
    assert work[-1].max() <= 0.51 * loads[-1].sum()  # and after the shift
    moved = np.flatnonzero(spread.arriving.sum(axis=1))
    assert len(moved) and moved.min() > 4  # no step knows of its own routing
    size = expert_of(layer).cold_bytes
    for step in moved:
        came = np.maximum(spread.shares[step] - spread.shares[step - 1], 0).sum(axis=0)
        np.testing.assert_allclose(spread.arriving[step], came * size)

    def seconds(found: Spread) -> float:
        routing = Routing("x", [layer], np.full(16, 80), [loads], "a test")
        return outcome("x", OnUnits(routing, units, [found]), 16, None).seconds

    assert seconds(spread) < 0.75 * seconds(fixed(in_turn(8, [0, 1], 2), 16))


def test_profiles_keep_their_simulation_numbers() -> None:
    device = load_device("m2-ultra")
    assert Device.from_dict(device.as_dict(), "it") == device and device.simulation
    broken = device.as_dict()
    broken["simulation"] = {"host_speed": broken["simulation"]["host_flops"]}
    with pytest.raises(CorruptFile, match="host_speed"):
        Device.from_dict(broken, "it")


def test_unknown_strategies_are_named() -> None:
    routing = of_histograms(Histograms("x", {"d": np.ones((1, 4))}, 1), [facts(experts=4)], 8, 2, 0)
    with pytest.raises(InvalidArgument, match="'gpu'"):
        simulate(routing, load_device("m2-max"), ("gpu",))
