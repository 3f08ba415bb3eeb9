"""Eager C++ computation inside MLX's lazy, differentiable graphs."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from . import core
from .errors import NotContiguous

Function = Callable[..., mx.array]

SMALL = 1 << 16  # values; copying these costs less than evaluating an array (measured)
_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


class CannotEvaluate(Exception):
    """An input has no value yet: `mx.compile` or `mx.vmap` is tracing."""


def evaluate(*arrays: mx.array) -> None:
    """`mx.eval`, with an exception of its own while a transformation traces."""
    try:
        mx.eval(*arrays)
    except ValueError as error:
        raise CannotEvaluate from error


def begin(array: mx.array) -> None:
    """Have MLX compute `array`, without waiting for it except inside `mx.grad`."""
    try:
        mx.async_eval(array)
    except ValueError:  # which eval can do there and this cannot
        evaluate(array)


def eager(compute: Function, stock: Function, arrays: Sequence[mx.array]) -> mx.array:
    """`compute(*arrays)` now, with the derivatives of `stock(*arrays)`.

    `mx.eval` succeeds inside `mx.grad`, and what C++ then computes has no gradient of its
    own: so every array that a gradient can reach must be in `arrays`, not in a closure.
    `stock` is only called where derivatives are wanted.
    """

    def vjp(primals: Any, cotangent: mx.array, _: Any) -> tuple[mx.array, ...]:
        primals = [primals] if isinstance(primals, mx.array) else list(primals)
        return tuple(mx.vjp(stock, primals, [cotangent])[1])

    def jvp(primals: Any, tangents: Any) -> mx.array:
        primals = [primals] if isinstance(primals, mx.array) else list(primals)
        tangents = [tangents] if isinstance(tangents, mx.array) else list(tangents)
        pairs = zip(primals, tangents, strict=True)
        tangents = [mx.zeros_like(p) if t is None else t for p, t in pairs]
        return mx.jvp(stock, primals, tangents)[1][0]

    function: Any = mx.custom_function(compute)
    function.vjp(vjp)
    function.jvp(jvp)
    result: mx.array = function(*arrays)
    return result


def filled(
    shape: tuple[int, ...], dtype: mx.Dtype, run: Callable[..., None], *args: Any
) -> mx.array:
    """An evaluated array of the given shape that `run(*args, out)`, a core function, wrote.

    Arrays among `args` must be evaluated; those that are not contiguous are copied.
    """
    try:
        return _filled(shape, dtype, run, *args)
    except NotContiguous:
        args = tuple(mx.contiguous(a) if isinstance(a, mx.array) else a for a in args)
        evaluate(*[a for a in args if isinstance(a, mx.array)])
        return _filled(shape, dtype, run, *args)


def _filled(
    shape: tuple[int, ...], dtype: mx.Dtype, run: Callable[..., None], *args: Any
) -> mx.array:
    if math.prod(shape) <= SMALL:
        out = core.empty(shape, _NAMES[dtype])
        run(*args, out)
        return mx.array(out)
    large = mx.zeros(shape, dtype)
    mx.eval(large)
    run(*args, large)
    return large


def token_rows(x: mx.array, columns: int) -> mx.array:
    """`x` as contiguous [rows, columns], without a copy where it is so already."""
    return mx.contiguous(x.reshape(-1, columns))
