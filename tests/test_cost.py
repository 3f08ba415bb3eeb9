"""The device cost model against the same arithmetic written out, and its break-even."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_data import facts

from mlx_moe import cost, devices
from mlx_moe.cost import break_even, cold_seconds, expert_of, splits, static_seconds
from mlx_moe.devices import Device, Number, load_device
from mlx_moe.errors import CorruptFile, InvalidArgument
from mlx_moe.layer_facts import WeightFacts
from mlx_moe.tiers import STEP

APPLE = [name for name in devices.names() if name != "cpu"]


def with_numbers(device: Device, **values: float) -> Device:
    changed = {name: replace(device.numbers[name], value=value) for name, value in values.items()}
    return replace(device, numbers=device.numbers | changed)


@pytest.mark.parametrize("capacity", [32, 96, 512, 8192])
def test_static_seconds(capacity: int) -> None:
    device, expert = load_device("m2-max"), expert_of(facts())
    flops = 2 * 3 * 5 * capacity * 2048 * 768
    computing = flops / (device["static_flops"] * device["static_efficiency"])
    weights = 5 * 3 * 2048 * 768 * 2
    tiles = 2 * 5 * capacity * 2048 * 2
    beyond = max(0, capacity * 3 * 768 * 2 - device["on_chip_bytes"])  # of an expert's activations
    moving = (weights + tiles + 2 * 5 * beyond) / device["static_bandwidth"]
    expected = device["dispatch_seconds"] + max(computing, moving)
    found = static_seconds(device, expert, "fp16", 5, capacity)
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_cold_seconds() -> None:
    device, expert = load_device("m2-max"), expert_of(facts())
    reading = 3 * 2048 * 768 * (0.5 + 4 / 64) / device["cold_bandwidth"]  # scale and bias of 64
    one = 2 * 3 * 2048 * 768 / device["cold_flops"]
    found = cold_seconds(device, expert, np.array([0.0, 1.0, 300.0]))
    assert found == pytest.approx([0.0, max(one, reading), 300 * one], rel=1e-12)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (WeightFacts("affine", 4, 64, "bfloat16"), 0.5 + 4 / 64),
        (WeightFacts("affine", 8, 32, "float32"), 1 + 8 / 32),
        (WeightFacts("mxfp4", 4, 32, "mxfp4"), 0.5 + 1 / 32),
        (WeightFacts(None, None, None, "bfloat16"), 2),
        (WeightFacts(None, None, None, "float32"), 4),
    ],
)
def test_bytes_of_a_weight(weights: WeightFacts, expected: float) -> None:
    assert cost.bytes_of(weights) == pytest.approx(expected)


def test_paths_overlap_and_wait_once() -> None:
    device = load_device("m1")
    start, wait = device["cold_seconds"], device["sync_seconds"]
    assert cost.layer_seconds(device, 0.0, 2e-3) == pytest.approx(2e-3 + start)
    assert cost.layer_seconds(device, 3e-3, 2e-3) == pytest.approx(3e-3 + wait)
    assert cost.layer_seconds(device, 1e-3, 2e-3) == pytest.approx(2e-3 + start + wait)
    assert cost.layer_seconds(device, 0.0, 0.0) == 0.0


@pytest.mark.parametrize("name", APPLE)
@pytest.mark.parametrize("weights", ["fp16", "int8"])
@pytest.mark.parametrize("experts", [1, 16])
def test_break_even_is_where_the_static_executor_starts_to_win(
    name: str, weights: str, experts: int
) -> None:
    device, expert = load_device(name), expert_of(facts())
    found = break_even(device, expert, weights, experts)
    for load in range(1, 2049):
        capacity = math.ceil(load / STEP) * STEP
        own = float(static_seconds(device, expert, weights, experts, capacity)) / experts
        if own < float(cold_seconds(device, expert, np.array(float(load)))):
            assert found == load
            return
    assert found is None or found > 2048


def test_break_even_of_experts_too_small_is_none() -> None:
    device = load_device("m2-max")
    assert break_even(device, expert_of(facts(hidden=64, inner=64)), "fp16", 1) is None


@given(inner=st.integers(1, 20_000), parts=st.integers(1, 40))
def test_splits_cover_the_inner_features_once(inner: int, parts: int) -> None:
    ranges = splits(inner, parts)
    assert ranges[0][0] == 0 and ranges[-1][1] == inner and len(ranges) <= parts
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False))
    assert all(start % cost.SPLIT_STEP == 0 and start < end for start, end in ranges)


@pytest.mark.parametrize(
    ("hidden", "inner", "expected"),
    [
        (2048, 768, (21, 1)),  # Qwen3-30B-A3B, 9 MB
        (4096, 6400, (1, 1)),  # Phi-3.5-MoE, 150 MiB
        (4096, 14336, (1, 2)),  # Mixtral, 336 MiB
        (16384, 16384, (1, 9)),
    ],
)
def test_experts_in_a_package(hidden: int, inner: int, expected: tuple[int, int]) -> None:
    device, expert = load_device("m2-max"), expert_of(facts(hidden=hidden, inner=inner))
    most, parts = cost.package_experts(device, expert, "fp16")
    assert (most, parts) == expected
    for start, end in splits(inner, parts):
        assert most * expert.static_bytes("fp16", end - start) <= device["package_bytes"]


@pytest.mark.parametrize("name", devices.names())
def test_profiles_name_their_sources(name: str) -> None:
    device = load_device(name)
    assert device.name == name and device.executor == ("cpu" if name == "cpu" else "static")
    for number in device.numbers.values():
        assert len(number.source) > 10
    if name != "cpu":
        assert not any(n.measured for n in device.numbers.values() if n.source != "this machine")
    assert Device.from_dict(device.as_dict(), "it") == device


def test_there_is_a_profile_for_every_generation() -> None:
    for chip in ("m1", "m2", "m3", "m4", "m5"):
        assert {chip, f"{chip}-pro", f"{chip}-max"} <= set(devices.names())


def test_an_unknown_device_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(InvalidArgument, match=r"no device 'm9'.*m2-max.*m5"):
        load_device("m9")


def test_a_profile_from_a_file(tmp_path) -> None:
    profile = load_device("m2-max").as_dict() | {"name": "mine"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile))
    assert load_device(path).name == "mine"
    assert load_device(str(path))["static_flops"] == load_device("m2-max")["static_flops"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: p.update(executor="gpu"), "executor"),
        (lambda p: p.update(name=3), "name"),
        (lambda p: p["numbers"].pop("cold_flops"), "numbers"),
        (lambda p: p["numbers"].update(more=1), "numbers"),
        (lambda p: p["numbers"]["cold_flops"].update(value=0), "cold_flops"),
        (lambda p: p["numbers"]["cold_flops"].update(value="fast"), "cold_flops"),
        (lambda p: p["numbers"]["cold_flops"].update(unit="B"), "cold_flops"),
        (lambda p: p["numbers"]["cold_flops"].pop("source"), "cold_flops"),
    ],
)
def test_a_profile_that_cannot_be(tmp_path, change, named: str) -> None:
    profile = load_device("m2-max").as_dict()
    change(profile)
    path = tmp_path / "it.json"
    path.write_text(json.dumps(profile))
    with pytest.raises(CorruptFile, match=named):
        load_device(path)


def test_this_machine_says_how_much_memory_it_has(monkeypatch) -> None:
    monkeypatch.setattr(devices, "this_device", lambda: "m4")
    number = load_device("auto").numbers["memory_bytes"]
    assert number.measured and number == Number(number.value, "B", "this machine", True)
    assert not load_device("m1").numbers["memory_bytes"].measured


@pytest.mark.parametrize(
    ("kind", "biases", "weights", "expected"),
    [
        ("glu", False, "fp16", 3 * 100 * 64 * 2),
        ("mlp", False, "fp16", 2 * 100 * 64 * 2),
        ("glu", True, "fp16", 3 * 100 * 64 * 2 + (64 + 64 + 100) * 2),
        ("mlp", True, "fp16", 2 * 100 * 64 * 2 + (64 + 100) * 2),
        ("glu", False, "int8", 3 * 100 * 64 + (64 + 64 + 100) * 2),
        ("glu", True, "int8", 3 * 100 * 64 + 2 * (64 + 64 + 100) * 2),
    ],
)
def test_bytes_of_an_expert(kind: str, biases: bool, weights: str, expected: int) -> None:
    expert = expert_of(facts(hidden=100, inner=64, kind=kind, biases=biases))
    assert expert.static_bytes(weights) == expected
    assert expert.flops == 2 * (3 if kind == "glu" else 2) * 100 * 64
