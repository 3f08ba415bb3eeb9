"""The routing functions of the core against numpy references."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_moe import InvalidArgument, core


def route(tokens, top_k, experts, seed=0):
    random = np.random.default_rng(seed)
    return np.argsort(random.random((tokens, experts)), axis=1)[:, :top_k].astype(np.uint32)


@pytest.mark.parametrize("experts", [1, 8, 60, 128, 513])
@pytest.mark.parametrize("tokens", [0, 1, 7, 333])
@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
def test_bucket_is_a_stable_sort(tokens, experts, dtype):
    ids = route(tokens, min(8, experts), experts).astype(dtype)
    for array in (ids, mx.array(ids)):
        mx.eval(array)
        order, offsets = core.bucket(array, experts)
        assert order.dtype == offsets.dtype == np.int32
        np.testing.assert_array_equal(order, np.argsort(ids.reshape(-1), kind="stable"))
        np.testing.assert_array_equal(
            np.diff(offsets), np.bincount(ids.reshape(-1), minlength=experts)
        )


def test_bucket_takes_more_assignments_a_token_than_experts():
    order, offsets = core.bucket(np.array([[1, 0, 1, 1], [0, 0, 1, 0]], np.uint32), 2)
    assert order.tolist() == [1, 4, 5, 7, 0, 2, 3, 6]
    assert offsets.tolist() == [0, 4, 8]


def prune_reference(order, offsets, capacities, importance):
    kept, overflowed = [], []
    for e, capacity in enumerate(capacities):
        bucket = order[offsets[e] : offsets[e + 1]].tolist()
        best = set(sorted(bucket, key=lambda a: (-importance[a], a))[:capacity])
        kept += [a for a in bucket if a in best]
        overflowed += [a for a in bucket if a not in best]
    return kept, overflowed


@pytest.mark.parametrize("seed", range(8))
def test_capacity_spills_the_last_and_prunes_the_least_important(seed):
    random = np.random.default_rng(seed)
    experts, ids = 16, route(100, 4, 16, seed)
    order, offsets = core.bucket(ids, experts)
    capacities = random.integers(0, 50, experts).astype(np.int32)
    importance = random.integers(0, 5, ids.size).astype(np.float32)  # many ties
    loads = np.diff(offsets)

    kept, kept_offsets, overflowed = core.capacity(order, offsets, capacities)
    buckets = np.split(order, offsets[1:-1])
    pairs = list(zip(buckets, capacities, strict=True))
    assert kept.tolist() == [a for bucket, c in pairs for a in bucket[:c]]
    assert overflowed.tolist() == [a for bucket, c in pairs for a in bucket[c:]]
    np.testing.assert_array_equal(np.diff(kept_offsets), np.minimum(loads, capacities))

    kept, kept_offsets, overflowed = core.capacity(
        order, offsets, capacities, importance, overflow="prune"
    )
    want = prune_reference(order, offsets, capacities, importance)
    assert (kept.tolist(), overflowed.tolist()) == want
    np.testing.assert_array_equal(np.diff(kept_offsets), np.minimum(loads, capacities))


DTYPES = [mx.float32, mx.float16, mx.bfloat16]
TO_NUMPY = {
    "float32": lambda tiles: tiles,
    "float16": lambda tiles: tiles.astype(np.float32),
    "bfloat16": lambda bits: (bits.astype(np.uint32) << 16).view(np.float32),
}


@pytest.mark.parametrize("width", [1, 17, 96])
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pack_gathers_and_pads(isa, source, dtype, width):
    tokens, top_k, experts = 40, 3, 6
    x = mx.array(np.random.default_rng(1).standard_normal((tokens, width))).astype(source)
    mx.eval(x)
    order, offsets = core.bucket(route(tokens, top_k, experts), experts)
    group = np.array([4, 0, 5], np.int32)
    capacity = int(np.diff(offsets).max()) + 2
    tiles, slots = core.pack(x, order, offsets, group, capacity, top_k, dtype)

    assert tiles.shape == (3, capacity, width) and slots.dtype == np.int32
    values = np.array(x.astype(getattr(mx, dtype)).astype(mx.float32))
    for g, expert in enumerate(group):
        bucket = order[offsets[expert] : offsets[expert + 1]]
        padding = [-1] * (capacity - len(bucket))
        assert slots[g].tolist() == bucket.tolist() + padding
        tile = TO_NUMPY[dtype](tiles[g])
        np.testing.assert_array_equal(tile[: len(bucket)], values[bucket // top_k])
        assert not tile[len(bucket) :].any()


def widened(rows):
    return np.array(rows.astype(mx.float32))


def rounded(values, dtype):
    return widened(mx.array(values).astype(dtype))


def ordered_sum(values, assignments, scores, start):
    """float32, one rounded product and sum after the other, in the order of the assignments."""
    want = start.copy()
    for i in np.argsort(assignments):
        want[assignments[i] // scores.shape[1]] += scores.reshape(-1)[assignments[i]] * values[i]
    return want


@pytest.mark.parametrize("width", [1, 33, 192])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_combine_is_a_weighted_sum(isa, dtype, out_dtype, width):
    random = np.random.default_rng(2)
    tokens, top_k = 50, 4
    assignments = random.permutation(tokens * top_k)[:150].astype(np.int32)
    rows = mx.array(random.standard_normal((150, width))).astype(dtype)
    scores = random.random((tokens, top_k)).astype(np.float32)
    out = mx.full((tokens, width), 7, out_dtype)
    mx.eval(rows, out)

    want = ordered_sum(widened(rows), assignments, scores, np.zeros((tokens, width), np.float32))
    exact = np.zeros((tokens, width))
    np.add.at(
        exact,
        assignments // top_k,
        scores.reshape(-1)[assignments, None].astype(float) * widened(rows),
    )
    np.testing.assert_allclose(want, exact, rtol=0, atol=1e-5)
    core.combine(rows, assignments, scores, out)
    np.testing.assert_array_equal(widened(out), rounded(want, out_dtype))
    again = ordered_sum(widened(rows), assignments, scores, widened(out))
    core.combine(rows, assignments, scores, out, accumulate=True)
    np.testing.assert_array_equal(widened(out), rounded(again, out_dtype))


def test_halves_beyond_float16_are_infinite_and_nan_stays(isa):
    x = np.array([[65519.0, 65520.0, -1e9, np.inf, np.nan, 2.0**-24, 2.0**-26] * 5], np.float32)
    tiles, _ = core.pack(x, ints(0), ints(0, 1), ints(0), 1, 1)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(tiles[0], x.astype(np.float16))
    out = floats(*x.shape)
    core.combine(tiles[0], ints(0), floats(1, 1), out)
    np.testing.assert_array_equal(out, tiles[0].astype(np.float32))


@pytest.mark.parametrize("width", [7, 64, 2500])  # the last more than caches are left with
def test_groups_pack_and_sum_together(isa, width):
    """Tiles of any size in one call, their results and the overflow in another."""
    tokens, top_k, experts = 300, 4, 8
    random = np.random.default_rng(4)
    ids = route(tokens, top_k, experts)
    x = mx.array(random.standard_normal((tokens, width))).astype(mx.bfloat16)
    scores = random.random((tokens, top_k)).astype(np.float32)
    order, offsets = core.bucket(ids, experts)
    capacities = np.array([96, 160, 160, 96, 192, 96, 32, 192], np.int32)
    kept, kept_offsets, spilled = core.capacity(order, offsets, capacities)
    assert len(spilled)
    groups = [ints(3, 0, 5), ints(2, 1), ints(6), ints(4, 7)]
    tiles = [np.full((len(g), capacities[g[0]], width), 7, np.float16) for g in groups]
    slots = [np.full(tile.shape[:2], 7, np.int32) for tile in tiles]
    mx.eval(x)
    core.pack_groups(x, kept, kept_offsets, groups, top_k, tiles, slots)
    for group, tile, slot in zip(groups, tiles, slots, strict=True):
        want = core.pack(x, kept, kept_offsets, group, tile.shape[1], top_k)
        np.testing.assert_array_equal(tile, want[0])
        np.testing.assert_array_equal(slot, want[1])
        one = [np.zeros_like(tile)], [np.zeros_like(slot)]
        core.pack_groups(x, [kept], [kept_offsets], [group], top_k, *one)
        np.testing.assert_array_equal(one[0][0], tile)

    rows = [tile.reshape(-1, width) for tile in tiles] + [x[mx.array(spilled // top_k)]]
    mx.eval(rows[-1])
    out = floats(tokens, width)
    core.combine(rows, [slot.reshape(-1) for slot in slots] + [spilled], scores, out)
    values = widened(x.astype(mx.float16).astype(mx.float32))
    values = np.repeat(values, top_k, 0)
    values[spilled] = widened(x)[spilled // top_k]
    want = ordered_sum(values, np.arange(ids.size), scores, np.zeros_like(out))
    np.testing.assert_array_equal(out, want)


def test_tiles_and_overflow_together_are_the_whole_layer():
    """bucket, capacity, pack, combine: what fits the tiles plus what spills is everything."""
    tokens, top_k, experts, width = 64, 4, 8, 12
    ids = route(tokens, top_k, experts)
    random = np.random.default_rng(3)
    x = random.standard_normal((tokens, width)).astype(np.float32)
    weights = random.standard_normal((experts, width, width)).astype(np.float32)
    scores = random.random((tokens, top_k)).astype(np.float32)
    order, offsets = core.bucket(ids, experts)
    kept, kept_offsets, spilled = core.capacity(order, offsets, np.full(experts, 20, np.int32))
    assert 0 < len(spilled) < len(order)

    every = np.arange(experts, dtype=np.int32)
    tiles, slots = core.pack(x, kept, kept_offsets, every, 20, top_k, "float32")
    out = mx.zeros((tokens, width))
    mx.eval(out)
    core.combine((tiles @ weights).reshape(-1, width), slots.reshape(-1), scores, out)
    cold = np.einsum("nd,nde->ne", x[spilled // top_k], weights[ids.reshape(-1)[spilled]])
    core.combine(cold, spilled, scores, out, accumulate=True)

    want = np.einsum("tk,td,tkde->te", scores, x, weights[ids])
    np.testing.assert_allclose(np.array(out), want, rtol=1e-4, atol=1e-4)


def ints(*values):
    return np.array(values, np.int32)


def floats(*shape):
    return np.ones(shape, np.float32)


BAD_CALLS = {
    "id too large": (r"ids\[1\] is 4, expected .* 0 to 3", lambda: core.bucket(ints(0, 4), 4)),
    "negative id": (r"ids\[0\] is -1", lambda: core.bucket(ints(-1, 0), 4)),
    "no experts": ("for 0 experts", lambda: core.bucket(ints(), 0)),
    "negative experts": ("for -3 experts", lambda: core.bucket(ints(0), -3)),
    "float ids": ("ids must be uint32 or int32", lambda: core.bucket(floats(3), 4)),
    "strided ids": ("row-contiguous", lambda: core.bucket(np.zeros((4, 4), np.uint32)[:, ::2], 4)),
    "NaN importance": (
        r"importance\[1\] is NaN",
        lambda: core.capacity(
            ints(0, 1), ints(0, 2), ints(2), np.array([0, np.nan], np.float32), "prune"
        ),
    ),
    "no importance": (
        "needs importance",
        lambda: core.capacity(ints(0), ints(0, 1), ints(1), overflow="prune"),
    ),
    "unknown overflow": (
        "'drop', expected",
        lambda: core.capacity(ints(0), ints(0, 1), ints(1), overflow="drop"),
    ),
    "short capacities": (
        r"capacities has shape \[1\], expected \[2\]",
        lambda: core.capacity(ints(0), ints(0, 1, 1), ints(1)),
    ),
    "offsets beyond order": (
        "offsets must rise",
        lambda: core.capacity(ints(0), ints(0, 2), ints(1)),
    ),
    "load above capacity": (
        r"experts\[0\] is 0 with 2 assignments",
        lambda: core.pack(floats(2, 3), ints(0, 1), ints(0, 2), ints(0), 1, 1),
    ),
    "assignment beyond tokens": (
        r"kept\[1\] is 2, expected an assignment below 2",
        lambda: core.pack(floats(2, 3), ints(0, 2), ints(0, 2), ints(0), 2, 1),
    ),
    "expert twice": (
        "second time",
        lambda: core.pack(floats(2, 3), ints(0), ints(0, 1), ints(0, 0), 2, 1),
    ),
    "unknown dtype": (
        "dtype is 'int8'",
        lambda: core.pack(floats(2, 3), ints(0), ints(0, 1), ints(0), 2, 1, "int8"),
    ),
    "assignment twice": (
        "assignment 1 is in rows 0 and 1",
        lambda: core.combine(floats(2, 3), ints(1, 1), floats(2, 1), floats(2, 3)),
    ),
    "wrong out": (
        r"out has shape \[2, 2\], expected \[2, 3\]",
        lambda: core.combine(floats(2, 3), ints(0, 1), floats(2, 1), floats(2, 2)),
    ),
    "double out": (
        "out must be float32, float16 or bfloat16",
        lambda: core.combine(floats(2, 3), ints(0, 1), floats(2, 1), np.ones((2, 3))),
    ),
    "rows without assignments": (
        "2 rows and 1 assignments",
        lambda: core.combine([floats(1, 3)] * 2, [ints(0)], floats(2, 1), floats(2, 3)),
    ),
    "assignment twice in different parts": (
        "assignment 1 is in rows 0 of part 0 and 1 of part 1",
        lambda: core.combine(
            [floats(1, 3), floats(2, 3)], [ints(1), ints(-1, 1)], floats(2, 1), floats(2, 3)
        ),
    ),
    "parts of different widths": (
        "rows have 2 values, out 3",
        lambda: core.combine(
            [floats(1, 3), floats(1, 2)], [ints(0), ints(1)], floats(2, 1), floats(2, 3)
        ),
    ),
    "a group without slots": (
        "1 tiles and 0 slots for 1 groups",
        lambda: core.pack_groups(
            floats(2, 3), ints(0), ints(0, 1), [ints(0)], 1, [floats(1, 1, 3)], []
        ),
    ),
    "slots of another capacity": (
        r"slots\[0\] has shape \[1, 2\], expected \[1, 1\]",
        lambda: core.pack_groups(
            floats(2, 3), ints(0), ints(0, 1), [ints(0)], 1, [floats(1, 1, 3)], [ints(0, 0)[None]]
        ),
    ),
    "tiles of two dtypes": (
        r"tiles\[1\] differs",
        lambda: core.pack_groups(
            *(floats(2, 3), ints(0), ints(0, 1, 1), [ints(0), ints(1)], 1),
            [floats(1, 1, 3), floats(1, 1, 3).astype(np.float16)],
            [ints(0)[None], ints(0)[None]],
        ),
    ),
    "kept for some groups": (
        "there are 2 kept",
        lambda: core.pack_groups(
            floats(2, 3), [ints(0)] * 2, [ints(0, 1)] * 2, [ints(0)], 1, [], []
        ),
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments_are_named(name):
    message, call = BAD_CALLS[name]
    with pytest.raises(InvalidArgument, match=message):
        call()


def test_no_tokens_give_empty_results():
    order, offsets = core.bucket(np.zeros((0, 8), np.uint32), 4)
    assert order.shape == (0,) and offsets.tolist() == [0] * 5
    kept, kept_offsets, overflowed = core.capacity(order, offsets, ints(1, 1, 1, 1))
    assert kept.shape == overflowed.shape == (0,)
    tiles, slots = core.pack(floats(0, 3), kept, kept_offsets, ints(2, 3), 2, 8)
    assert not tiles.any() and tiles.shape == (2, 2, 3) and (slots == -1).all()
    out = floats(0, 3)
    core.combine(floats(0, 3), ints(), floats(0, 8), out)
