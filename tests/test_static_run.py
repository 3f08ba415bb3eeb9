"""Layers on the host executor: the values, whatever the routing and the plan; pruning."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.activations import SwigluOAI
from static_layer import ALL, HALF, hot, routed, routing, static, weighted
from switch_reference import (
    EXPERTS,
    TOP_K,
    Block,
    FamilyBlock,
    block,
    error,
    exact,
    float64,
    glu,
    inputs,
    mlp,
)

from mlx_moe import core, replace_moe_layers


@pytest.mark.parametrize("tokens", [0, 1, 2, 31, 32, 33, 127, 512, 4096])
@pytest.mark.parametrize("caller", [Block, FamilyBlock])
def test_values_at_any_number_of_tokens(tmp_path, caller, tokens: int) -> None:
    model = block(glu(), caller=caller)
    x, ids, scores = inputs(tokens)
    want = weighted(model, x, ids, scores)
    replacement = hot(model, tmp_path, ALL)
    got = model(x, ids, scores)
    assert got.shape == want.shape
    assert tokens == 0 or error(got, want) < HALF
    counts = static(replacement)
    assert routed(counts) == tokens * TOP_K
    assert counts["cold"] == 0
    assert counts["waits"] == (tokens > 0)


@pytest.mark.parametrize(
    ("loads", "dispatches", "spilled"),
    [
        ([200, 0, 0, 0, 0, 0, 0, 0], 1, 136),  # all on a hot expert
        ([0, 0, 200, 0, 0, 0, 0, 0], 0, 0),  # all on a cold one
        ([64, 32, 5, 64, 0, 32, 64, 3], 2, 0),  # exactly C
        ([65, 33, 5, 65, 0, 33, 65, 3], 2, 5),  # C + 1
        ([32, 32, 0, 32, 0, 0, 32, 0], 2, 0),  # the smaller function
        ([33, 0, 0, 0, 0, 0, 0, 0], 1, 0),
        ([0, 0, 0, 0, 0, 0, 0, 7], 0, 0),
    ],
)
def test_loads_at_the_edges(tmp_path, loads: list[int], dispatches: int, spilled: int) -> None:
    model = block(glu())
    x, ids, scores = routing(loads, sum(loads))
    want = weighted(model, x, ids, scores)
    replacement = hot(model, tmp_path)
    assert error(model(x, ids, scores), want) < HALF
    counts = static(replacement)
    cold = loads[2] + loads[4] + loads[7]
    assert (counts["cold"], counts["spilled"]) == (cold, spilled)
    assert counts["hot"] == sum(loads) - cold - spilled
    assert (counts["dispatches"], counts["waits"]) == (dispatches, dispatches > 0)


def test_the_smallest_capacity_that_fits_is_taken(tmp_path) -> None:
    model = block(glu())
    replacement = hot(model, tmp_path, [[0]], (64,))
    for load, slots in ((32, 32), (33, 64), (64, 64)):
        before = static(replacement)["padding"]
        model(*routing([load, 0, 0, 0, 0, 0, 0, 0], load))
        assert static(replacement)["padding"] - before == slots - load


def test_more_tiles_where_spilling_more_would_cost_more(tmp_path) -> None:
    model = block(glu())
    x, ids, scores = routing([0, 150, 0, 0, 0, 10, 0, 0], 160)
    want = weighted(model, x, ids, scores)
    replacement = hot(model, tmp_path, [[5, 1]], (64,), spill_limit=30)
    assert error(model(x, ids, scores), want) < HALF
    counts = static(replacement)
    assert (counts["dispatches"], counts["extra_tiles"], counts["spilled"]) == (2, 1, 22)
    replacement.restore()
    replacement = hot(model, tmp_path / "more", [[5, 1]], (64,), spill_limit=21)
    assert error(model(x, ids, scores), want) < HALF
    counts = static(replacement)
    assert (counts["dispatches"], counts["extra_tiles"], counts["spilled"]) == (3, 2, 0)
    assert counts["padding"] == 2 * (64 + 64 + 32) - 160


def test_experts_in_parts_add_up(tmp_path) -> None:
    model = block(glu(bias=True))
    x, ids, scores = inputs(90)
    want = float64(model(x, ids, scores))
    replacement = hot(model, tmp_path, splits=(32, 96), spill_limit=0)
    assert error(model(x, ids, scores), want) < HALF
    counts = static(replacement)
    assert counts["dispatches"] == 3 * (2 + counts["extra_tiles"])
    assert counts["hot"] > routed(counts) / 2


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("weights", ["affine-4", "mxfp4", "bfloat16"])
def test_dtypes_are_stocks(tmp_path, weights: str, dtype: mx.Dtype) -> None:
    model = block(glu(), weights)
    x, ids, scores = inputs(40, dtype)
    want = weighted(model, x, ids, scores)
    cold = block(glu(), weights)
    cold.update(model.parameters())
    replace_moe_layers(cold)
    expected = cold(x, ids, scores)
    replacement = hot(model, tmp_path, ALL)
    got = model(x, ids, scores)
    assert got.dtype == expected.dtype
    half = mx.bfloat16 in (got.dtype, dtype)
    assert error(got, want) < (6e-3 if half else HALF)
    assert static(replacement)["cold"] == 0
    plain = model.experts(x, ids)
    assert mx.array(plain).dtype == mx.array(cold.experts(x, ids)).dtype


@pytest.mark.parametrize(
    "layer",
    [
        lambda: glu(activation=SwigluOAI(), bias=True),
        lambda: mlp(),
        lambda: mlp(bias=True, activation=nn.ReLU2()),
    ],
    ids=["swiglu_oai", "gelu", "relu2"],
)
@pytest.mark.parametrize("caller", [Block, FamilyBlock])
def test_other_layers_equal_stock(tmp_path, layer, caller) -> None:
    model = block(layer(), caller=caller)
    x, ids, scores = inputs(90)
    want = float64(model(x, ids, scores))
    replacement = hot(model, tmp_path)
    assert error(model(x, ids, scores), want) < HALF
    counts = static(replacement)
    assert 0 < counts["cold"] < counts["hot"]
    assert counts["spilled"] == 0 < counts["hot"]


def test_int8_programs(tmp_path) -> None:
    model = block(glu())
    x, ids, scores = inputs(40)
    want = weighted(model, x, ids, scores)
    replacement = hot(model, tmp_path, ALL, weights="int8")
    assert 2e-3 < error(model(x, ids, scores), want) < 3e-2
    assert static(replacement)["hot"] == 80


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[list[int]], tuple[int, ...], int]:
    order = draw(st.permutations(range(EXPERTS)))
    count = draw(st.integers(1, EXPERTS))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=3))) if count > 1 else []
    ends = [0, *cuts, count]
    members = [list(order[a:b]) for a, b in itertools.pairwise(ends)]
    tiers = tuple(draw(st.sampled_from([32, 64])) for _ in members)
    return members, tiers, draw(st.sampled_from([0, 10, 1 << 30]))


@given(placements(), st.integers(1, 150), st.booleans(), st.integers(0, 1 << 20))
@settings(max_examples=40)
def test_any_plan_gives_the_same(tmp_path_factory, case, tokens, fused, seed) -> None:
    members, tiers, spill_limit = case
    mx.random.seed(seed)
    model = block(glu(), caller=FamilyBlock if fused else Block)
    x, ids, scores = inputs(tokens)
    want = weighted(model, x, ids, scores)
    directory = tmp_path_factory.mktemp("plan")
    replacement = hot(model, directory, members, tiers, spill_limit=spill_limit)
    assert error(model(x, ids, scores), want) < HALF
    assert routed(static(replacement)) == tokens * TOP_K


def permuted(model: nn.Module, directory: Path, members: list[list[int]]) -> mx.array:
    x, ids, scores = (mx.array(a) for a in ARGUMENTS)
    replacement = hot(model, directory, members, spill_limit=0)
    result = model(x, ids, scores)
    mx.eval(result)
    counts = static(replacement)
    assert counts["hot"] == routed(counts)
    replacement.restore()
    return result


ARGUMENTS = [np.array(a) for a in inputs(100)]
PLACES = [ALL, [[7, 6, 5, 4], [3], [2, 1, 0]], [[5, 0], [1, 7, 3, 2], [6, 4]]]


def test_where_an_expert_is_placed_does_not_matter(tmp_path) -> None:
    model = block(glu())
    results = [permuted(model, tmp_path / str(i), places) for i, places in enumerate(PLACES)]
    assert all(mx.array_equal(results[0], other) for other in results[1:])


def test_a_wrong_map_would_be_seen(tmp_path, monkeypatch) -> None:
    """The same comparison, with two experts of a group exchanged once their program is loaded."""
    from mlx_moe import static_load

    model = block(glu())
    right = permuted(model, tmp_path / "right", ALL)
    load = static_load.load_group

    def exchanged(*args: Any) -> Any:
        group = load(*args)
        experts = group.experts.copy()
        experts[:2] = experts[:2][::-1]
        return replace(group, experts=experts)

    monkeypatch.setattr(static_load, "load_group", exchanged)
    assert error(permuted(model, tmp_path / "wrong", ALL), float64(right)) > 0.1


def test_few_tokens_go_straight_to_the_kernels(tmp_path) -> None:
    model = block(glu())
    replacement = hot(model, tmp_path, static_from=20)
    before = core.calls().get("submit", 0)
    model(*inputs(19))
    assert core.calls().get("submit", 0) == before
    assert static(replacement)["forwards"] == 0
    model(*inputs(20))
    assert core.calls()["submit"] == before + 1
    assert static(replacement)["forwards"] == 1


@pytest.mark.parametrize("importance", ["router", "norm"])
def test_pruning_leaves_the_least_important_out(tmp_path, importance: str) -> None:
    model = block(glu())
    x, ids, scores = routing([150, 0, 30, 40, 0, 0, 0, 0], 220)
    replacement = hot(
        model, tmp_path, [[0], [3]], (64, 64), overflow="prune", importance=importance
    )
    got = model(x, ids, scores)
    measure = float64(scores)[0, :, 0]
    if importance == "norm":
        measure = np.linalg.norm(float64(x)[0], axis=-1)
    bucket = np.flatnonzero(np.array(ids)[0, :, 0] == 0)
    pruned = sorted(bucket, key=lambda t: -measure[t])[64:]
    want = weighted(model, x, ids, scores)
    want[0, pruned] = 0
    assert error(got, want) < HALF
    assert (float64(got)[0, pruned] == 0).all()
    counts = static(replacement)
    assert (counts["pruned"], counts["spilled"]) == (86, 0)
    assert (counts["hot"], counts["cold"]) == (104, 30)


def test_pruning_ranks_nan_last_and_counts_it(tmp_path) -> None:
    model = block(glu())
    x, ids, scores = routing([150, 0, 30, 40, 0, 0, 0, 0], 220)
    bucket = np.flatnonzero(np.array(ids)[0, :, 0] == 0)
    unknown = bucket[::3][:40]
    measure = np.array(scores)[0, :, 0]
    measure[unknown] = np.nan
    scores = mx.array(measure)[None, :, None]
    replacement = hot(model, tmp_path, [[0]], (64,), overflow="prune")
    got = float64(model(x, ids, scores))[0]
    known = sorted(set(bucket) - set(unknown), key=lambda t: -measure[t])
    pruned = [*known[64:], *unknown]
    want = weighted(model, x, ids, scores)[0]
    want[pruned] = 0
    assert error(mx.array(got), want) < HALF and (got[pruned] == 0).all()
    counts = static(replacement)
    assert (counts["nan_importance"], counts["pruned"]) == (40, 86)


def test_pruning_without_scores_is_exact_and_counted(tmp_path) -> None:
    model = block(glu())
    x, ids, _ = routing([150, 0, 30, 0, 0, 0, 0, 0], 180)
    replacement = hot(model, tmp_path, [[0]], (64,), overflow="prune")
    y = mx.array(model.experts(x, ids))  # the outputs themselves: no scores to see
    assert error(y, exact(model.experts, x, ids)) < HALF
    counts = static(replacement)
    assert (counts["without_scores"], counts["pruned"], counts["spilled"]) == (1, 0, 86)
