"""Fits against known machines, curves as measured, and plans that believe them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from measured_curves import CURVES, D, F, measured, sample
from plan_data import calibration, facts, skewed, zipf

from mlx_moe import cost
from mlx_moe.cost import expert_of
from mlx_moe.devices import Number, load_device
from mlx_moe.measured import Measurements
from mlx_moe.plan import Plan
from mlx_moe.planner import make_plan
from mlx_moe.tune_fit import cold_numbers, static_numbers
from mlx_moe.tune_static import saved_share

LARGE = 1 << 45


# Fits


def test_the_cold_path_of_a_known_machine() -> None:
    flops, size, start, speed, bandwidth = 1e6, 4e5, 3e-5, 2e11, 1e10

    def seconds(experts: int, rows: int) -> float:
        return start + experts * max(rows * flops / speed, size / bandwidth)

    samples = [sample("cold", 1, 1, seconds(1, 1))]
    samples += [sample("cold", 16, rows, seconds(16, rows)) for rows in (1, 16, 256)]
    found = cold_numbers(samples, flops, size)
    expected = {"cold_seconds": start, "cold_bandwidth": bandwidth, "cold_flops": speed}
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_static_path_of_a_known_machine() -> None:
    flops, size, dispatch, speed, bandwidth = 1e6, 8e5, 2e-4, 4e12, 1e10
    samples = [
        sample("static", g, c, dispatch + max(g * c * flops / speed, g * size / bandwidth))
        for g in (1, 8)
        for c in (32, 64, 1024, 4096)
    ]
    found = static_numbers(samples, flops, size, dispatch)
    expected = {"static_flops": speed, "static_efficiency": 1.0, "static_bandwidth": bandwidth}
    assert found == pytest.approx(expected, rel=1e-6)


def test_noise_gives_no_impossible_numbers() -> None:
    """One expert slower than sixteen, everything faster than a dispatch."""
    samples = [sample("cold", 1, 1, 5e-3), *(sample("cold", 16, r, 1e-3) for r in (1, 64))]
    assert all(0 < value < 1e30 for value in cold_numbers(samples, 1e6, 1e5).values())
    static = [sample("static", 1, 32, 1e-5)]
    assert all(0 < value < 1e30 for value in static_numbers(static, 1e6, 1e5, 1.0).values())


@pytest.mark.parametrize(("both", "share"), [(3.0, 1.0), (4.0, 0.5), (5.0, 0.0), (9.0, 0.0)])
def test_what_both_at_once_save(monkeypatch, both: float, share: float) -> None:
    taken = iter([3.0, 2.0, both] * 3)
    monkeypatch.setattr("mlx_moe.tune_static.timed_once", lambda call: next(taken))
    assert saved_share([print] * 3, 3) == pytest.approx(share)


# Curves


def test_curves_pass_through_the_samples() -> None:
    for s in CURVES.samples:
        if s.path == "static":
            found = CURVES.static_seconds(D, s.inner, s.experts, float(s.rows))
        else:
            found = CURVES.cold_seconds(D, s.inner, np.array([float(s.rows)])) * s.experts
        assert float(np.squeeze(found)) == pytest.approx(s.seconds), s


def test_curves_between_and_beyond() -> None:
    """Loads in proportion, as the samples are; few slots no less than the fewest."""
    loads = np.array([0.0, 1.0, 3.0, 50.0, 1000.0])
    assert CURVES.cold_seconds(D, F, loads) == pytest.approx(1e-5 * loads)
    assert CURVES.cold_seconds(D, F, np.array([0.5])) == pytest.approx(1e-5)
    few, least = (float(CURVES.static_seconds(D, F, 1, c)) for c in (8.0, 32.0))
    assert few == least
    assert float(CURVES.static_seconds(D, F, 1, 256.0)) == pytest.approx(2 * (128e-6 + 1e-4))
    between = float(CURVES.static_seconds(D, F, 2, 32.0))
    assert 132e-6 < between < 228e-6
    assert float(CURVES.static_seconds(D, F, 8, 32.0)) == pytest.approx(2 * 228e-6)
    # in proportion to the size beyond those measured, on the line through them between
    assert CURVES.cold_seconds(D, F // 2, loads) == pytest.approx(5e-6 * loads)
    assert CURVES.cold_seconds(D, 128 * F, loads[1:2]) == pytest.approx(2 / 16)
    between = (56 * 1e-5 + 7 / 16) / 63
    assert CURVES.cold_seconds(D, 8 * F, loads[1:2]) == pytest.approx(between)


def test_layers_as_measured_share_units() -> None:
    device = measured(load_device("m2-max"), CURVES).by_measurement()
    assert device is not None
    wait, start = device["sync_seconds"], device["cold_seconds"]
    found = float(cost.layer_seconds(device, 2e-3, 1e-3))
    assert found == pytest.approx(2e-3 + 0.5 * (1e-3 + start) + wait)
    apart = replace(device, curves=replace(CURVES, overlap=None))
    assert float(cost.layer_seconds(apart, 2e-3, 1e-3)) == pytest.approx(2e-3 + wait)


def test_costs_as_measured() -> None:
    expert = expert_of(facts())
    device = measured(load_device("m2-max"), CURVES)
    curves = device.by_measurement()
    assert curves is not None
    for c in (32.0, 77.0):
        assert cost.static_seconds(curves, expert, "fp16", 4, c) == pytest.approx(
            CURVES.static_seconds(D, F, 4, c)
        )
    # and by the numbers where that is not asked for
    plain = load_device("m2-max")
    for one in (device, plain):
        assert cost.static_seconds(one, expert, "fp16", 4, 32) == pytest.approx(
            cost.static_seconds(plain, expert, "fp16", 4, 32)
        )


def test_no_curves_of_one_path_alone() -> None:
    cold = tuple(s for s in CURVES.samples if s.path == "cold")
    assert measured(load_device("m2-max"), replace(CURVES, samples=cold)).by_measurement() is None
    assert load_device("m2-max").by_measurement() is None


# Plans


def curves(static: float, cold: float, overlap: float | None) -> Measurements:
    """FLOP/s of each path at any size."""
    flops = 6.0 * D * F
    return Measurements(
        "2026-01-31",
        overlap,
        (
            *(
                sample("static", g, c, g * c * flops / static)
                for g in (1, 4, 16)
                for c in (32, 512)
            ),
            *(sample("cold", 16, rows, 16 * rows * flops / cold) for rows in (1, 512)),
        ),
    )


@pytest.mark.parametrize(
    ("static", "cold", "overlap", "used"),
    [
        (1e13, 2e12, 1.0, True),  # as fast as the numbers have it
        (1e13, 2e12, 0.0, True),
        (2e12, 2e12, 1.0, True),  # no faster, and beside the other
        (2e12, 2e12, 0.0, False),  # no faster, and in its way
        (1e10, 2e12, 1.0, False),  # far slower
        (1e12, 1e15, None, False),  # a cold path that nothing beats
    ],
)
def test_a_static_path_that_measures_slower_is_not_used(
    tmp_path: Path, static: float, cold: float, overlap: float | None, used: bool
) -> None:
    """The numbers say that it wins; what was measured decides."""
    device = load_device("m4-pro")
    assert all(p.groups for p in make_plan(skewed(count=1, chunks=8), device, memory=LARGE).layers)
    plan = make_plan(
        skewed(count=1, chunks=8), measured(device, curves(static, cold, overlap)), memory=LARGE
    )
    (layer,) = plan.layers
    assert bool(layer.groups) == used and (layer.static_from is not None) == used
    if not used:
        assert "as measured" in layer.reason and "measured on this device, 2026-01-31" in (
            layer.reason
        )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_each_layer_goes_by_what_its_own_size_measured() -> None:
    device, large = load_device("m4-pro"), 8 * F
    slow, quick = curves(1e10, 2e12, 1.0).samples, curves(1e13, 2e12, 1.0).samples
    own = tuple(replace(s, inner=large, seconds=8 * s.seconds) for s in quick)
    both = Measurements("2026-01-31", 1.0, slow + own)
    layers = [facts(0), facts(1, inner=large)]
    loads = [zipf(layer.experts, layer.top_k, 512, 8, 1.0, 0) for layer in layers]
    plan = make_plan(calibration(loads, layers, 512), measured(device, both), memory=LARGE)
    small, big = plan.layers
    assert not small.groups and "as measured" in small.reason
    assert big.groups and big.reason is None


def test_forcing_does_not_ask() -> None:
    device = measured(load_device("m4-pro"), curves(1e10, 2e12, 0.0))
    plan = make_plan(skewed(count=1, chunks=8), device, memory=LARGE, force_hot=0.5)
    assert plan.layers[0].groups


def test_copies_that_do_not_pay_are_not_made() -> None:
    device = load_device("cpu")
    for value, packed in ((0.8, False), (2.0, True)):
        number = Number(value, "times", "mlx_moe tune, 2026-01-31: measured", True)
        numbers = device.numbers | {"packed_speedup": number}
        plan = make_plan(skewed(count=1, chunks=8), replace(device, numbers=numbers), memory=LARGE)
        assert bool(plan.layers[0].packed) == packed
        if not packed:
            assert "mlx_moe tune, 2026-01-31: measured" in plan.layers[0].reason
