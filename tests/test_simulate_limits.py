"""What the simulator refuses, what it does not know and what does not fit."""

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from plan_data import facts

from mlx_moe.cost import cold_seconds, expert_of, shared_expert_of
from mlx_moe.devices import Device, load_device
from mlx_moe.errors import InvalidArgument
from mlx_moe.grouping import Bundle
from mlx_moe.simulate import outcome, simulate
from mlx_moe.simulate_engine import Task, Unit, run
from mlx_moe.simulate_layers import ColdPath, Dense, OnPrograms, Programs, one_capacity
from mlx_moe.simulate_report import as_text, report
from mlx_moe.simulate_routing import Histograms, Routing, draw, of_histograms
from mlx_moe.simulate_spread import OnUnits, Spread, SpreadUnit
from mlx_moe.simulate_units import COPIES, Machine

ONES = np.ones((1, 4))


def routing_of(*loads: list[float], tokens: int = 64, **options: object) -> Routing:
    """Steps of one layer."""
    layer = facts(experts=len(loads[0]), **options)  # type: ignore[arg-type]
    return Routing("x", [layer], np.full(len(loads), tokens), [np.array(loads)], "a test")


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (Task("a", nan), "nan"),
        (Task("a", inf), "inf"),
        (Task("a", -1), "-1"),
        (Task("b", 1), "'b'"),
    ],
)
def test_tasks_that_cannot_be(task: Task, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        run([Task("a", 1), task], {"a": Unit("a")})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"facts": [], "loads": []}, "no layer"),
        ({"tokens": np.zeros(0, np.int64), "loads": [np.zeros((0, 4))]}, "no step"),
        ({"tokens": np.array([0])}, "a token"),
        ({"loads": []}, "each of 1 layers"),
        ({"loads": [np.ones((1, 3))]}, r"\[1, 3\]"),
        ({"loads": [np.full((1, 4), nan)]}, "finite"),
        ({"loads": [np.full((1, 4), inf)]}, "finite"),
        ({"loads": [np.array([[1.0, 1, 1, -1]])]}, "negative"),
    ],
)
def test_routing_that_cannot_be(changes: dict[str, object], named: str) -> None:
    good = Routing("x", [facts(experts=4)], np.array([2]), [ONES], "a test")
    with pytest.raises(InvalidArgument, match=named):
        replace(good, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dense",
    [
        Dense(np.ones(2), 1),
        Dense(np.array([nan]), 1),
        Dense(np.array([-1.0]), 1),
        Dense(np.ones(1), inf),
        Dense(np.ones(1), -1),
    ],
)
def test_dense_work_that_cannot_be(dense: Dense) -> None:
    with pytest.raises(InvalidArgument, match="dense"):
        simulate(routing_of([8, 8]), load_device("m2-max"), ("cold",), dense=dense)


@pytest.mark.parametrize(
    "changes",
    [{"steps": 0}, {"tokens": 0}, {"tokens": 1 << 40}, {"domains": 0}, {"steps": 1 << 40}],
)
def test_draws_that_cannot_be(changes: dict[str, int]) -> None:
    options = {"tokens": 8, "steps": 2, "seed": 0} | changes
    with pytest.raises(InvalidArgument):
        of_histograms(Histograms("x", {"d": ONES}, 1), [facts(experts=4)], **options)
    with pytest.raises(InvalidArgument, match="top_k"):
        draw(np.random.default_rng(0), np.ones(4), 8, 5)


@pytest.mark.parametrize("seed", range(20))
def test_one_capacity_against_trying_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    loads = [random.gamma(0.3, 200, (3, 8)).round() for _ in range(2)]
    allowed = 0.01 * sum(x.sum() for x in loads)
    least = next(
        c
        for c in range(32, 1 << 20, 32)
        if sum(np.maximum(x - c, 0).sum() for x in loads) <= allowed
    )
    assert one_capacity(loads) == least


HALF = np.full((1, 4, 2), 0.5)


@pytest.mark.parametrize(
    ("shares", "arriving", "named"),
    [
        (HALF[:, :3], np.zeros((1, 2)), "expected"),
        (HALF, np.zeros((2, 2)), "expected"),
        (HALF / 2, np.zeros((1, 2)), "add up"),
        (np.stack([HALF[..., 0] + 1, HALF[..., 0] - 1], axis=-1), np.zeros((1, 2)), "negative"),
        (HALF * nan, np.zeros((1, 2)), "add up"),
        (HALF, np.full((1, 2), inf), "arrive"),
        (HALF, np.full((1, 2), -1), "arrive"),
    ],
)
def test_spreads_that_cannot_be(shares: np.ndarray, arriving: np.ndarray, named: str) -> None:
    units = [SpreadUnit(name, load_device("cpu"), None) for name in "ab"]
    with pytest.raises(InvalidArgument, match=named):
        OnUnits(routing_of([8, 8, 8, 8]), units, [Spread(shares, arriving)])


def without(device: Device, *names: str) -> Device:
    kept = {k: v for k, v in device.simulation.items() if k not in names}
    return replace(device, simulation=kept)


@pytest.mark.parametrize(
    ("device", "strategy", "known"),
    [
        (load_device("m2-max"), "cold", True),
        (load_device("m2-max"), "naive", True),
        (load_device("m3-max"), "naive", False),
        (without(load_device("m2-max"), "host_bandwidth"), "naive", False),
        (without(load_device("m2-max"), "host_cores"), "cold", False),
        (without(load_device("cpu"), "host_cores"), "cold", False),
    ],
)
def test_what_a_profile_does_not_know_is_not_told(
    device: Device, strategy: str, known: bool
) -> None:
    (found,) = simulate(routing_of([40, 40]), device, (strategy,))
    assert (found.cpu_seconds is not None) == (found.joules is not None) == known
    assert found.seconds > 0


def test_on_a_processor_all_its_cores_count() -> None:
    device = load_device("cpu")
    cores = device.simulation["host_cores"].value
    (found,) = simulate(routing_of([40, 40]), device, ("cold",))
    assert cores > 1 and found.cpu_seconds == pytest.approx(cores * found.seconds)
    assert found.joules is None
    text = as_text(report(routing_of([40, 40]), device, [found]))
    assert "GPU" not in text and "packing" not in text


@pytest.mark.parametrize(
    ("strategy", "memory", "said"),
    [
        ("cold", None, "takes 25.4 GB, of 8.59 GB of memory"),  # 45.1e9 weights of 4.5 bits
        ("naive", None, "takes 116 GB, of 8.59 GB"),  # and 90.2 GB of copies
        ("naive", 1 << 30, "its copies take 90.2 GB, of 1.07 GB for them"),
        ("naive", 1 << 40, ""),
        ("cold", 0, ""),
    ],
)
def test_memory_that_is_too_small_is_said(strategy: str, memory: int | None, said: str) -> None:
    layers = [facts(i, experts=8, hidden=4096, inner=14336) for i in range(32)]
    loads = [np.full((1, 8), 2.0)] * 32
    routing = Routing("mixtral", layers, np.array([8]), loads, "a test")
    (found,) = simulate(routing, load_device("m1"), (strategy,), memory=memory)
    assert said in found.note and ("GB" in found.note) == bool(said)
    assert found.note in as_text(report(routing, load_device("m1"), [found]))


def test_a_report_is_of_the_steps_that_were_simulated() -> None:
    loads = np.array([[60.0, 4], [1, 1], [60, 4], [3, 1], [8, 8]])
    routing = Routing("x", [facts(experts=2)], np.array([64, 2, 64, 4, 16]), [loads], "a test")
    found = report(routing, load_device("m4"), simulate(routing, load_device("m4"), ("cold",)))
    assert (found["steps"], found["tokens"]) == (2, 3.0)
    assert "1 layers of 2 experts (top 2) of 2048 x 768 with 4.5 bits" in as_text(found)
    both = [facts(experts=2), facts(1, experts=2, inner=64)]
    unlike = replace(routing, facts=both, loads=[loads, loads])
    found = report(unlike, load_device("m4"), [])
    assert [(s["layers"], s["inner"]) for s in found["shapes"]] == [(1, 768), (1, 64)]


def test_a_shared_expert_is_packed_and_what_is_over_is_computed() -> None:
    """Of 100 rows 64 fit its tile, 36 are over; two experts beside it, one of them hot."""
    layer = facts(experts=2, shared=1024, top_k=1)
    routing = Routing("x", [layer], np.array([100]), [np.array([[70.0, 30]])], "a test")
    device = load_device("m2-max")
    machine = Machine(device)
    programs = Programs([Bundle((0,), 128, 1, 999)], Bundle((0,), 64, 1, 999), (64, 128), 0)
    strategy = OnPrograms(machine, routing, ColdPath.of(machine), [programs], "fp16")
    expert, shared = expert_of(layer), shared_expert_of(layer)
    assert shared is not None

    def dispatch(inner: int, slots: int) -> float:
        compute = slots * 6 * 2048 * inner / (device["static_flops"] * device["static_efficiency"])
        moved = 3 * 2048 * inner * 2 + 2 * 2 * 2048 * slots
        return device["dispatch_seconds"] + max(compute, moved / device["static_bandwidth"])

    static = dispatch(768, 128) + dispatch(1024, 64)
    cold = device["cold_seconds"] + float(cold_seconds(device, expert, np.array(30.0)))
    cold += float(cold_seconds(device, shared, np.array(36.0)))
    rows = (70 + 64) * COPIES * 2 * 2 * 2048 / device.simulation["host_bandwidth"].value
    found = outcome("x", strategy, 1, None)
    assert found.seconds == pytest.approx(max(static, cold) + 2 * rows + device["sync_seconds"])
    watts = {name: number.value for name, number in device.simulation.items()}
    working = (static - 2 * device["dispatch_seconds"]) * watts["static_watts"]
    working += (cold - device["cold_seconds"]) * watts["cold_watts"]
    core = watts["host_watts"] / watts["host_cores"]
    waits = 2 * device["dispatch_seconds"] + device["cold_seconds"] + device["sync_seconds"]
    cpu_seconds = 2 * rows * watts["host_cores"] + waits
    assert found.cpu_seconds == pytest.approx(cpu_seconds)
    assert found.joules == pytest.approx(working + cpu_seconds * core)
