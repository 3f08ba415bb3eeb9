"""Tiers against brute force over all sets of capacities, and expectations against simulation."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_data import zipf

from mlx_moe import tiers
from mlx_moe.errors import InvalidArgument
from mlx_moe.tiers import STEP, best_set, choose_tiers, expected_overflow, grid, price_for_overflow


def brute_force(loads, capacities, max_tiers, price, slots, per_tier):
    """The least cost over every set of up to `max_tiers` capacities, chunk by chunk."""
    cost = {
        int(c): slot + price * np.array([np.maximum(own - c, 0).mean() for own in loads.T])
        for c, slot in zip(capacities, slots, strict=True)
    }
    least = np.inf
    for size in range(1, max_tiers + 1):
        for chosen in combinations(cost, size):
            of_experts = np.min([cost[c] for c in chosen], axis=0).sum()
            least = min(least, of_experts + size * per_tier)
    return least


@given(
    seed=st.integers(0, 10_000),
    experts=st.integers(1, 9),
    chunks=st.integers(1, 7),
    most=st.integers(1, 300),
    max_tiers=st.integers(1, 4),
    price=st.sampled_from([0.5, 1.0, 3.0, 20.0, 1000.0]),
    floor=st.sampled_from([0, 70]),
    per_tier=st.sampled_from([0.0, 40.0]),
)
def test_the_set_is_the_best_of_all(
    seed, experts, chunks, most, max_tiers, price, floor, per_tier
) -> None:
    loads = np.random.default_rng(seed).integers(0, most + 1, (chunks, experts)).astype(float)
    capacities = grid(loads)
    slots = np.maximum(capacities, floor).astype(float)  # few slots take as long as some more
    table = expected_overflow(loads, capacities)
    found = best_set(capacities, table, max_tiers, price, slots, per_tier)
    least = brute_force(loads, capacities, max_tiers, price, slots, per_tier)
    assert found.cost == pytest.approx(least, rel=1e-9, abs=1e-9)
    own = np.array([slots[c // STEP - 1] for c in found.of_expert])
    over = np.maximum(loads - found.of_expert, 0).mean(axis=0)
    spent = (own + price * over).sum() + per_tier * len(found.capacities)
    assert spent == pytest.approx(found.cost, rel=1e-9, abs=1e-9)
    assert len(found.capacities) <= max_tiers
    assert set(found.of_expert) == set(found.capacities)
    assert all(c > 0 and c % STEP == 0 for c in found.capacities)
    assert list(found.capacities) == sorted(set(found.capacities))


def test_equal_experts_take_one_tier() -> None:
    loads = np.full((5, 8), 40.0)
    assert choose_tiers(loads, 4, 10.0).capacities == (64,)


def test_the_tail_decides_not_the_mean() -> None:
    """Two experts of the same mean; one is either empty or full."""
    loads = np.array([[100.0, 0.0], [100.0, 200.0]] * 10)
    assert choose_tiers(loads, 2, 50.0).of_expert.tolist() == [128, 224]


def test_expected_overflow_is_that_of_a_simulation() -> None:
    random = np.random.default_rng(3)
    loads = random.integers(0, 200, (40, 6)).astype(float)
    capacities = np.array([32, 96, 160])
    for row, own in zip(expected_overflow(loads, capacities), loads.T, strict=True):
        for value, capacity in zip(row, capacities, strict=True):
            counted = sum(max(0, int(load) - int(capacity)) for load in own) / len(own)
            assert value == pytest.approx(counted)


@pytest.mark.parametrize("target", [0.005, 0.01, 0.05, 0.2])
def test_price_for_a_share_of_overflow(target: float) -> None:
    loads = zipf(32, 4, 512, 60, 0.8).astype(float)
    capacities = grid(loads)
    tables = [(capacities, expected_overflow(loads, capacities))]
    assignments = loads.sum() / len(loads)
    price = price_for_overflow(tables, target, assignments)
    share = tiers.overflow_at(tables, price) / assignments
    less = tiers.overflow_at(tables, price * 0.9) / assignments
    assert share <= target < less + 0.01  # a capacity is 32 slots, so the share has steps


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (1.0, [32, 96, 160]),
        (0.5, [32, 64, 96]),
        (2.0, [64, 192, 320]),
        (3.0, [96, 288, 320]),
        (0.01, [32, 32, 32]),
    ],
)
def test_scaled_capacities(factor: float, expected: list[int]) -> None:
    given = tiers.Tiers((32, 96, 160), np.array([32, 96, 160]), 0.0)
    scaled = given.scaled(factor, most=320)
    assert scaled.of_expert.tolist() == expected
    assert scaled.capacities == tuple(sorted(set(expected)))


@pytest.mark.parametrize(
    "call",
    [
        lambda: choose_tiers(np.zeros((0, 4)), 4, 2.0),
        lambda: choose_tiers(np.zeros(4), 4, 2.0),
        lambda: choose_tiers(np.full((2, 2), np.nan), 4, 2.0),
        lambda: choose_tiers(np.full((2, 2), -1.0), 4, 2.0),
        lambda: choose_tiers(np.ones((2, 2)), 0, 2.0),
        lambda: choose_tiers(np.ones((2, 2)), 1, float("nan")),
        lambda: price_for_overflow([], 1.5, 1.0),
        lambda: tiers.Tiers((32,), np.array([32]), 0.0).scaled(float("nan"), 32),
    ],
)
def test_wrong_arguments(call) -> None:
    with pytest.raises(InvalidArgument):
        call()
