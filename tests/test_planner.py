"""make_plan: what holds in every plan, and that what it expects is what groups then do."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_data import calibration, facts, skewed, zipf
from test_cost import with_numbers

from mlx_moe.calibration import Calibration
from mlx_moe.chunks import chunk_loads
from mlx_moe.cost import Expert, expert_of, shared_expert_of
from mlx_moe.devices import load_device
from mlx_moe.errors import InvalidArgument
from mlx_moe.plan import LayerPlan, Plan
from mlx_moe.planner import make_plan

LARGE = 1 << 45  # bytes, no budget in the way


def check(plan: Plan) -> None:
    """What holds in every plan, beyond what loading it checks."""
    assert Plan.from_json(plan.to_json()) == plan
    assert sum(layer.expected.bytes for layer in plan.layers) <= plan.options["memory"]
    for layer in plan.layers:
        routed = expert_of(layer.facts)
        size = sum(
            len(group.experts) * routed.static_bytes(plan.weights, group.split[1] - group.split[0])
            for group in layer.groups
        )
        check_packages(plan, routed, layer.groups)
        if layer.shared is not None:
            beside = shared_expert_of(layer.facts)
            assert beside is not None
            check_packages(plan, beside, layer.shared.groups)
            for group in layer.shared.groups:
                width = group.split[1] - group.split[0]
                size += beside.static_bytes(plan.weights, width)
                assert group.tier >= plan.chunk and group.experts == (0,)
        # parts repeat the scales and biases of the last projection
        assert layer.expected.bytes <= size <= layer.expected.bytes * 1.01 + 1
        if not layer.all_groups:
            assert layer.reason is not None and layer.static_from is None
        elif plan.options["force_hot"] is None:
            assert layer.expected.static_ms < layer.expected.cold_ms
            assert layer.static_from is not None and layer.static_from <= plan.chunk


def check_packages(plan: Plan, expert: Expert, groups) -> None:
    for group in groups:
        start, end = group.split
        assert start % 64 == 0
        size = len(group.experts) * expert.static_bytes(plan.weights, end - start)
        assert size <= plan.device["package_bytes"] or end - start <= 64


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    experts=st.integers(1, 24),
    sizes=st.sampled_from([(64, 64), (512, 200), (2048, 768), (4096, 6400), (4096, 14336)]),
    kind=st.sampled_from(["glu", "mlp"]),
    skew=st.sampled_from([0.0, 0.7, 1.5]),
    chunk=st.sampled_from([100, 512, 2048]),
    chunks=st.integers(1, 9),
    shared=st.sampled_from([None, 128, 4096]),
    device=st.sampled_from(["m1", "m2-max", "m4-pro", "m5-max"]),
    memory=st.sampled_from([0, 50_000_000, 2_000_000_000, LARGE]),
    weights=st.sampled_from(["fp16", "int8"]),
    max_tiers=st.integers(1, 5),
    shared_tiers=st.booleans(),
    overflow=st.sampled_from([None, 0.01, 0.2]),
    factor=st.sampled_from([0.5, 1.0, 1.3]),
    force=st.sampled_from([None, None, 0.5, 1.0]),
)
def test_what_holds_in_every_plan(
    seed, experts, sizes, kind, skew, chunk, chunks, shared, device, memory, weights,
    max_tiers, shared_tiers, overflow, factor, force,
) -> None:  # fmt: skip
    top_k = min(2, experts)
    layers = [
        facts(i, experts, top_k, *sizes, kind=kind, biases=bool(seed % 2), shared=shared)
        for i in range(2)
    ]
    loads = [zipf(experts, top_k, chunk, chunks, skew, seed + i) for i in range(2)]
    plan = make_plan(
        calibration(loads, layers, chunk),
        device,
        memory=LARGE if force else memory,
        weights=weights,
        max_tiers=max_tiers,
        shared_tiers=shared_tiers,
        overflow=overflow,
        capacity_factor=factor,
        force_hot=force,
    )
    check(plan) if factor == 1.0 else Plan.from_json(plan.to_json())
    for layer, load in zip(plan.layers, loads, strict=True):
        assert len(layer.tiers) <= max_tiers
        if force == 1.0:  # experts without a single assignment need not be hot
            assert set(np.flatnonzero(load.sum(axis=0))) <= set(layer.hot)
    if shared_tiers and factor == 1.0:
        assert len({tier for layer in plan.layers for tier in layer.tiers}) <= max_tiers


def test_forced_shares_are_met_and_named() -> None:
    made = skewed(experts=32, top_k=4, hidden=192, inner=64)
    plan = make_plan(made, "m2-max", force_hot=0.6)
    check(plan)
    assert plan.options["force_hot"] == 0.6
    for i, layer in enumerate(plan.layers):
        assert layer.expected.hot >= 0.55 and layer.static_from == 32
        loads = made.loads(i).sum(axis=0)
        assert loads[list(layer.hot)].sum() >= 0.6 * loads.sum()
        assert loads[list(layer.hot)].min() >= np.delete(loads, list(layer.hot)).max()


def test_forced_beyond_the_budget_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="force_hot=1.0 needs .* GB .* budget"):
        make_plan(skewed(), "m2-max", force_hot=1.0, memory=1_000_000)


def test_flat_routing_has_no_static_path_and_says_so() -> None:
    made = skewed(skew=0.0, experts=128, top_k=8)
    for layer in make_plan(made, "m2-max", memory=LARGE).layers:
        assert layer.groups == () and "routing is flat" in (layer.reason or "")


def test_skewed_routing_of_the_same_model_has_one() -> None:
    plan = make_plan(skewed(skew=1.0, experts=128, top_k=8), "m2-max", memory=LARGE)
    check(plan)
    assert all(layer.groups and layer.reason is None for layer in plan.layers)


def test_small_experts_are_not_worth_a_dispatch() -> None:
    for layer in make_plan(skewed(hidden=192, inner=64), "m2-max").layers:
        assert layer.groups == () and "too small for a dispatch" in (layer.reason or "")


def test_a_small_budget_is_named() -> None:
    for layer in make_plan(skewed(), "m4-pro", memory=1_000_000).layers:
        assert layer.groups == () and "memory budget of 0.00 GB is too small" in (
            layer.reason or ""
        )


def test_a_larger_budget_is_never_slower() -> None:
    made = skewed(count=3, experts=32, top_k=4)
    times = [
        sum(layer.expected.static_ms for layer in make_plan(made, "m4-pro", memory=m).layers)
        for m in (0, 20_000_000, 100_000_000, 300_000_000, LARGE)
    ]
    assert times[0] > times[-1]
    assert all(more <= less * 1.02 for less, more in zip(times, times[1:], strict=False))


def test_experts_that_win_nothing_stay_cold() -> None:
    """An executor that is slower for every expert gets none, whatever the overlap would bring."""
    device = with_numbers(load_device("m2-max"), static_flops=1e9)
    assert all(not layer.groups for layer in make_plan(skewed(), device, memory=LARGE).layers)


def test_an_expert_too_large_for_a_package_is_split() -> None:
    made = skewed(count=1, experts=8, hidden=4096, inner=14336)
    (layer,) = make_plan(made, "m4-pro", memory=LARGE).layers
    assert layer.groups
    for first, second in zip(layer.groups[::2], layer.groups[1::2], strict=True):
        assert (first.split, second.split) == ((0, 7168), (7168, 14336))
        assert first.experts == second.experts and first.parts == second.parts == 2


def test_a_shared_expert_is_a_group_of_its_own() -> None:
    made = skewed(count=1, shared=4096, chunk=2048, experts=64, top_k=4)
    (layer,) = make_plan(made, "m4-pro", memory=LARGE).layers
    assert layer.shared is not None and layer.facts.shared is not None
    assert [group.experts for group in layer.shared.groups] == [(0,)]
    assert layer.shared.groups[0].tier == 2048
    assert layer.capacities(layer.shared.groups[0])[-1] == 2048


def test_a_target_of_overflow_is_kept() -> None:
    for target in (0.01, 0.05, 0.15):
        plan = make_plan(
            skewed(experts=32, top_k=4, chunks=60),
            "m2-max",
            memory=LARGE,
            overflow=target,
            force_hot=1.0,
        )
        beyond = assignments = 0.0
        for i, layer in enumerate(plan.layers):
            loads = skewed(experts=32, top_k=4, chunks=60).loads(i).astype(float)
            for group in layer.groups:
                own = loads[:, list(group.experts)]
                beyond += np.maximum(own - group.tier, 0).sum()
            assignments += loads.sum()
        assert 0.3 * target < beyond / assignments <= target * 1.001


def test_tiers_beat_one_capacity_of_the_same_overflow() -> None:
    """On chunks that the plan did not see."""
    loads = [zipf(32, 4, 512, 120, 0.8, seed=4)]
    plan = make_plan(
        calibration([x[:60] for x in loads], [facts(0, 32, 4)], 512),
        "m2-max",
        memory=LARGE,
        overflow=0.02,
        force_hot=1.0,
    )
    unseen = loads[0][60:].astype(float)
    capacity = np.zeros(32)
    for group in plan.layers[0].groups:
        capacity[list(group.experts)] = group.tier
    over = np.maximum(unseen - capacity, 0).sum()
    one = next(c for c in range(1, 513) if np.maximum(unseen - c, 0).sum() <= over)
    padding = 1 - np.minimum(unseen, capacity).sum() / (capacity.sum() * len(unseen))
    flat = 1 - np.minimum(unseen, one).sum() / (one * unseen.size)
    assert padding < 0.75 * flat


def simulate(layer: LayerPlan, loads: np.ndarray) -> tuple[float, float, float]:
    """Slots, tokens served and tokens spilled, token by token as a layer would."""
    slots = served = spilled = 0
    for chunk in loads:
        for group in layer.groups:
            if group.split[0] != 0:
                continue  # the other parts have the same slots
            left = [int(chunk[e]) for e in group.experts]
            first = True
            while max(left) > 0 and (first or sum(left) > group.spill_limit):
                fits = [c for c in layer.capacities(group) if c >= max(left)]
                capacity = fits[0] if fits else group.tier
                slots += capacity * len(left)
                served += sum(min(n, capacity) for n in left)
                left = [max(0, n - capacity) for n in left]
                first = False
            spilled += sum(left)
    return slots, served, spilled


@pytest.mark.parametrize("device", ["m1", "m4-pro", "m2-max"])
@pytest.mark.parametrize("options", [{}, {"overflow": 0.1, "force_hot": 0.9, "weights": "int8"}])
def test_expected_padding_and_overflow_are_those_of_a_simulation(device, options) -> None:
    made = skewed(experts=48, top_k=4, chunk=1024)
    plan = make_plan(made, device, memory=LARGE, **options)
    for i, layer in enumerate(plan.layers):
        assert layer.groups
        loads = made.loads(i)
        slots, served, spilled = simulate(layer, loads)
        expected = layer.expected
        assert expected.padding == pytest.approx(1 - served / slots)
        assert expected.overflow == pytest.approx(spilled / (served + spilled))
        assert expected.hot == pytest.approx(served / loads.sum())


def test_static_from_is_the_break_even() -> None:
    """Fewer tokens than it are not faster by the plan's own model."""
    from mlx_moe.plan_layer import Layer, _bundles, time_layer
    from mlx_moe.tiers import Tiers

    made = skewed(count=1, experts=64, top_k=4, chunk=2048)
    plan = make_plan(made, "m4-pro", memory=LARGE)
    (layer,) = plan.layers
    tier_of = {e: group.tier for group in layer.groups for e in group.experts}
    hot = np.array(layer.hot)
    tiers = Tiers(layer.tiers, np.array([tier_of[e] for e in hot]), 0.0)
    loads = made.loads(0).astype(float)
    timed = Layer(0, plan.device, layer.facts, "fp16", 2048, loads, False)
    bundles = _bundles(timed, hot, tiers)
    assert layer.static_from is not None and 64 < layer.static_from < 2048
    at = {
        n: time_layer(timed, bundles, None, layer.tiers, loads * n / 2048)
        for n in (layer.static_from, layer.static_from - 64)
    }
    wins = [t.seconds < t.cold for t in at.values()]
    assert wins == [True, False]


def test_the_plan_does_not_depend_on_how_experts_are_numbered() -> None:
    made = skewed(count=1, experts=32, top_k=4)
    order = np.random.default_rng(1).permutation(32)
    other = calibration([made.loads(0)[:, order]], made.layers, 512)
    first, second = (make_plan(c, "m4-pro", memory=LARGE).layers[0] for c in (made, other))
    assert {order[e] for e in second.hot} == set(first.hot)
    assert second.expected.static_ms == pytest.approx(first.expected.static_ms)


def test_chunks_are_put_together() -> None:
    made = skewed(count=1, chunks=12)
    (loads,) = chunk_loads(made, 1536)
    assert loads.shape == (4, 16)
    assert loads[0] == pytest.approx(made.loads(0)[:3].sum(axis=0))


def test_short_chunks_do_not_count_among_full_ones() -> None:
    made = skewed(count=1, chunks=12)
    tokens = [512] * 11 + [40]
    (loads,) = chunk_loads(replace(made, chunk_tokens=tokens), 512)
    assert len(loads) == 11
    few = Calibration(made.identity, 512, [100] * 12, made.layers, made.statistics)
    (scaled,) = chunk_loads(few, 512)
    assert scaled == pytest.approx(made.loads(0).reshape(3, 4, 16).sum(axis=1) * 512 / 400, rel=0.3)


@pytest.mark.parametrize("chunk", [100, 513, 256, 0, 1 << 30])
def test_a_chunk_that_was_not_counted_is_an_error(chunk: int) -> None:
    with pytest.raises(InvalidArgument, match="chunk"):
        make_plan(skewed(), "m2-max", chunk=chunk)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"memory": -1}, "memory"),
        ({"weights": "int4"}, "weights"),
        ({"max_tiers": 0}, "max_tiers"),
        ({"overflow": 0.0}, "overflow"),
        ({"overflow": 1.5}, "overflow"),
        ({"force_hot": -0.5}, "force_hot"),
        ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"capacity_factor": float("nan")}, "capacity_factor"),
    ],
)
def test_wrong_arguments_are_named(options, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        make_plan(skewed(), "m2-max", **options)


def test_a_path_is_no_calibration() -> None:
    with pytest.raises(InvalidArgument, match=r"is a str; expected .* Calibration\.load"):
        make_plan("c.npz", "m2-max")  # type: ignore[arg-type]


def test_cpu_plans_pack_nothing_where_it_does_not_pay() -> None:
    plan = make_plan(skewed(), "cpu")
    assert plan.executor == "cpu" and Plan.from_json(plan.to_json()) == plan
    for layer in plan.layers:
        assert layer.packed == () and "does not pay" in (layer.reason or "")


def test_cpu_plans_pack_the_fullest_experts_within_the_budget() -> None:
    device = with_numbers(load_device("cpu"), packed_speedup=2.0)
    made = skewed(experts=32, top_k=4)
    size = 3 * 2048 * 768 * 2
    plan = make_plan(made, device, memory=9 * size + 5)
    assert Plan.from_json(plan.to_json()) == plan
    assert sum(len(layer.packed) for layer in plan.layers) == 9
    rest = []
    for i, layer in enumerate(plan.layers):
        loads = made.loads(i).sum(axis=0)
        packed = list(layer.packed)
        assert loads[packed].min() >= np.delete(loads, packed).max()
        rest.append((loads[packed].min(), np.delete(loads, packed).max()))
        assert layer.expected.static_ms < layer.expected.cold_ms
        assert layer.reason is None and layer.static_from is not None
    assert min(low for low, _ in rest) >= max(high for _, high in rest) * 0.95


def test_cpu_plans_cannot_be_forced() -> None:
    with pytest.raises(InvalidArgument, match="static executor"):
        make_plan(skewed(), "cpu", force_hot=0.5)
