"""Random and broken arguments to every function of the core: right values or a clear error."""

import mlx.core as mx
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mlx_moe import InvalidArgument, core

fuzz = settings(
    max_examples=250,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
REFUSED = object()

anything_but_arrays = st.one_of(
    st.none(), st.integers(-3, 3), st.floats(), st.text(max_size=3), st.just([1, 2]), st.just({})
)
junk_dtypes = st.sampled_from(
    ["u4", "i4", "f4", "f2", "f8", "i8", "u2", "u1", "i1", "?", "c8", ">u4", ">f4", "U2", "M8[s]"]
)


@st.composite
def junk_arrays(draw):
    """Any dtype, any shape of up to four dimensions, any layout, numpy or MLX."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    if draw(st.booleans()):
        array = np.zeros(shape, draw(junk_dtypes))
    else:
        dtype = draw(st.sampled_from(["u4", "i4", "f4", "f2"]))
        array = draw(hnp.arrays(dtype, shape))
    layout = draw(st.sampled_from(["plain", "transposed", "strided", "reversed", "frozen", "odd"]))
    if layout == "transposed":
        array = array.T
    elif layout == "strided":
        array = np.repeat(array[..., None], 2, -1)[..., 0]
    elif layout == "reversed" and array.ndim:
        array = array[::-1]
    elif layout == "frozen":
        array.flags.writeable = False
    elif layout == "odd" and array.dtype.kind in "uif":
        odd = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype)
        array = odd.reshape(array.shape)
    if draw(st.booleans()) and array.dtype.str in ("<u4", "<i4", "<f4", "<f2", "|u1"):
        array = mx.array(array.copy()).T if layout == "transposed" else mx.array(array.copy())
        mx.eval(array)
    return array


junk = st.one_of(junk_arrays(), junk_arrays(), anything_but_arrays)


@st.composite
def spoiled(draw, arguments):
    """Mostly one argument replaced, or one value inside an array changed; sometimes none."""
    arguments = dict(arguments)
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(sorted(arguments)))
        value = arguments[name]
        if isinstance(value, np.ndarray) and value.size and draw(st.booleans()):
            value = value.copy()
            extreme = [-(2**31), -1, 0, 1, 7, 2**31 - 1]
            if value.dtype.kind == "f":
                extreme = [np.nan, np.inf, -np.inf, 0.0, -0.0, 6e4]
            at = draw(st.integers(0, value.size - 1))
            changed = np.array(draw(st.sampled_from(extreme))).astype(value.dtype)
            value.reshape(-1)[at] = changed
            arguments[name] = value
        elif isinstance(value, int) and draw(st.booleans()):
            arguments[name] = draw(st.sampled_from([-(2**70), -1, 0, 1, 2, 2**31, 2**70]))
        else:
            arguments[name] = draw(junk)
    return arguments


def attempt(function, **arguments):
    try:
        return function(**arguments)
    except (InvalidArgument, TypeError):
        return REFUSED


@st.composite
def routings(draw):
    """ids [T, k] of E experts."""
    tokens, top_k, experts = (draw(st.integers(0, 12)), draw(st.integers(1, 4)), 5)
    dtype = draw(st.sampled_from([np.uint32, np.int32]))
    return draw(hnp.arrays(dtype, (tokens, top_k), elements=st.integers(0, experts - 1))), experts


def flat(array):
    return np.array(array).reshape(-1)


@fuzz
@given(st.data())
def test_bucket(data):
    ids, experts = data.draw(routings())
    arguments = data.draw(spoiled({"ids": ids, "num_experts": experts}))
    result = attempt(core.bucket, **arguments)
    if result is REFUSED:
        assert arguments["ids"] is not ids or arguments["num_experts"] is not experts
        return
    ids = flat(arguments["ids"]).astype(np.int64)
    order, offsets = result
    np.testing.assert_array_equal(order, np.argsort(ids, kind="stable"))
    counts = np.bincount(ids, minlength=arguments["num_experts"])
    np.testing.assert_array_equal(np.diff(offsets), counts)


@fuzz
@given(st.data())
def test_capacity(data):
    ids, experts = data.draw(routings())
    order, offsets = core.bucket(ids, experts)
    limits = data.draw(hnp.arrays(np.int32, experts, elements=st.integers(0, 9)))
    importance = data.draw(hnp.arrays(np.float32, ids.size, elements=st.integers(-2, 2)))
    good = {"order": order, "offsets": offsets, "capacities": limits, "importance": importance}
    good["overflow"] = data.draw(st.sampled_from(["spill", "prune"]))
    arguments = data.draw(spoiled(good))
    result = attempt(core.capacity, **arguments)
    if result is REFUSED:
        assert any(arguments[name] is not good[name] for name in good)
        return
    order, offsets, limits = (
        flat(arguments[name]).astype(int) for name in ("order", "offsets", "capacities")
    )
    kept, overflowed = [], []
    for e, limit in enumerate(limits):
        bucket = range(offsets[e], offsets[e + 1])  # positions: a spoiled order may repeat
        ranked = list(bucket)
        if arguments["overflow"] == "prune":
            weight = flat(arguments["importance"])
            ranked.sort(key=(-weight[order]).__getitem__)
        best = set(ranked[:limit])
        kept += [order[i] for i in bucket if i in best]
        overflowed += [order[i] for i in bucket if i not in best]
    assert result[0].tolist() == kept
    assert result[2].tolist() == overflowed
    np.testing.assert_array_equal(np.diff(result[1]), np.minimum(np.diff(offsets), limits))


@fuzz
@given(st.data())
def test_pack(data):
    ids, experts = data.draw(routings())
    kept, kept_offsets = core.bucket(ids, experts)
    tokens, top_k = ids.shape
    group = np.array(data.draw(st.permutations(range(experts)))[:3], np.int32)
    good = {
        "x": np.random.default_rng(0).standard_normal((tokens, 4)).astype(np.float32),
        "kept": kept,
        "kept_offsets": kept_offsets,
        "experts": group,
        "capacity": int(np.diff(kept_offsets).max()),
        "k": top_k,
        "dtype": data.draw(st.sampled_from(["float32", "float16"])),
    }
    arguments = data.draw(spoiled(good))
    result = attempt(core.pack, **arguments)
    if result is REFUSED:
        assert any(arguments[name] is not good[name] for name in good)
        return
    tiles, slots = result
    x, kept, offsets = (np.array(arguments[name]) for name in ("x", "kept", "kept_offsets"))
    for g, expert in enumerate(flat(arguments["experts"])):
        bucket = kept[offsets[expert] : offsets[expert + 1]]
        assert slots[g].tolist() == bucket.tolist() + [-1] * (len(slots[g]) - len(bucket))
        with np.errstate(over="ignore"):
            rows = x[bucket // arguments["k"]].astype(arguments["dtype"])
        np.testing.assert_array_equal(tiles[g, : len(bucket)], rows)
        assert not tiles[g, len(bucket) :].any()


@fuzz
@given(st.data())
def test_pack_groups(data):
    ids, experts = data.draw(routings())
    kept, kept_offsets = core.bucket(ids, experts)
    tokens, top_k = ids.shape
    order = data.draw(st.permutations(range(experts)))
    groups = [np.array(order[:2], np.int32), np.array(order[2:3], np.int32)]
    capacity = int(np.diff(kept_offsets).max())
    good = {
        "x": np.random.default_rng(0).standard_normal((tokens, 4)).astype(np.float32),
        "kept": kept,
        "kept_offsets": data.draw(st.sampled_from([kept_offsets, [kept_offsets] * 2])),
        "experts": groups,
        "k": top_k,
        "tiles": [np.full((len(g), capacity + 1, 4), 7, np.float16) for g in groups],
        "slots": [np.full((len(g), capacity + 1), 7, np.int32) for g in groups],
    }
    if isinstance(good["kept_offsets"], list):
        good["kept"] = [kept, kept]
    mine = [*good["tiles"], *good["slots"]]
    arguments = data.draw(spoiled(good))
    result = attempt(core.pack_groups, **arguments)
    if result is REFUSED:
        assert any(arguments[name] is not good[name] for name in good)
        assert all((array == 7).all() for array in mine)
    elif all(arguments[name] is good[name] for name in ("experts", "tiles", "slots")):
        names = ("kept", "kept_offsets")
        each = [v if isinstance(v := arguments[n], list) else [v] * 2 for n in names]
        for g, group in enumerate(groups):
            bucket, offsets = (np.array(parts[g]) for parts in each)
            one = (arguments["x"], bucket, offsets, group, capacity + 1, arguments["k"])
            tiles, slots = core.pack(*one)
            np.testing.assert_array_equal(good["tiles"][g], tiles)
            np.testing.assert_array_equal(good["slots"][g], slots)


@fuzz
@given(st.data())
def test_combine_of_parts(data):
    tokens, top_k = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 3))
    chosen = np.array(data.draw(st.permutations(range(tokens * top_k))), np.int32)
    cut = data.draw(st.integers(0, len(chosen)))
    values = np.random.default_rng(0).standard_normal((len(chosen), 5)).astype(np.float32)
    good = {
        "rows": [values[:cut], values[cut:].astype(np.float16)],
        "assignments": [chosen[:cut], chosen[cut:]],
        "scores": np.random.default_rng(1).random((tokens, top_k), dtype=np.float32),
        "out": np.ones((tokens, 5), np.float16),
        "accumulate": data.draw(st.booleans()),
    }
    arguments = data.draw(spoiled(good))
    result = attempt(core.combine, **arguments)
    if result is REFUSED:
        assert any(arguments[name] is not good[name] for name in good)
        assert (good["out"] == 1).all()
    elif all(arguments[name] is good[name] for name in ("rows", "assignments", "out")):
        want = np.full((tokens, 5), float(arguments["accumulate"]))
        rows = np.concatenate([part.astype(float) for part in good["rows"]])
        with np.errstate(all="ignore"):
            weighted = flat(arguments["scores"]).astype(float)[chosen, None] * rows
            np.add.at(want, chosen // top_k, weighted)
            np.testing.assert_allclose(good["out"], want.astype(np.float16), rtol=2e-3, atol=2e-3)


@fuzz
@given(st.data())
def test_combine(data):
    tokens, top_k = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 3))
    chosen = data.draw(st.permutations(range(tokens * top_k)))[: data.draw(st.integers(0, 18))]
    random = np.random.default_rng(0)
    good = {
        "rows": random.standard_normal((len(chosen), 5)).astype(np.float32),
        "assignments": np.array(chosen, np.int32),
        "scores": random.random((tokens, top_k)).astype(np.float32),
        "out": np.ones((tokens, 5), np.float32),
        "accumulate": data.draw(st.booleans()),
    }
    arguments = data.draw(spoiled(good))
    before = np.array(arguments["out"]) if hasattr(arguments["out"], "shape") else None
    result = attempt(core.combine, **arguments)
    if result is REFUSED:
        assert any(arguments[name] is not good[name] for name in good)
        if before is not None:
            np.testing.assert_array_equal(np.array(arguments["out"]), before)
        return
    rows, scores = np.array(arguments["rows"]).astype(float), np.array(arguments["scores"])
    want = before.astype(float) if arguments["accumulate"] else np.zeros(before.shape)
    with np.errstate(all="ignore"):
        for row, a in zip(rows, flat(arguments["assignments"]), strict=True):
            if a >= 0:
                want[a // scores.shape[1]] += scores.reshape(-1)[a].astype(float) * row
        np.testing.assert_allclose(
            np.array(arguments["out"]), want.astype(np.float32), rtol=1e-4, atol=1e-4
        )


MODES = {
    "dense": {},
    **{
        f"q{bits}": {"mode": "affine", "bits": bits, "group_size": 32}
        for bits in (2, 3, 4, 5, 6, 8)
    },
    "mxfp4": {"mode": "mxfp4", "bits": 4, "group_size": 32},
    "mxfp8": {"mode": "mxfp8", "bits": 8, "group_size": 32},
    "nvfp4": {"mode": "nvfp4", "bits": 4, "group_size": 16},
}


def weight(mode, rows, cols, experts=3):
    """Arguments of core.Matrix and the values they stand for."""
    w = mx.random.normal((experts, rows, cols))
    options = MODES[mode]
    if not options:
        mx.eval(w)
        return {"weight": w}, np.array(w)
    names = ("weight", "scales", "biases")
    parts = dict(zip(names, mx.quantize(w, **options), strict=False))
    values = mx.dequantize(parts["weight"], parts["scales"], parts.get("biases"), **options)
    mx.eval(*parts.values(), values)
    return {**parts, **options}, np.array(values.astype(mx.float32))


def product(values, x, ids):
    """y [T, k, N] in float64."""
    wide = np.broadcast_to(x if x.ndim == 3 else x[:, None], (*ids.shape, x.shape[-1]))
    return np.einsum("tknd,tkd->tkn", values[ids], wide, dtype=float)


@fuzz
@given(st.data())
def test_matrix_and_grouped(data):
    rows, cols = data.draw(st.sampled_from([1, 7, 40])), data.draw(st.sampled_from([32, 96]))
    good, values = weight(data.draw(st.sampled_from(sorted(MODES))), rows, cols)
    arguments = data.draw(spoiled(good))
    matrix = attempt(core.Matrix, **arguments)
    ids = data.draw(routings())[0] % 3
    x = np.random.default_rng(0).standard_normal((len(ids), cols)).astype(np.float32)
    out = np.zeros((*ids.shape, rows), np.float32)
    if matrix is REFUSED:
        assert any(arguments[name] is not good[name] for name in good)
        return
    assert matrix.experts >= 1 and matrix.rows >= 1 and matrix.cols >= 1
    call = data.draw(spoiled({"x": x, "ids": ids, "out": out}))
    result = attempt(core.grouped, matrix=matrix, **call)
    if any(arguments[name] is not good[name] for name in good):
        return
    if result is REFUSED:
        assert any(call[name] is not mine for name, mine in (("x", x), ("ids", ids), ("out", out)))
    elif isinstance(call["out"], np.ndarray):
        want = product(values, np.array(call["x"]), np.array(call["ids"]))
        np.testing.assert_allclose(call["out"], want, rtol=1e-3, atol=1e-3)


@fuzz
@given(st.data())
def test_swiglu_linear_and_their_sum(data):
    mode = data.draw(st.sampled_from(["dense", "q4", "q6", "mxfp4"]))
    cols, hidden, width = 64, 32, 9
    (gate, g), (up, u), (down, d) = (
        weight(mode, *shape) for shape in ((hidden, cols), (hidden, cols), (width, hidden))
    )
    gate, up, down = (core.Matrix(**arguments) for arguments in (gate, up, down))
    ids = data.draw(routings())[0] % 3
    tokens, top_k = ids.shape
    random = np.random.default_rng(0)
    x = (random.standard_normal((tokens, cols)) / 8).astype(np.float32)
    scores = random.random((tokens, top_k)).astype(np.float32)
    activation = product(g, x, ids)
    h = activation / (1 + np.exp(-activation)) * product(u, x, ids)
    y = np.einsum("tknd,tkd->tkn", d[ids].astype(float), h)

    shared = {"x": x, "ids": ids, "gate": gate, "up": up, "down": down}
    calls = {
        "swiglu": (shared, (tokens, top_k, width), y),
        "swiglu_combine": (
            {**shared, "scores": scores},
            (tokens, width),
            (y * scores[..., None]).sum(1),
        ),
        "linear": (
            {"x": x, "matrix": core.Matrix(mx.array(g[0]).astype(mx.float32))},
            (tokens, hidden),
            x.astype(float) @ g[0].T.astype(float),
        ),
    }
    name = data.draw(st.sampled_from(sorted(calls)))
    inputs, shape, want = calls[name]
    good = {**inputs, "out": np.zeros(shape, np.float32)}
    arguments = data.draw(spoiled(good))
    result = attempt(getattr(core, name), **arguments)
    if all(arguments[key] is good[key] for key in good):
        assert result is not REFUSED
        np.testing.assert_allclose(good["out"], want, rtol=1e-3, atol=1e-3)
