"""Which assignment goes to which tile, against brute force."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_moe import InvalidArgument
from mlx_moe.static import Group, Split, StaticLayer, tile_load

NEVER = 1 << 30


def group(experts: list[int], capacities: tuple[int, ...] = (4, 8), spill: int = NEVER) -> Group:
    return Group(f"g{experts[0]}", np.array(experts, np.int32), capacities, (0,), spill)


@pytest.mark.parametrize(
    ("loads", "spill_limit", "tiles"),
    [
        ([0, 0], NEVER, []),
        ([1, 0], NEVER, [4]),
        ([4, 4], NEVER, [4]),
        ([5, 0], NEVER, [8]),
        ([8, 8], NEVER, [8]),
        ([9, 0], NEVER, [8]),
        ([9, 0], 1, [8]),
        ([9, 0], 0, [8, 4]),
        ([10, 10], 3, [8, 4]),
        ([10, 10], 4, [8]),
        ([30, 0], 0, [8, 8, 8, 8]),
        ([29, 1], 6, [8, 8, 8]),
        ([30, 0], 5, [8, 8, 8, 8]),
    ],
)
def test_tiles_that_loads_take(loads: list[int], spill_limit: int, tiles: list[int]) -> None:
    assert group([0, 1], spill=spill_limit).tiles(np.array(loads, np.int32)) == tiles


@st.composite
def layers(draw: st.DrawFn) -> tuple[StaticLayer, np.ndarray]:
    """A layer with some of its experts in groups of any order, and ids for it."""
    experts = draw(st.integers(1, 12))
    order = draw(st.permutations(range(experts)))
    hot = draw(st.integers(0, experts))
    groups, at = [], 0
    while at < hot:
        size = draw(st.integers(1, hot - at))
        capacities = tuple(sorted(draw(st.sets(st.integers(1, 9), min_size=1, max_size=3))))
        spill = draw(st.sampled_from([0, 1, 5, NEVER]))
        groups.append(group(list(order[at : at + size]), capacities, spill))
        at += size
    k = draw(st.integers(1, experts))
    tokens = draw(st.integers(0, 40))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    skew = draw(st.sampled_from([0.0, 1.0, 4.0]))
    liking = skew * random.standard_normal(experts)
    noise = random.gumbel(size=(tokens, experts)) + liking
    ids = np.argsort(-noise, axis=1)[:, :k].astype(np.uint32)
    return StaticLayer("layer", None, groups, experts, 1), ids


def expert_of(ids: np.ndarray, assignment: int) -> int:
    return int(ids.reshape(-1)[assignment])


def placed(split: Split) -> list[tuple[int, int]]:
    """(expert, assignment) of every slot in use."""
    return [
        (int(tile.group.experts[g]), int(a))
        for tile in split.tiles
        for g, bucket in enumerate(tile.experts)
        for a in tile.order[tile.offsets[bucket] : tile.offsets[bucket + 1]]
    ]


@given(layers())
def test_every_assignment_is_in_one_place(case: tuple[StaticLayer, np.ndarray]) -> None:
    layer, ids = case
    split = layer.split(ids)
    slots = placed(split)
    assert all(expert_of(ids, a) == expert for expert, a in slots)
    everywhere = [a for _, a in slots] + split.cold.tolist() + split.overflow.tolist()
    assert sorted(everywhere) == list(range(ids.size))
    hot = {int(e) for g in layer.groups for e in g.experts}
    assert all(expert_of(ids, a) not in hot for a in split.cold)
    assert all(expert_of(ids, a) in hot for a in split.overflow)


@given(layers())
def test_tiles_hold_what_fits_and_no_more_than_is_needed(case) -> None:
    layer, ids = case
    split = layer.split(ids)
    loads = np.bincount(ids.reshape(-1), minlength=layer.experts)
    for tile in split.tiles:
        buckets = tile.offsets[tile.experts + 1] - tile.offsets[tile.experts]
        assert 0 < buckets.max() <= tile.capacity
        assert tile.capacity in tile.group.capacities
        assert tile_load(tile) == buckets.sum()
        smaller = [c for c in tile.group.capacities if c < tile.capacity]
        assert all(buckets.max() > c for c in smaller)
    for g in layer.groups:
        capacity = sum(t.capacity for t in split.tiles if t.group is g)
        over = np.maximum(loads[g.experts] - capacity, 0).sum()
        assert over == sum(expert_of(ids, a) in g.experts for a in split.overflow)
        assert over <= g.spill_limit or not capacity
        assert bool(capacity) == bool(loads[g.experts].sum())
    used = Counter(t.group.name for t in split.tiles)
    assert split.extra == sum(n - 1 for n in used.values())


@given(layers(), st.integers(0, 1 << 32))
def test_pruning_keeps_the_most_important(case, seed: int) -> None:
    layer, ids = case
    random = np.random.default_rng(seed)
    importance = random.integers(0, 4, ids.size).astype(np.float32)  # with ties
    split = layer.split(ids, importance)
    over = set(split.overflow.tolist())
    kept = {a for _, a in placed(split)}
    for expert in np.flatnonzero(layer.hot):
        bucket = np.flatnonzero(ids.reshape(-1) == expert)
        ranked = sorted(bucket, key=lambda a: (-importance[a], a))
        room = len(kept.intersection(bucket.tolist()))
        assert set(ranked[:room]) <= kept
        assert set(ranked[room:]) <= over


def test_a_bound_on_assignments_is_kept() -> None:
    layer = StaticLayer("layer", None, [group([0, 1])], 3, 1)
    layer.most[:] = [2, 3, 0]
    ids = np.array([[0, 1], [0, 2], [0, 1], [1, 0], [1, 2]], np.uint32)
    split = layer.split(ids)
    assert Counter(expert for expert, _ in placed(split)) == {0: 2, 1: 3}
    assert sorted(split.overflow.tolist()) == [4, 7, 8]
    assert sorted(split.cold.tolist()) == [3, 9]


@pytest.mark.parametrize("experts", [[[0, 1], [1, 2]], [[3]], [[-1]]])
def test_groups_that_no_layer_can_have(experts: list[list[int]]) -> None:
    with pytest.raises(InvalidArgument, match=r"^layer: group g.* has the experts"):
        StaticLayer("layer", None, [group(g) for g in experts], 3, 1)


def test_when_the_static_path_is_taken() -> None:
    groups = [group([0])]
    assert [StaticLayer("l", None, groups, 1, 5).takes(t) for t in (4, 5)] == [False, True]
    assert not StaticLayer("l", None, groups, 1, None).takes(1 << 20)
    assert not StaticLayer("l", None, [], 1, 0).takes(1 << 20)
