"""The cold path in MLX's own operations: of layers whose weights the GPU computes with."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .custom import begin, evaluate, token_rows
from .static import Ints
from .static_path import StaticPath


def on_gpu() -> bool:
    """Whether MLX computes on the GPU, where our CPU kernels have no part in a forward."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def run(
    static: StaticPath,
    stock: Callable[..., mx.array],
    x: mx.array,
    ids: mx.array,
    scores: mx.array | None,
    weights: Sequence[mx.array],
    shape: tuple[int, ...],
    dtype: mx.Dtype,
) -> mx.array:
    """A forward whose cold and spilled assignments are computed by `stock` meanwhile.

    They are submitted before the static executor is waited for, so that both run at once. What
    comes back is read where it is: the memory of Apple's GPU is the CPU's too. If nothing is
    hot, the one call is stock's own, and so are the bits.

    Args:
        stock: the module's forward, of x [..., K] and ids=[..., k]; not evaluated.
        x, ids: [..., K] and uint32 or int32 [..., k].
        scores: [..., k, 1], or None where they do not reach us.
        weights: all that `stock` uses.
        shape, dtype: of the result, [..., k, D] or the weighted sum [..., D].
    """
    top_k, width = ids.shape[-1], shape[-1]
    rows, choices = token_rows(x, x.shape[-1]), token_rows(ids, top_k)
    factors = None if scores is None else token_rows(scores.astype(mx.float32), top_k)
    evaluate(rows, choices, *weights, *([] if factors is None else [factors]))

    def whole() -> mx.array:
        y = stock(x, ids=ids)
        return y if scores is None else (y * scores).sum(axis=-2)

    if not static.current(weights):
        return whole()
    flat = choices.reshape(-1)

    def cold(assignments: Ints) -> mx.array:
        chosen = mx.array(assignments)
        y = stock(rows[chosen // top_k], ids=flat[chosen][:, None])
        y = token_rows(y, width)
        begin(y)
        return y

    result: Any = static.run(rows, choices, factors, cold, width, dtype, whole)
    return result.reshape(shape)
