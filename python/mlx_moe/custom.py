"""Eager C++ computation inside MLX's lazy, differentiable graphs."""

from collections.abc import Callable, Sequence

import mlx.core as mx

Function = Callable[..., mx.array]


class CannotEvaluate(Exception):
    """An input has no value yet: `mx.compile` or `mx.vmap` is tracing."""


def evaluate(*arrays: mx.array) -> None:
    """`mx.eval`, with an exception of its own while a transformation traces."""
    try:
        mx.eval(*arrays)
    except ValueError as error:
        raise CannotEvaluate from error


def eager(compute: Function, stock: Function, arrays: Sequence[mx.array]) -> mx.array:
    """`compute(*arrays)` now, with the derivatives of `stock(*arrays)`.

    `mx.eval` succeeds inside `mx.grad`, and what C++ then computes has no gradient of its
    own: so every array that a gradient can reach must be in `arrays`, not in a closure.
    `stock` is only called where derivatives are wanted.
    """

    def vjp(primals, cotangent, _):
        primals = [primals] if isinstance(primals, mx.array) else list(primals)
        return tuple(mx.vjp(stock, primals, [cotangent])[1])

    def jvp(primals, tangents):
        primals = [primals] if isinstance(primals, mx.array) else list(primals)
        tangents = [tangents] if isinstance(tangents, mx.array) else list(tangents)
        return mx.jvp(stock, primals, tangents)[1][0]

    function = mx.custom_function(compute)
    function.vjp(vjp)
    function.jvp(jvp)
    return function(*arrays)


def token_rows(x: mx.array, columns: int) -> mx.array:
    """`x` as contiguous [rows, columns], without a copy where it is so already."""
    return mx.contiguous(x.reshape(-1, columns))
