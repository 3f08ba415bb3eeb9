"""Arrays that export Metal buffers by default, as MLX's do on a Mac, in the core's functions."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_moe import _core
from mlx_moe.host_view import METAL, matrix_of_host_views, takes_host_views


class MetalArray:
    """An MLX array that must be asked for the CPU's address."""

    def __init__(self, array: mx.array):
        mx.eval(array)
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return METAL, 0

    def __dlpack__(self, dl_device: tuple[int, int] | None = None, **options):
        if dl_device != (1, 0):
            raise BufferError("a Metal buffer is of no use here")
        return self.array.__dlpack__(dl_device=dl_device, **options)


def test_the_core_alone_refuses_them() -> None:
    with pytest.raises(TypeError):
        _core.bucket(MetalArray(mx.zeros((2, 2), mx.uint32)), 4)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_functions_read_them_and_write_into_them(dtype: mx.Dtype) -> None:
    weight = mx.random.normal((3, 8, 64)).astype(dtype)
    bias = mx.random.normal((3, 8)).astype(dtype)
    x = mx.random.normal((4, 64)).astype(dtype)
    ids = mx.array([[0], [2], [1], [2]], dtype=mx.uint32)
    out = mx.zeros((4, 1, 8), dtype)
    matrix = matrix_of_host_views(_core.Matrix)(MetalArray(weight), bias=MetalArray(bias))
    assert isinstance(matrix, _core.Matrix) and matrix.experts == 3
    grouped = takes_host_views(_core.grouped)
    grouped(MetalArray(x), MetalArray(ids), matrix=matrix, out=MetalArray(out))
    chosen = ids[:, 0]
    want = (weight[chosen].astype(mx.float32) @ x[..., None].astype(mx.float32))[..., 0]
    assert mx.allclose(out[:, 0], want + bias[chosen], 1e-2, 5e-2 if dtype != mx.float32 else 1e-5)


def test_other_arguments_pass_through() -> None:
    order, offsets = takes_host_views(_core.bucket)(np.array([[1, 0]], np.uint32), num_experts=2)
    assert order.tolist() == [1, 0] and offsets.tolist() == [0, 1, 2]
