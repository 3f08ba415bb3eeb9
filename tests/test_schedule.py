"""Placements against brute force over all of them, and re-planning on streams made for it."""

import math
import subprocess
import sys
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_moe import core, schedule
from mlx_moe.errors import InvalidArgument
from mlx_moe.schedule import Experts, Placement, Scheduler, Unit

FOUR = [Unit(str(i), 1e-6) for i in range(4)]


def seconds_by_hand(histogram, units, experts, parts):
    """The docstring of Unit, term by term."""
    total = np.zeros(len(units))
    for e, n in enumerate(histogram):
        for u, unit in enumerate(units):
            share = parts[e][u] / experts.shards
            if share and n:
                fixed = unit.dispatch + share * experts.nbytes / unit.bandwidth
                row = share * unit.seconds + experts.row_nbytes / unit.link
                total[u] += min(n, 1) * fixed + n * row
    return total


@lru_cache
def all_assignments(experts: int, units: int) -> np.ndarray:
    return np.array(list(product(range(units), repeat=experts)))


def optimum(histogram, units, experts):
    """The least makespan of all placements of whole experts that fit."""
    where = all_assignments(experts.count, len(units))
    seconds, fits = np.zeros((len(where), len(units))), np.ones(len(where), bool)
    for u, unit in enumerate(units):
        alone = np.zeros((experts.count, len(units)), int)
        alone[:, u] = experts.shards
        cost = [
            seconds_by_hand(np.eye(experts.count)[e] * n, units, experts, alone)[u]
            for e, n in enumerate(histogram)
        ]
        seconds[:, u] = (where == u) @ np.array(cost)
        fits &= (where == u).sum(axis=1) * experts.nbytes <= unit.memory * (1 + 1e-9)
    return seconds[fits].max(axis=1).min()


def random_case(random, shards=1):
    count, number = int(random.integers(1, 9)), int(random.integers(1, 4))
    experts = Experts(count, 1e6, float(random.choice([0, 1000])), shards)
    fair = (count // number + 1) * experts.nbytes
    units = [
        Unit(
            str(u),
            1e-6 * random.uniform(0.2, 2),
            dispatch=float(random.choice([0, 1e-5, 1e-4])),
            bandwidth=float(random.choice([math.inf, 1e10])),
            memory=float(random.choice([math.inf, fair])),
            link=float(random.choice([math.inf, 1e9])),
        )
        for u in range(number)
    ]
    shares = random.dirichlet(np.full(count, random.choice([0.3, 1.0, 5.0])))
    return random.multinomial(random.integers(0, 2000), shares).astype(float), units, experts


def test_little_slower_than_the_best_of_all() -> None:
    random = np.random.default_rng(5)
    ratios = []
    for _ in range(150):
        histogram, units, experts = random_case(random)
        found = schedule.makespan(
            histogram, units, experts, schedule.place(histogram, units, experts)
        )
        best = optimum(histogram, units, experts)
        assert found >= best * (1 - 1e-12)
        ratios.append(found / best if best else 1.0)
    assert np.mean(ratios) <= 1.01
    assert max(ratios) <= 1.15


@given(seed=st.integers(0, 100_000), shards=st.sampled_from([1, 2, 7, 16]))
def test_every_placement_is_whole_fits_and_costs_what_is_said(seed, shards) -> None:
    random = np.random.default_rng(seed)
    histogram, units, experts = random_case(random, shards)
    noise = float(random.choice([0, 1]))
    found = schedule.place(histogram, units, experts, noise=noise)
    assert (found.parts.sum(axis=1) == shards).all()
    held = found.shares.sum(axis=0) * experts.nbytes
    assert all(b <= u.memory * (1 + 1e-9) for b, u in zip(held, units, strict=True))
    expected = seconds_by_hand(histogram, units, experts, found.parts)
    assert schedule.unit_seconds(histogram, units, experts, found) == pytest.approx(expected)
    assert found == schedule.place(histogram, units, experts, noise=noise)
    for e in range(experts.count):
        assert found.parts[e].sum() == shards
        assert (found.owner[e] >= 0) == ((found.parts[e] > 0).sum() == 1)


def test_a_dominating_expert_is_split() -> None:
    histogram, units = [1000, 10, 10, 10], [Unit(str(i), 1e-6, dispatch=5e-6) for i in range(4)]
    found = schedule.place(histogram, units, Experts(4, shards=16))
    assert found.split == [0]
    assert schedule.makespan(histogram, units, Experts(4, shards=16), found) <= 270e-6
    assert schedule.place(histogram, units, Experts(4)).split == []


@pytest.mark.parametrize("cost", ["dispatch", "link"])
def test_no_split_that_costs_more_than_it_saves(cost: str) -> None:
    experts = Experts(4, row_nbytes=1000, shards=16)
    dear = {"dispatch": {"dispatch": 1e-3}, "link": {"link": 1e9}}[cost]
    units = [FOUR[0], *[Unit("far", 1e-6, **dear) for _ in range(3)]]
    found = schedule.place([1000, 0, 0, 0], units, experts)
    assert found.owner[0] == 0


def test_an_expert_is_split_where_no_unit_has_room_for_it() -> None:
    units = [Unit("a", 1e-6, memory=1.5), Unit("b", 1e-6, memory=1.5)]
    found = schedule.place([10, 10, 10], units, Experts(3, nbytes=1, shards=2))
    assert found.shares.sum(axis=0).tolist() == [1.5, 1.5]
    with pytest.raises(InvalidArgument, match="3 experts of 1 bytes do not fit: the units hold 2"):
        schedule.place([10, 10, 10], units, Experts(3, nbytes=1))


def test_faster_units_get_more() -> None:
    units = [Unit("fast", 1e-6), Unit("slow", 3e-6)]
    found = schedule.place(np.ones(400), units, Experts(400))
    assert found.shares.sum(axis=0).tolist() == [300, 100]


@pytest.mark.parametrize("count", [5, 80])
def test_experts_stay_where_they_are_allowed(count: int) -> None:
    """Also where the others, and faster units, pull at them."""
    random = np.random.default_rng(0)
    allowed = random.random((count, 3)) < 0.5
    allowed[:, 2] |= ~allowed.any(axis=1)
    units = [Unit("a", 1e-6), Unit("b", 2e-6), Unit("c", 4e-6)]
    experts = Experts(count, shards=4, allowed=allowed.tolist())
    scheduler = Scheduler(units, experts)
    for _ in range(5):
        loads = random.multinomial(4000, random.dirichlet(np.ones(count)))
        found = schedule.place(loads, units, experts, noise=1)
        scheduler.observe(loads)
        for placement in (found, scheduler.placement):
            assert not (placement.parts * ~allowed).any()
    with pytest.raises(InvalidArgument, match="where it is not allowed"):
        scheduler.adopt(Placement((~allowed * 4).astype(np.uint32)[:, [0, 1, 2]], 4), loads)


@given(seed=st.integers(0, 10_000), room=st.integers(0, 6))
def test_units_that_take_turns_are_the_best_of_all(seed: int, room: int) -> None:
    random = np.random.default_rng(seed)
    loads = random.integers(0, 50, 6)
    units = [
        Unit("packed", 1e-6, dispatch=20e-6, memory=room),
        Unit("in place", 3e-6, dispatch=5e-6, holds_all=True),
    ]
    experts = Experts(6, nbytes=1)
    found = schedule.place(loads, units, experts, serial=True)
    total = [
        schedule.unit_seconds(loads, units, experts, Placement(np.eye(2, dtype=np.uint32)[way], 1))
        for way in map(list, product((0, 1), repeat=6))
        if way.count(0) <= room
    ]
    assert schedule.unit_seconds(loads, units, experts, found).sum() == pytest.approx(
        min(seconds.sum() for seconds in total)
    )


def test_what_moves_must_pay_for_itself() -> None:
    """Of two experts that changed, the one whose copy pays over the horizon gets one."""
    units = [Unit("packed", 1e-6, memory=2, load=1e4), Unit("in place", 3e-6, holds_all=True)]
    scheduler = Scheduler(units, Experts(4, nbytes=1), serial=True, horizon=1, minimum=1)
    scheduler.plan([100, 90, 10, 10])
    assert scheduler.placement.owner.tolist() == [0, 0, 1, 1]
    replan = scheduler.observe([0, 10, 30, 300])
    assert scheduler.placement.owner.tolist() == [1, 0, 1, 0]
    assert replan.bytes_moved == 1


def test_variation_of_samples_is_as_expected() -> None:
    random = np.random.default_rng(2)
    shares = random.dirichlet(np.ones(32))
    pairs = [
        (random.multinomial(900, shares), random.multinomial(3000, shares)) for _ in range(200)
    ]
    pairs = [(a.astype(float), b.astype(float)) for a, b in pairs]
    measured = np.mean([core.total_variation(a, b) for a, b in pairs])
    by_hand = np.mean([np.abs(a / a.sum() - b / b.sum()).sum() / 2 for a, b in pairs])
    assert measured == pytest.approx(by_hand)
    expected = np.mean([core.total_variation(a, b, expected=True) for a, b in pairs])
    assert expected == pytest.approx(measured, rel=0.05)


def shares_of(seed: int, experts: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(experts))


def test_replans_when_routing_shifts_and_only_then() -> None:
    random = np.random.default_rng(0)
    scheduler = Scheduler(FOUR, Experts(32, nbytes=100, shards=8))
    for domain in range(3):
        for chunk in range(20):
            replan = scheduler.observe(random.multinomial(2048, shares_of(domain)))
            assert (replan is not None) == (chunk == 0 and domain > 0)
            if replan is not None:
                assert replan.shift > replan.threshold
                assert replan.gain > 0.02
                assert replan.forward == 20 * domain + 1
                assert 0 < replan.bytes_moved <= 3200
                assert "routing shifted" in str(replan)
    stats = scheduler.stats()
    assert stats["forwards"] == stats["decisions"] == 60
    assert stats["replans"] == stats["shifts"] == len(scheduler.log) == 2
    assert stats["bytes_moved"] == sum(r.bytes_moved for r in scheduler.log)


def test_few_tokens_are_added_up_before_they_count() -> None:
    """Decoding: four assignments a forward say little, two hundred forwards of them enough."""
    random = np.random.default_rng(0)
    scheduler = Scheduler(FOUR, Experts(32, shards=8))
    scheduler.plan(shares_of(0) * 4, counted=math.inf)
    for _ in range(200):
        assert scheduler.observe(random.multinomial(4, shares_of(0))) is None
    seen = [scheduler.observe(random.multinomial(4, shares_of(1))) for _ in range(200)]
    assert any(seen)


@pytest.mark.parametrize(
    ("options", "counter"),
    [
        ({}, "replans"),
        ({"hysteresis": 0.9}, "declined"),
        ({"horizon": 0.001}, "declined"),
        ({"shift": 1.0}, None),
    ],
)
def test_what_holds_a_replan_back(options, counter) -> None:
    units = [Unit(str(i), 1e-6, load=1e6) for i in range(4)]
    scheduler = Scheduler(units, Experts(32, nbytes=1, shards=8), **options)
    scheduler.plan(shares_of(0) * 2048)
    for _ in range(5):
        scheduler.observe(shares_of(1) * 2048)
    stats = scheduler.stats()
    assert [name for name in ("replans", "declined") if stats[name]] == [counter] * bool(counter)


def test_dear_weights_stay_where_they_are() -> None:
    """The dearer moving is, the less is moved, for less gain."""
    moved = []
    for load in (1e12, 1e4, 2e3):
        units = [Unit(str(i), 1e-6, load=load) for i in range(4)]
        scheduler = Scheduler(units, Experts(32, nbytes=1))
        scheduler.plan(shares_of(0) * 2048)
        scheduler.observe(shares_of(1) * 2048)
        moved.append(scheduler.stats()["bytes_moved"])
    assert moved[0] >= moved[1] >= moved[2]
    assert moved[0] > moved[2]


def test_what_was_placed_for_nothing_is_placed_again() -> None:
    scheduler = Scheduler(FOUR, Experts(8, nbytes=1))
    scheduler.plan(np.zeros(8))
    skewed = np.zeros(8)
    skewed[scheduler.placement.experts_of(0)] = 100
    replan = scheduler.observe(skewed)
    assert replan is not None
    assert replan.shift == 1
    assert scheduler.makespan(skewed) == pytest.approx(2e-4)


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_what_can_be_placed_is(seed: int, serial: bool) -> None:
    """Units that are just large enough, each expert allowed on its own and on units by lot."""
    random = np.random.default_rng(seed)
    count, number = 12, 4
    home = random.permutation(np.arange(count) % number)
    allowed = random.random((count, number)) < 0.25
    allowed[np.arange(count), home] = True
    units = [Unit(str(u), 1e-6 * (1 + u), memory=count / number, load=1e9) for u in range(number)]
    experts = Experts(count, nbytes=1, allowed=allowed)
    scheduler = Scheduler(units, experts, serial=serial, minimum=1)
    for _ in range(20):
        scheduler.observe(random.integers(0, 500, count))
        owner = scheduler.placement.owner
        assert allowed[np.arange(count), owner].all()
        assert np.bincount(owner).tolist() == [count // number] * number


def test_units_that_are_alike_keep_their_experts() -> None:
    """The same loads on other experts' numbers: a placement that only renames units moves none."""
    scheduler = Scheduler(FOUR, Experts(4, nbytes=1))
    scheduler.adopt(Placement(np.eye(4, dtype=np.uint32)[::-1].copy(), 1), [40, 30, 20, 10])
    scheduler.observe([10, 20, 30, 400])
    assert scheduler.stats()["bytes_moved"] == 0
    assert scheduler.placement.owner.tolist() == [3, 2, 1, 0]


NAN = math.nan


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedule.place([1, 2], FOUR, Experts(3)), "2 values, expected one for each of 3"),
        (lambda: schedule.place([1, -1], FOUR, Experts(2)), "-1 assignments of expert 1"),
        (lambda: schedule.place([1, NAN], FOUR, Experts(2)), "nan assignments of expert 1"),
        (lambda: schedule.place([[1, 2]], FOUR, Experts(2)), "histogram needs 1 dimensions"),
        (lambda: schedule.place(["a", "b"], FOUR, Experts(2)), "no array of numbers"),
        (lambda: schedule.place([1], [], Experts(1)), "0 units"),
        (lambda: schedule.place([], FOUR, Experts(0)), "0 experts"),
        (lambda: schedule.place([1], FOUR, Experts(1, shards=0)), "in 0 shards"),
        (lambda: schedule.place([1], FOUR, Experts(1, nbytes=-1)), "bytes of an expert are -1"),
        (lambda: schedule.place([1], [Unit("a", NAN)], Experts(1)), "unit 0: seconds are nan"),
        (lambda: schedule.place([1], [Unit("a", 1, link=0)], Experts(1)), "expected numbers above"),
        (lambda: schedule.place([1], [Unit("a", 1, memory=NAN)], Experts(1)), "memory is nan"),
        (lambda: schedule.place([1], FOUR, Experts(1), noise=-1), "at least 0"),
        (lambda: Scheduler(FOUR, Experts(1), shift=2), "shift is 2"),
        (lambda: Scheduler(FOUR, Experts(1), horizon=NAN), "found nan"),
        (lambda: Scheduler([Unit("a", 1, memory=1)], Experts(2, nbytes=1)), "do not fit"),
        (lambda: Scheduler(FOUR, Experts(1)).makespan([1]), "nothing is placed yet"),
        (lambda: Scheduler(FOUR, Experts(2)).observe_ids([2]), "from 0 to 1"),
        (lambda: Scheduler(FOUR, Experts(1)).observe([1, 2]), "2 values"),
        (lambda: Scheduler(FOUR, Experts(1)).observe([1e308]), "1e\\+308 assignments"),
        (lambda: Scheduler(FOUR, Experts(2)).observe_ids([0.5]), "are whole numbers from 0 to 1"),
        (lambda: Scheduler(FOUR, Experts(1), shift="x"), "shift is 'x', expected a number"),
        (lambda: Scheduler(FOUR, Experts(1)).plan([1], "x"), "counted is 'x', expected a number"),
        (lambda: schedule.place([1j], FOUR, Experts(1)), "its dtype is complex128"),
        (lambda: schedule.place([1], FOUR, Experts(-1)), "count is -1, expected a whole number"),
        (lambda: schedule.place([1], FOUR, Experts(1.0)), "count is 1.0, expected a whole number"),
        (lambda: schedule.place([1], [Unit("a", None)], Experts(1)), "seconds is None"),
        (lambda: schedule.place([1], FOUR, Experts(1), noise="x"), "noise is 'x'"),
        (
            lambda: schedule.place([1, 1], FOUR[:2], Experts(2, allowed=[[1], [1, 1, 1]])),
            "allowed is not a row of units for each of 2 experts",
        ),
        (lambda: schedule.round_robin(0, Experts(2)), "2 experts on 0 units"),
        (lambda: Scheduler(FOUR, Experts(10**9)), "1000000000 experts, expected 1 to"),
        (lambda: Scheduler(FOUR, Experts(2, allowed=[])), "allowed is not a row of units"),
        (
            lambda: schedule.place([1, 1], FOUR, Experts(2, allowed=[[1], [1]])),
            "allowed has 2 values, expected 2 experts x 4 units",
        ),
        (
            lambda: Scheduler(FOUR, Experts(1)).adopt(Placement(np.zeros((1, 4)), 1), [1]),
            "0 shards of expert 0, expected 1",
        ),
    ],
)
def test_wrong_arguments(call, message) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call()


def test_a_forward_without_tokens_is_one() -> None:
    scheduler = Scheduler(FOUR, Experts(2))
    assert scheduler.observe_ids([]) is None
    assert scheduler.stats()["forwards"] == 1


def test_allowed_can_be_an_array() -> None:
    allowed = np.array([[True, False], [False, True]])
    placement = schedule.place([1, 1], FOUR[:2], Experts(2, allowed=allowed))
    assert placement.owner.tolist() == [0, 1]


def test_needs_no_mlx() -> None:
    code = "import sys, mlx_moe.schedule; sys.exit('mlx' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
