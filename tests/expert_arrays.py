"""Weights of experts in every format with their float64 values, and what is computed from them."""

import mlx.core as mx
import numpy as np

from mlx_moe import core

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
