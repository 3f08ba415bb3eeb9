"""What the expert kernels refuse."""

import numpy as np
import pytest
from expert_arrays import make

from mlx_moe import InvalidArgument, core


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
