"""Few tokens of an expert: 4-bit codes go by rows in some kernels, blocks take more."""

import mlx.core as mx
import numpy as np
import pytest
from expert_arrays import DTYPES, QUANTISED, f64, parts, rows, zeros

from mlx_moe import core

FORMATS = ["q4g32", "q4g64", "q4g128", "mxfp4"]
# Rows of weights, groups in one: no multiple of what a kernel takes at a time.
SHAPES = [(1, 1), (33, 3), (33, 16), (70, 17)]
# Both sides of what VNNI multiplies at a time (6) and by rows (16).
TOKENS = (1, 2, 3, 4, 6, 7, 13, 16, 17, 24)


def matrix(given):
    """A core.Matrix and its float64 values [experts, rows, cols]."""
    how = {key: given[key] for key in ("mode", "bits", "group_size")}
    scales, biases = given["scales"], given.get("biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    wide = mx.dequantize(given["weight"], scales, biases, **how, dtype=mx.float32)
    mx.eval(wide)
    arrays = [given["weight"], given["scales"], given.get("biases")]
    return core.Matrix(*arrays, **how), f64(wide)


def product(x, weight, height):
    """[tokens, height]: each call is one bucket."""
    y = zeros((len(x), height), mx.float32)
    core.linear(x, weight, y)
    return np.array(y)


@pytest.mark.parametrize("scales", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_token_is_the_same_whoever_shares_its_expert(isa, fmt, scales):
    """The same bits on VNNI but for a token alone; elsewhere the same within rounding."""
    for height, groups in SHAPES:
        cols = QUANTISED[fmt][2] * groups
        weight, wide = matrix(parts(fmt, height, cols, DTYPES[scales], 1))
        x = rows(max(TOKENS), cols, mx.bfloat16)
        pairs = np.concatenate([product(x[t : t + 2], weight, height) for t in range(0, len(x), 2)])
        for tokens in TOKENS:
            together = product(x[:tokens], weight, height)
            off = np.abs(together - f64(x[:tokens]) @ wide[0].T)
            assert (off < 1e-4 * np.abs(f64(x[:tokens])) @ np.abs(wide[0].T)).all()
            if isa == "vnni" and tokens > 1:
                assert np.array_equal(together, pairs[:tokens])


@pytest.mark.parametrize("tokens", [1, 2, 7])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_not_finite_stays_in_its_row_and_token(isa, fmt, bad, tokens):
    height, cols, row, token = 33, QUANTISED[fmt][2] * 3, 17, tokens // 2
    given = parts(fmt, height, cols, mx.bfloat16, 1)
    clean, _ = matrix(given)
    given["scales"][0, row, 1] = 255 if fmt == "mxfp4" else bad
    mx.eval(given["scales"])
    broken, _ = matrix(given)
    x = rows(tokens, cols, mx.bfloat16)
    want, got = product(x, clean, height), product(x, broken, height)
    assert not np.isfinite(got[:, row]).any()
    assert np.array_equal(np.delete(got, row, 1), np.delete(want, row, 1))
    x[token, 5] = bad
    mx.eval(x)
    got = product(x, clean, height)
    assert not np.isfinite(got[token]).any()
    assert np.array_equal(np.delete(got, token, 0), np.delete(want, token, 0))
