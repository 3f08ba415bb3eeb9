"""The expert kernels against float64, in every weight format and activation type."""

import mlx.core as mx
import numpy as np
import pytest
from expert_arrays import (
    DTYPES,
    FF,
    QUANTISED,
    D,
    E,
    K,
    error,
    expert,
    f64,
    make,
    route,
    rows,
    tolerance,
    zeros,
)

from mlx_moe import core


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
