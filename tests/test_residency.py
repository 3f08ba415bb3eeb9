"""What groups do with loads, and which experts get the memory."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from plan_data import facts, skewed

from mlx_moe.cost import cold_seconds, expert_of
from mlx_moe.devices import load_device
from mlx_moe.grouping import Bundle, run_groups
from mlx_moe.planner import make_plan
from mlx_moe.residency import Curve, Point, spend

LARGE = 1 << 45  # bytes, no budget in the way


def test_another_tile_is_taken_where_it_beats_the_cold_path() -> None:
    device = load_device("m1")
    loads = np.array([[100.0], [32.0], [33.0], [0.0]])
    for limit, spilled, slots in ((0, [0, 0, 0, 0], [128, 32, 64, 0]), (1, [0, 0, 1, 0], None)):
        ran = run_groups(
            device, expert_of(facts()), "fp16", loads, [Bundle((0,), 32, 1, limit)], (32,)
        )
        assert ran.spilled[:, 0].tolist() == spilled
        if slots:
            assert ran.slots.tolist() == slots
            assert ran.dispatches.tolist() == [4, 1, 2, 0]


def test_the_spill_limit_is_where_another_tile_pays() -> None:
    made = skewed(count=1, experts=8, hidden=4096, inner=4096, chunk=1024)
    plan = make_plan(made, "m1", memory=LARGE, overflow=0.2, force_hot=1.0)
    (layer,) = plan.layers
    expert = expert_of(layer.facts)
    for group in layer.groups:
        assert 0 < group.spill_limit < 2048
        for over, pays in ((group.spill_limit, False), (group.spill_limit + 1, True)):
            loads = np.zeros((1, 8))
            loads[0, group.experts[0]] = over
            bundle = Bundle(group.experts, group.tier, group.parts, 0)
            tile = run_groups(plan.device, expert, "fp16", loads, [bundle], layer.tiers).seconds[0]
            cold = cold_seconds(plan.device, expert, loads).sum()
            assert (tile < cold) == pays


def test_residency_is_by_benefit_per_byte() -> None:
    def curve(*seconds: float) -> Curve:
        points = [Point(n, False, n * 10, s) for n, s in enumerate(seconds)]
        return Curve(np.arange(4), len(points) - 1, np.linspace(0, 1, 5), points, 10, None)

    curves = [curve(9, 8.5, 8.2), curve(9, 4, 3, 2.9), curve(5)]
    assert [p.count for p in spend(curves, 0)] == [0, 0, 0]
    assert [p.count for p in spend(curves, 10)] == [0, 1, 0]
    assert [p.count for p in spend(curves, 29)] == [0, 2, 0]
    assert [p.count for p in spend(curves, 30)] == [1, 2, 0]
    assert [p.count for p in spend(curves, 1000)] == [2, 3, 0]


@given(seed=st.integers(0, 500), budget=st.integers(0, 200))
def test_residency_is_near_the_best_of_all(seed: int, budget: int) -> None:
    """Against every combination; by benefit per byte is the best but for the last step."""
    random = np.random.default_rng(seed)
    curves = []
    for _ in range(3):
        seconds = random.uniform(1, 10, 4)
        points = [Point(n, False, n * 10, float(s)) for n, s in enumerate(seconds)]
        curves.append(Curve(np.arange(3), 3, np.linspace(0, 1, 4), points, 10, None))
    chosen = spend(curves, budget)
    assert sum(p.bytes for p in chosen) <= budget
    least = min(
        a.seconds + b.seconds + c.seconds
        for a in curves[0].points
        for b in curves[1].points
        for c in curves[2].points
        if a.bytes + b.bytes + c.bytes <= budget
    )
    largest = max(c.points[0].seconds - min(p.seconds for p in c.points) for c in curves)
    assert sum(p.seconds for p in chosen) <= least + largest + 1e-9
