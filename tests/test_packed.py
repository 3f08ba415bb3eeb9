"""Prepacked copies of experts: the same bits, and whose they are."""

import mlx.core as mx
import numpy as np
import pytest
from expert_arrays import DTYPES, FF, D, K, f64, make, parts, route, rows, zeros

from mlx_moe import InvalidArgument, core


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
