"""A deferred result behaves as the array that stock returns."""

import operator

import mlx.core as mx
import numpy as np
import pytest
from switch_reference import TOP_K, WIDTH, block, calls_since, error, float64, glu, inputs

from mlx_moe import core, replace_moe_layers

TOKENS = 3
SCORES = mx.random.uniform(shape=(1, TOKENS, TOP_K, 1), key=mx.random.key(1))
OTHER = mx.random.uniform(shape=(1, TOKENS, TOP_K, WIDTH), key=mx.random.key(2)) + 0.5

# What a caller does with y; and the kernel that it should lead to.
USES = {
    "fused": (lambda y: (y * SCORES).sum(axis=-2), "swiglu_combine"),
    "fused by index": (lambda y: (y * SCORES).sum(2), "swiglu_combine"),
    "scores on the left": (lambda y: (SCORES * y).sum(axis=-2), "swiglu"),
    "other axis": (lambda y: (y * SCORES).sum(axis=-1), "swiglu"),
    "several axes": (lambda y: (y * SCORES).sum(axis=(-2, -1)), "swiglu"),
    "all axes": (lambda y: (y * SCORES).sum(), "swiglu"),
    "axis kept": (lambda y: (y * SCORES).sum(axis=-2, keepdims=True), "swiglu"),
    "sum without scores": (lambda y: y.sum(axis=-2), "swiglu"),
    "scores twice": (lambda y: (y * SCORES * SCORES).sum(axis=-2), "swiglu"),
    "number": (lambda y: y * 2.0, "swiglu"),
    "number on the left": (lambda y: 2.0 * y, "swiglu"),
    "array": (lambda y: y * OTHER, "swiglu"),
    "itself": (lambda y: y * y, "swiglu"),
    "weighted by itself": (lambda y: y * SCORES + y, "swiglu"),
    "add": (lambda y: y + OTHER, "swiglu"),
    "add from the left": (lambda y: OTHER + y, "swiglu"),
    "subtract": (lambda y: OTHER - y, "swiglu"),
    "divide": (lambda y: y / OTHER, "swiglu"),
    "divide by": (lambda y: 1.0 / y, "swiglu"),
    "negate": (operator.neg, "swiglu"),
    "power": (lambda y: y**2, "swiglu"),
    "matrix product": (lambda y: y @ mx.eye(WIDTH), "swiglu"),
    "compare": (lambda y: y > 0, "swiglu"),
    "index": (lambda y: y[:, 1:, 0], "swiglu"),
    "squeeze": (lambda y: y.squeeze(0), "swiglu"),
    "reshape": (lambda y: y.reshape(-1, WIDTH), "swiglu"),
    "transpose": (lambda y: y.swapaxes(1, 2), "swiglu"),
    "astype": (lambda y: y.astype(mx.float16), "swiglu"),
    "mean": (lambda y: y.mean(-2), "swiglu"),
    "iterate": (lambda y: next(iter(y)), "swiglu"),
    "numpy": (lambda y: mx.array(np.array(y)), "swiglu"),
    "array of it": (lambda y: mx.array(y), "swiglu"),
}


@pytest.mark.parametrize("use", USES)
def test_uses(use: str) -> None:
    function, kernel = USES[use]
    model = block(glu())
    x, ids, _ = inputs(TOKENS)
    expected = function(model.experts(x, ids))
    replace_moe_layers(model)
    before = core.calls()
    found = function(model.experts(x, ids))
    assert isinstance(found, mx.array)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert error(found, float64(expected)) < 1e-3
    assert calls_since(before) == {kernel: 1}


def test_facts_are_known_without_computing() -> None:
    model = block(glu())
    x, ids, _ = inputs(TOKENS)
    expected = model.experts(x, ids)
    replace_moe_layers(model)
    before = core.calls()
    y = model.experts(x, ids)
    for found in (y, y * SCORES):
        assert found.shape == expected.shape and found.dtype == expected.dtype
        assert found.ndim == expected.ndim and len(found) == len(expected)
    assert core.calls() == before


def test_one_result_used_twice_is_computed_once() -> None:
    model = block(glu())
    x, ids, _ = inputs(TOKENS)
    replace_moe_layers(model)
    before = core.calls()
    y = model.experts(x, ids)
    mx.eval(y + 1, y[0], y.max(), (y * SCORES).sum(axis=-2))
    assert calls_since(before) == {"swiglu": 1}
