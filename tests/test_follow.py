"""Live re-planning. Which groups ran is read from execution counters, never from a plan; which
copies are made, from the calls that make them."""

from __future__ import annotations

import copy
import logging
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tuner.lora import LoRASwitchLinear
from static_layer import routing, weighted
from static_models import groups_of, host, plan_of
from switch_reference import HIDDEN, block, error, glu, only

from mlx_moe import InvalidArgument, UnsupportedLayer, core, follow, replace_moe_layers
from mlx_moe.devices import Device, load_device
from mlx_moe.layers import PackedCopies
from mlx_moe.machine import has_packed_copies
from mlx_moe.static_paths import all_cold

MEMBERS = [[0, 1], [2, 3]]  # 4 to 7 have no program
FIRST, SECOND = [100, 80, 1, 1, 10, 2, 3, 3], [1, 0, 90, 90, 10, 2, 3, 4]
TOKENS = 200


def device(name: str = "m2-max", **values: float) -> Device:
    """A dispatch takes as long as 20 assignments on the cold path, an assignment there a tenth."""
    found = load_device(name)
    numbers = {key: replace(found.numbers[key], value=value) for key, value in values.items()}
    return replace(found, numbers=found.numbers | numbers)


def made(directory: Path, **options: Any) -> tuple[nn.Module, Any, Any]:
    """A layer with two groups hot, its plan and its replacement."""
    model = block(glu())
    plan = plan_of(model, {"experts": groups_of("e", MEMBERS, (128, 128), HIDDEN)}, **options)
    expert = 2 * 3 * 32 * HIDDEN  # FLOPs, nearly
    slow = device(
        cold_flops=expert / 1e-5,
        cold_bandwidth=1e15,
        static_flops=expert / 1e-6,
        static_efficiency=1,
        static_bandwidth=1e15,
        dispatch_seconds=2e-4,
    )
    plan = replace(plan, device=slow)
    return model, plan, host(model, plan, directory)


def run(model: nn.Module, loads: list[int], replacement: Any) -> dict[str, int]:
    """A forward with these loads, checked; the static counters of it alone."""
    before = dict(only(replacement)["static"])
    x, ids, scores = routing(loads, sum(loads))
    assert error(model(x, ids, scores), weighted(model, x, ids, scores)) < 2e-3
    after = only(replacement)["static"]
    return {key: after[key] - before[key] for key in ("hot", "cold", "spilled", "dispatches")}


def test_groups_go_and_come_with_routing(tmp_path, caplog) -> None:
    model, plan, replacement = made(tmp_path)
    assert run(model, FIRST, replacement)["dispatches"] == 2
    following = follow(replacement, plan)
    with caplog.at_level(logging.INFO, logger="mlx_moe"):
        first = [run(model, FIRST, replacement) for _ in range(4)]
    # Two assignments do not pay for a dispatch: the second group has left.
    assert first[-1] == {"hot": 180, "cold": 20, "spilled": 0, "dispatches": 1}
    second = [run(model, SECOND, replacement) for _ in range(8)]
    assert second[-1] == {"hot": 180, "cold": 20, "spilled": 0, "dispatches": 1}
    assert second[0]["hot"] == 180, "a re-plan comes before the forward that brings it"
    assert len(following.log) == 2
    assert "experts: forward 1: routing shifted by" in caplog.text
    stats = following.stats()["experts"]
    assert stats["replans"] == 2
    assert only(replacement)["schedule"] == stats
    assert stats["bytes_moved"] == 0
    following.stop()
    assert run(model, SECOND, replacement)["dispatches"] == 2
    assert following.stats()["experts"]["forwards"] == 12


def test_a_group_stays_where_none_pays(tmp_path) -> None:
    model, plan, replacement = made(tmp_path)
    follow(replacement, plan)
    nowhere = [1, 0, 2, 0, 5, 5, 5, 5]
    counts = [run(model, nowhere, replacement) for _ in range(5)]
    assert counts[-1] == {"hot": 2, "cold": 21, "spilled": 0, "dispatches": 1}


def test_small_forwards_and_other_layers_do_not_count(tmp_path) -> None:
    model, plan, replacement = made(tmp_path, static_from=50)
    following = follow(replacement, plan)
    x, ids, scores = routing([1, 2, 3, 4, 0, 0, 0, 0], 10)
    model(x, ids, scores)
    with all_cold(model):
        model(*routing(FIRST, TOKENS))
    assert following.stats()["experts"]["forwards"] == 0
    run(model, FIRST, replacement)
    assert following.stats()["experts"]["forwards"] == 1


def test_a_copy_and_a_later_plan_are_not_followed(tmp_path) -> None:
    model, plan, replacement = made(tmp_path)
    following = follow(replacement, plan)
    twin = copy.deepcopy(model)
    twin(*routing(FIRST, TOKENS))
    assert following.stats()["experts"]["forwards"] == 0
    replace_moe_layers(model)
    model(*routing(FIRST, TOKENS))
    assert following.stats()["experts"]["forwards"] == 0
    following.stop()


def test_what_cannot_be_followed_is_refused(tmp_path) -> None:
    model, plan, replacement = made(tmp_path)
    with pytest.raises(InvalidArgument, match="no option 'patience'"):
        follow(replacement, plan, patience=3)
    with pytest.raises(InvalidArgument, match="shift is -1"):
        follow(replacement, plan, shift=-1)
    assert model.experts._moe_layer.follower is None
    with pytest.raises(InvalidArgument, match="nothing here can change places"):
        follow(replace_moe_layers(model), plan)


def test_layers_without_groups_are_not_followed(tmp_path) -> None:
    model, plan, replacement = made(tmp_path)
    path = model.experts._moe_layer.static
    path.layer = replace(path.layer, groups=[], cold_groups=2)
    with pytest.raises(InvalidArgument, match="nothing here can change places"):
        follow(replacement, plan)


def test_following_again_starts_from_the_plan(tmp_path) -> None:
    model, plan, replacement = made(tmp_path)
    path = model.experts._moe_layer.static
    first = follow(replacement, plan)
    run(model, FIRST, replacement)
    assert len(path.layer.groups) == 1
    second = follow(replacement, plan)
    assert len(path.layer.groups) == 2
    run(model, FIRST, replacement)
    first.stop()
    assert len(path.layer.groups) == 1
    second.stop()
    assert len(path.layer.groups) == 2


def test_only_the_plan_that_is_running_is_followed(tmp_path) -> None:
    model, plan, replacement = made(tmp_path)
    other = plan_of(model, {"experts": groups_of("e", [[0, 2], [1, 3]], (128, 128), HIDDEN)})
    with pytest.raises(InvalidArgument, match=r"group e.g0.p0 of experts \[0, 1\] is running"):
        follow(replacement, replace(other, device=plan.device))


def test_an_expert_that_there_is_not_is_named(tmp_path) -> None:
    model, plan, replacement = made(tmp_path)
    follow(replacement, plan)
    x, ids, scores = routing(FIRST, TOKENS)
    with pytest.raises(InvalidArgument, match="experts: expert ids are .* 0 to 7, found 0 to 8"):
        model(x, mx.where(ids == 3, mx.array(8, ids.dtype), ids), scores)


@pytest.fixture
def packing(monkeypatch) -> Any:
    """A model with two experts packed, its plan, its replacement; what is packed after that.

    Without a packed layout copies are empty: then as if they were not, to see which are made.
    """
    if not has_packed_copies():
        monkeypatch.setattr(PackedCopies, "nbytes", property(lambda copies: 4096))
    model = block(glu(), "affine-4")
    plan = plan_of(model, {})
    layer = replace(plan.layers[0], packed=(0, 1), static_from=8, reason=None)
    fast = device("cpu", packed_speedup=4.0, cold_flops=1e6, cold_bandwidth=1e12)
    plan = replace(plan, executor="cpu", device=fast, layers=(layer,))
    replacement = replace_moe_layers(model, plan)
    calls: list[tuple[list[int], bool]] = []
    make = core.Packed

    def packed(matrix: Any, experts: Any, previous: Any = None) -> Any:
        calls.append((list(experts), previous is not None))
        if (FAIL, True) in calls and list(experts):
            raise MemoryError
        return make(matrix, experts, previous)

    monkeypatch.setattr(core, "Packed", packed)
    return model, plan, replacement, calls


FAIL: list[int] = [-1]


def forward(model: nn.Module, loads: list[int]) -> None:
    x, ids, scores = (
        a.astype(mx.bfloat16) if a.dtype == mx.float32 else a for a in routing(loads, TOKENS)
    )
    assert error(model(x, ids, scores), weighted(model, x, ids, scores)) < 6e-3


def test_packed_experts_change_with_routing(packing) -> None:
    model, plan, replacement, calls = packing
    first = model.experts._moe_layer.packed
    size = first.nbytes
    following = follow(replacement, plan)
    forward(model, FIRST)
    assert model.experts._moe_layer.packed is first
    calls.clear()
    forward(model, [100, 1, 90, 1, 1, 2, 3, 2])
    assert calls == [([0], True)] * 3 + [([0, 2], True)] * 3, "expert 0 is not packed again"
    forward(model, SECOND)
    forward(model, SECOND)
    packed = model.experts._moe_layer.packed
    assert packed.experts == (2, 3)
    assert packed.nbytes == size
    assert following.stats()["experts"]["replans"] == 2
    following.stop()
    assert model.experts._moe_layer.packed.experts == (0, 1)


def test_nothing_is_packed_where_nothing_changed(packing) -> None:
    model, plan, replacement, calls = packing
    first = model.experts._moe_layer.packed
    following = follow(replacement, plan)
    calls.clear()
    following.stop()
    assert calls == []
    assert model.experts._moe_layer.packed is first


def test_another_plans_copies_are_not_followed(packing) -> None:
    _, plan, replacement, _ = packing
    other = replace(plan, layers=(replace(plan.layers[0], packed=(0, 2)),))
    with pytest.raises(InvalidArgument, match=r"experts \[0, 1\] are packed, this plan has \[0, 2"):
        follow(replacement, other)


def test_a_change_that_fails_leaves_what_is_there(packing, caplog) -> None:
    model, plan, replacement, calls = packing
    following = follow(replacement, plan)
    calls.append((FAIL, True))
    with caplog.at_level(logging.WARNING, logger="mlx_moe"):
        for _ in range(3):
            forward(model, SECOND)
    assert caplog.text.count("experts: experts could not change places: MemoryError") == 1
    layer = model.experts._moe_layer
    assert layer.packed.experts == ()
    assert following.layers["experts"].placement.experts_of(0) == []
    assert following.stats()["experts"]["failed"] == 1
    assert only(replacement)["schedule"]["failed"] == 1
    calls.clear()
    following.stop()
    assert layer.packed.experts == (0, 1)


def test_adapters_on_packed_experts(packing) -> None:
    model, plan, replacement, _ = packing
    following = follow(replacement, plan)
    for _ in range(2):
        forward(model, SECOND)
    plain = model.experts.up_proj
    model.experts.up_proj = LoRASwitchLinear.from_base(plain)
    following.stop()
    assert following.stats()["experts"]["failed"] == 1
    model.experts.up_proj = plain
    replacement = replace_moe_layers(model, plan)
    model.experts.up_proj = LoRASwitchLinear.from_base(plain)
    with pytest.raises(UnsupportedLayer, match=r"experts.up_proj is a LoRASwitchLinear"):
        follow(replacement, plan)


def test_restored_layers_keep_nothing(packing) -> None:
    model, plan, replacement, calls = packing
    following = follow(replacement, plan)
    for _ in range(2):
        forward(model, SECOND)
    layer = model.experts._moe_layer
    copies = weakref.ref(layer.packed)
    replacement.restore()
    calls.clear()
    following.stop()
    assert calls == []
    assert (layer.packed, layer.follower, layer.static, copies()) == (None,) * 4
    assert only(replacement)["schedule"]["replans"] == 1
