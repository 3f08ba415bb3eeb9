"""The expert kernels against float64, in every weight format and activation type."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_moe import InvalidArgument, core

E, K, FF, D = 5, 384, 96, 160

# name: mode, bits, group
QUANTISED = {
    **{f"q{b}g{g}": ("affine", b, g) for b in (2, 3, 4, 5, 6, 8) for g in (32, 64)},
    "q4g128": ("affine", 4, 128),
    "mxfp4": ("mxfp4", 4, 32),
    "mxfp8": ("mxfp8", 8, 32),
    "nvfp4": ("nvfp4", 4, 16),
}
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# Relative Frobenius norm of the error of a whole expert (three products); bfloat16 tiles also
# round the values of quantised weights.
TOLERANCE = {"float32": 2e-6, "float16": 4.5e-3, "bfloat16": 4.5e-3}
QUANTISED_TOLERANCE = {"float32": 2e-6, "float16": 5.5e-3, "bfloat16": 5.5e-3}


def tolerance(fmt, dtype):
    return (TOLERANCE if fmt in DTYPES else QUANTISED_TOLERANCE)[dtype]


def f64(array):
    return np.array(array.astype(mx.float32)).astype(np.float64)


def error(got, want):
    return np.linalg.norm(f64(got) - want) / np.linalg.norm(want)


def make(fmt, rows, cols, dtype=mx.float32, experts=E, ignored=()):
    """A stacked weight in a format, zero in columns `ignored`: a core.Matrix and float64 values."""
    w = mx.random.normal((experts, rows, cols)) / cols**0.5
    for column in ignored:
        w[..., column] = 0
    if fmt in DTYPES:
        w = w.astype(DTYPES[fmt])
        mx.eval(w)
        return core.Matrix(w), f64(w)
    mode, bits, group = QUANTISED[fmt]
    q, s, *b = mx.quantize(w.astype(dtype), group, bits, mode=mode)
    b = b[0] if b else None
    if mode == "affine":
        wide = mx.dequantize(q, s.astype(mx.float32), b.astype(mx.float32), group, bits)
    else:
        wide = mx.dequantize(q, s, None, group, bits, mode=mode, dtype=mx.float32)
    mx.eval(q, s, wide) if b is None else mx.eval(q, s, b, wide)
    return core.Matrix(q, s, b, mode=mode, bits=bits, group_size=group), f64(wide)


def parts(fmt, rows, cols, dtype, experts=E):
    """The arguments of core.Matrix for a stacked weight in a format."""
    w = mx.random.normal((experts, rows, cols)) / cols**0.5
    if fmt in DTYPES:
        given = {"weight": w.astype(DTYPES[fmt])}
    else:
        mode, bits, group = QUANTISED[fmt]
        arrays = mx.quantize(w.astype(dtype), group, bits, mode=mode)
        given = dict(zip(("weight", "scales", "biases"), arrays, strict=False))
        given |= {"mode": mode, "bits": bits, "group_size": group}
    mx.eval(*[a for a in given.values() if isinstance(a, mx.array)])
    return given


def route(tokens, k, experts=E):
    ids = np.stack([np.random.permutation(experts)[:k] for _ in range(tokens)])
    return mx.array(ids.astype(np.uint32))


def rows(tokens, cols, dtype):
    x = mx.random.normal((tokens, cols)).astype(dtype)
    mx.eval(x)
    return x


def zeros(shape, dtype):
    out = mx.zeros(shape, dtype)
    mx.eval(out)
    return out


def expert(x, ids, gate, up, down):
    x, ids = f64(x), np.array(ids)
    y = np.empty((*ids.shape, down.shape[1]))
    for t, j in np.ndindex(*ids.shape):
        e = ids[t, j]
        g = gate[e] @ x[t]
        y[t, j] = down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x[t]))
    return y


@pytest.fixture(autouse=True)
def seed():
    mx.random.seed(0)
    np.random.seed(0)


@pytest.fixture(params=core.isas())
def isa(request, monkeypatch):
    monkeypatch.setenv("MLX_MOE_ISA", request.param)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", [*DTYPES, *QUANTISED])
def test_swiglu(isa, fmt, dtype):
    dt = DTYPES[dtype]
    gate, gate64 = make(fmt, FF, K, dt)
    up, up64 = make(fmt, FF, K, dt)
    # 96 columns are no whole group of 64 or 128; the down projection takes groups of 32 then.
    down, down64 = make(fmt.replace("g64", "g32").replace("g128", "g32"), D, FF, dt)
    for tokens in (1, 2, 5, 40, 100):
        x, ids = rows(tokens, K, dt), route(tokens, 2)
        want = expert(x, ids, gate64, up64, down64)
        y = zeros((tokens, 2, D), dt)
        core.swiglu(x, ids, gate, up, down, y)
        assert error(y, want) < tolerance(fmt, dtype), tokens
        scores = mx.random.uniform(shape=(tokens, 2))
        mx.eval(scores)
        out = zeros((tokens, D), dt)
        core.swiglu_combine(x, ids, scores, gate, up, down, out)
        total = (want * f64(scores)[..., None]).sum(1)
        assert error(out, total) < tolerance(fmt, dtype), tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "q4g32", "q8g64", "mxfp4"])
def test_grouped_and_linear(isa, fmt, dtype):
    dt = DTYPES[dtype]
    w, w64 = make(fmt, 70, K, dt)
    bias = mx.random.normal((E, 70)).astype(dt)
    mx.eval(bias)
    for tokens in (1, 3, 33):
        ids = route(tokens, 3)
        for shape in ((tokens, K), (tokens, 3, K)):
            x = mx.random.normal(shape).astype(dt)
            mx.eval(x)
            y = zeros((tokens, 3, 70), dt)
            core.grouped(x, ids, w, y)
            wide = np.broadcast_to(f64(x).reshape(tokens, -1, K), (tokens, 3, K))
            want = np.einsum("tjnk,tjk->tjn", w64[np.array(ids)], wide)
            assert error(y, want) < tolerance(fmt, dtype)
    one, one64 = make(fmt, 70, K, dt, experts=1)
    x, y = rows(20, K, dt), zeros((20, 70), dt)
    core.linear(x, one, y)
    assert error(y, f64(x) @ one64[0].T) < tolerance(fmt, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_is_added(isa, dtype):
    dt = DTYPES[dtype]
    w = mx.zeros((E, 8, 32), dt)
    bias = mx.random.normal((E, 8)).astype(dt)
    mx.eval(w, bias)
    ids, y = route(6, 2), zeros((6, 2, 8), dt)
    core.grouped(rows(6, 32, dt), ids, core.Matrix(w, bias=bias), y)
    assert mx.array_equal(y, bias[ids])


@pytest.mark.parametrize("mode", ["nvfp4"])
def test_global_scale(isa, mode):
    w = mx.random.normal((E, 48, 64))
    top = mx.max(mx.abs(w), axis=(1, 2))
    parts = [mx.quantize(w[e], 16, 4, mode=mode, global_scale=top[e]) for e in range(E)]
    q, s = (mx.stack([p[i] for p in parts]) for i in (0, 1))
    wide = mx.stack(
        [
            mx.dequantize(q[e], s[e], None, 16, 4, mode, global_scale=top[e], dtype=mx.float32)
            for e in range(E)
        ]
    )
    x, ids, y = rows(9, 64, mx.float32), route(9, 2), zeros((9, 2, 48), mx.float32)
    mx.eval(q, s, top, wide)
    core.grouped(x, ids, core.Matrix(q, s, mode=mode, global_scale=top), y)
    want = np.einsum("tjnk,tk->tjn", f64(wide)[np.array(ids)], f64(x))
    assert error(y, want) < 2e-6


@pytest.mark.parametrize("fmt", ["q4g64", "q6g32", "mxfp8", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 5, 90])
def test_packed_experts_give_the_same_bits(isa, fmt, dtype, tokens):
    dt = DTYPES[dtype]
    arrays = [parts(fmt, *shape, dt) for shape in ((192, K), (192, K), (D + 3, 192))]
    plain = [core.Matrix(**a) for a in arrays]
    copies = [core.Packed(m, [3, 0, 3]) for m in plain]
    packed = [core.Matrix(**a, packed=c) for a, c in zip(arrays, copies, strict=True)]
    other = [core.Matrix(**parts(fmt, 192, K, dt), packed=copies[0]), *plain[1:]]
    x, ids = rows(tokens, K, dt), route(tokens, 2)
    results = [zeros((tokens, 2, D + 3), dt) for _ in range(3)]
    for matrices, y in zip((plain, packed, other), results, strict=True):
        core.swiglu(x, ids, *matrices, y)
    assert np.array_equal(f64(results[0]), f64(results[1]))
    assert not np.array_equal(f64(results[0]), f64(results[2])), "copies of other arrays were used"
    tiles = 192 // 16 * (K // 32) * 1024
    assert copies[0].nbytes == (2 * tiles if isa == "amx" and fmt != "float32" else 0)


def test_copies_of_the_same_arrays_are_taken_over(isa):
    """What was packed before is not read again: it does not show a later change of the arrays."""
    arrays = {
        key: np.array(value) if isinstance(value, mx.array) else value
        for key, value in parts("q4g64", K, K, mx.float16).items()
    }
    matrix = core.Matrix(**arrays)
    first = core.Packed(matrix, [0, 2])
    arrays["scales"][:] = 0
    arrays["biases"][:] = 0
    copies = core.Packed(matrix, [0, 1], first)
    assert copies.nbytes == first.nbytes
    del first
    x, y = rows(90, K, mx.float16), zeros((90, 3, K), mx.float16)
    ids = mx.array(np.tile(np.arange(3, dtype=np.uint32), (90, 1)))
    core.grouped(x, ids, core.Matrix(**arrays, packed=copies), y)
    shown = f64(y).any(axis=(0, 2)).tolist()
    assert shown == [isa == "amx", False, False], "of those given up, and of new ones, none"
    anew = core.Packed(core.Matrix(**(arrays | {"scales": arrays["scales"].copy()})), [0], copies)
    assert anew.nbytes == copies.nbytes / 2


def test_packed_expert_out_of_range():
    with pytest.raises(InvalidArgument, match="expert 5 of 5"):
        core.Packed(make("q4g64", FF, K)[0], [5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_expert_takes_everything(isa, dtype):
    dt = DTYPES[dtype]
    mats = [
        make("q4g64", FF * 2, K, dt),
        make("q4g64", FF * 2, K, dt),
        make("q4g64", D, FF * 2, dt),
    ]
    x, ids = rows(300, K, dt), mx.full((300, 1), 3, dtype=mx.uint32)
    y = zeros((300, 1, D), dt)
    mx.eval(ids)
    core.swiglu(x, ids, *(m for m, _ in mats), y)
    assert error(y, expert(x, ids, *(w for _, w in mats))) < tolerance("q4g64", dtype)


@pytest.mark.parametrize("finer", [0, 1, 2])
def test_no_weight_is_rounded_below_its_own_precision(isa, finer):
    """8-bit experts with one dense float16 projection keep that one's float16."""
    formats = ["q8g32"] * 3
    formats[finer] = "float16"
    shapes = ((FF, K), (FF, K), (D, FF))
    mats = [make(f, *s, mx.float16) for f, s in zip(formats, shapes, strict=True)]
    x, ids, y = rows(40, K, mx.float16), route(40, 2), zeros((40, 2, D), mx.float32)
    core.swiglu(x, ids, *(m for m, _ in mats), y)
    assert error(y, expert(x, ids, *(w for _, w in mats))) < 1e-6


@pytest.mark.parametrize("dense", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_dense_beside_quantised(isa, dense, tokens):
    formats = ["q8g32"] * 3
    formats[dense] = "bfloat16"
    shapes = ((FF, K), (FF, K), (D, FF))
    mats = [make(f, *s, mx.bfloat16) for f, s in zip(formats, shapes, strict=True)]
    x, ids, y = rows(tokens, K, mx.bfloat16), route(tokens, 2), zeros((tokens, 2, D), mx.bfloat16)
    core.swiglu(x, ids, *(m for m, _ in mats), y)
    want = expert(x, ids, *(w for _, w in mats))
    assert error(y, want) < tolerance("q8g32", "bfloat16")


def test_a_matrix_keeps_what_it_read(isa):
    w = mx.random.normal((8, 32))
    x = mx.random.normal((3, 32))
    mx.eval(w, x)
    matrix, want = core.Matrix(w), f64(x) @ f64(w).T
    w[0] = mx.zeros((32,))
    y = zeros((3, 8), mx.float32)
    mx.eval(w)
    core.linear(x, matrix, y)
    assert error(y, want) < 2e-6


@pytest.mark.parametrize(
    "make_it",
    [
        lambda: core.Matrix(np.ones((1, 1), "f"), bias=np.array(1, "f")),
        lambda: core.Matrix(np.zeros(65, "u1")[1:].view("f").reshape(4, 4)),
        lambda: core.empty([2**40, 2**40], "float32"),
    ],
    ids=["a bias without dimensions", "unaligned", "too large"],
)
def test_odd_arrays(make_it):
    with pytest.raises(InvalidArgument):
        make_it()


def test_no_tokens(isa):
    gate, _ = make("q4g64", 64, 64)
    out = np.zeros((0, 64), np.float32)
    core.swiglu_combine(
        np.zeros((0, 64), np.float32),
        np.zeros((0, 2), np.uint32),
        np.zeros((0, 2), np.float32),
        gate,
        gate,
        gate,
        out,
    )


@pytest.mark.parametrize("fmt", ["q4g32", "q4g64", "q4g128", "mxfp4", "q8g64", "nvfp4"])
@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("outlier, weighted", [(1e3, True), (1e3, False), (1e-30, True)], ids=str)
def test_activations_of_uneven_size(isa, fmt, tokens, outlier, weighted):
    """A column far larger or smaller than the rest, also one that the weights ignore."""
    matrix, w = make(fmt, D, K, mx.bfloat16, 1, () if weighted else (37,))
    x = mx.random.normal((tokens, K))
    x[:, 37] = outlier
    x = x.astype(mx.bfloat16)
    y = zeros((tokens, D), mx.float32)
    mx.eval(x)
    core.linear(x, matrix, y)
    assert error(y, f64(x) @ w[0].T) < 4.5e-3


def test_very_small_activations(isa):
    matrix, w = make("q4g64", D, K, mx.bfloat16, experts=1)
    x = (mx.random.normal((3, K)) * mx.array([[1e-30], [1e-36], [0.0]])).astype(mx.bfloat16)
    y = zeros((3, D), mx.float32)
    mx.eval(x)
    core.linear(x, matrix, y)
    want = f64(x) @ w[0].T
    assert error(y[:1], want[:1]) < 4.5e-3
    assert np.abs(f64(y[1:]) - want[1:]).max() < 1e-33


def test_nan_stays_in_its_row(isa):
    gate, _ = make("q4g64", 64, 64, mx.bfloat16)
    x = np.ones((20, 64), np.float32)
    x[7, 3] = np.nan
    xs, ids = mx.array(x).astype(mx.bfloat16), mx.zeros((20, 1), mx.uint32)
    y = zeros((20, 1, 64), mx.bfloat16)
    mx.eval(xs, ids)
    core.swiglu(xs, ids, gate, gate, gate, y)
    bad = np.isnan(f64(y)).any(axis=(1, 2))
    assert bad.tolist() == [t == 7 for t in range(20)]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ids": np.full((4, 2), 5, np.uint32)}, "5"),
        ({"ids": np.full((4, 2), -1, np.int32)}, "-1"),
        ({"ids": np.zeros((4, 2), np.int64)}, "uint32 or int32"),
        ({"ids": np.zeros((3, 2), np.uint32)}, "3"),
        ({"x": np.zeros((4, 63), np.float32)}, "63 columns"),
        ({"x": np.zeros((4, 64), np.float64)}, "float32, float16 or bfloat16"),
        ({"x": np.zeros((4, 128), np.float32)[:, ::2]}, "row-contiguous"),
        ({"out": np.zeros((4, 2, 63), np.float32)}, "out has"),
    ],
)
def test_bad_arguments(change, message):
    gate, _ = make("q4g64", 64, 64)
    arguments = {
        "x": np.zeros((4, 64), np.float32),
        "ids": np.zeros((4, 2), np.uint32),
        "out": np.zeros((4, 2, 64), np.float32),
        **change,
    }
    with pytest.raises(InvalidArgument, match=message):
        core.swiglu(arguments["x"], arguments["ids"], gate, gate, gate, arguments["out"])


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"bits": 3}, "not 3 bits"),
        ({"bits": 7}, "not 7 bits"),
        ({"group_size": 32}, "groups of 32"),
        ({"mode": "mxfp4"}, "must be uint8"),
        ({"mode": "q4_0"}, "unknown quantisation mode"),
        ({"biases": None}, "biases go with mode affine"),
        ({"scales": np.zeros((2, 8, 2), np.float64)}, "scales"),
        ({"bias": np.zeros((2, 9), np.float32)}, "bias must be"),
        ({"global_scale": np.zeros(2, np.float32)}, "nvfp4"),
    ],
)
def test_bad_matrix(kwargs, message):
    arguments = {
        "scales": np.ones((2, 8, 2), np.float32),
        "biases": np.ones((2, 8, 2), np.float32),
        "bits": 4,
        "group_size": 64,
        **kwargs,
    }
    with pytest.raises(InvalidArgument, match=message):
        core.Matrix(np.zeros((2, 8, 16), np.uint32), **arguments)


def test_forced_isa(monkeypatch):
    monkeypatch.setenv("MLX_MOE_ISA", "avx1024")
    with pytest.raises(InvalidArgument, match="avx1024.*usable"):
        core.isa()
