"""Random small cases of the simulator against loops over plain numbers, written from the docs."""

from dataclasses import dataclass

import numpy as np
import pytest
from plan_data import facts

from mlx_moe.devices import Device, load_device
from mlx_moe.grouping import Bundle
from mlx_moe.simulate import outcome
from mlx_moe.simulate_layers import ColdPath, OnPrograms, Programs
from mlx_moe.simulate_routing import Routing
from mlx_moe.simulate_units import Machine

TIERS = (32, 64, 128)


@dataclass
class Sums:
    """Of a step."""

    seconds: float = 0.0
    joules: float = 0.0
    cpu_seconds: float = 0.0
    dispatches: int = 0


def a_step(
    device: Device, hidden: int, inner: int, layers: list[tuple[np.ndarray, Programs]], tokens: int
) -> Sums:
    """Layers of loads [E], 4 bits in groups of 64, one after the other."""
    known = {name: number.value for name, number in device.simulation.items()}
    found = Sums()
    for loads, programs in layers:
        loads, static, dispatches, rows = loads.copy(), 0.0, 0, 0.0
        for bundle in programs.bundles if tokens >= programs.start else []:
            left = loads[list(bundle.experts)]
            while left.max() > 0:
                fits = [t for t in TIERS if t <= bundle.tier and t >= left.max()]
                capacity = min(fits, default=bundle.tier)
                static += dispatch(device, hidden, inner, len(left), capacity)
                dispatches += 1
                rows += np.minimum(left, capacity).sum()
                left = np.maximum(left - capacity, 0)
                if left.sum() <= bundle.spill_limit:
                    break
            loads[list(bundle.experts)] = left
        reading = 3 * hidden * inner * (4 + 32 / 64) / 8 / device["cold_bandwidth"]
        computing = 6 * hidden * inner / device["cold_flops"]
        cold = sum(max(n * computing, reading) for n in loads if n)
        start = device["cold_seconds"] if cold else 0.0
        wait = device["sync_seconds"] if dispatches else 0.0
        moving = 2 * (2 * 2 * hidden * rows) / known["host_bandwidth"]  # twice read and written
        found.seconds += moving + max(static, start + cold) + wait + moving
        waits = dispatches * device["dispatch_seconds"]
        cpu = 2 * moving * known["host_cores"] + waits + start + wait
        found.cpu_seconds += cpu
        found.joules += (static - waits) * known["static_watts"] + cold * known["cold_watts"]
        found.joules += cpu * known["host_watts"] / known["host_cores"]
        found.dispatches += dispatches
    return found


def dispatch(device: Device, hidden: int, inner: int, experts: int, capacity: int) -> float:
    slots = experts * capacity
    rate = device["static_flops"] * device["static_efficiency"]
    weights, rows = experts * 3 * hidden * inner * 2, 2 * hidden * slots * 2
    beyond = max(3 * inner * capacity * 2 - device["on_chip_bytes"], 0)
    moved = (weights + rows + 2 * experts * beyond) / device["static_bandwidth"]
    return device["dispatch_seconds"] + max(slots * 6 * hidden * inner / rate, moved)


@pytest.mark.parametrize("seed", range(60))
def test_static_and_cold_path_beside_each_other(seed: int) -> None:
    random = np.random.default_rng(seed)
    device = load_device(str(random.choice(["m1-max", "m2-max", "m2-ultra"])))
    hidden, inner = int(random.choice([256, 2048])), int(random.choice([64, 768, 65536]))
    experts, layers, steps = int(random.integers(1, 7)), int(random.integers(1, 4)), 2
    tokens = int(random.integers(1, 600))
    own = [facts(i, experts, 1, hidden, inner) for i in range(layers)]
    loads = [random.integers(0, 300, (steps, experts)).astype(float) for _ in own]
    hot = random.permutation(experts)[: random.integers(1, experts + 1)].tolist()
    cut = int(random.integers(1, len(hot) + 1))
    limit, start = int(random.integers(0, 200)), int(random.choice([0, 300]))
    groups = [tuple(members) for members in (hot[:cut], hot[cut:]) if members]
    programs = [
        Programs(
            [Bundle(g, int(random.choice(TIERS)), 1, limit) for g in groups], None, TIERS, start
        )
        for _ in own
    ]
    routing = Routing("x", own, np.full(steps, tokens), loads, "a test")
    machine = Machine(device)
    strategy = OnPrograms(machine, routing, ColdPath.of(machine), programs, "fp16")
    found = outcome("x", strategy, steps, None)
    each = [
        a_step(
            device, hidden, inner, [(x[i], p) for x, p in zip(loads, programs, strict=True)], tokens
        )
        for i in range(steps)
    ]
    for name in ("seconds", "joules", "cpu_seconds", "dispatches"):
        wanted = np.mean([getattr(one, name) for one in each])
        assert getattr(found, name) == pytest.approx(wanted, rel=1e-9), name
