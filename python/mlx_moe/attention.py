"""The attention product on the kernels, inside models whose dense layers are replaced."""

import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from . import core
from .custom import CannotEvaluate, eager, evaluate, filled
from .stats import DETAILS, Counters
from .weights import FLOATS, promote, subclass

# Below this many multiplications stock code is done before we have started (measured).
SMALLEST = 1 << 17
# Query rows times keys whose scores exist at one time: 64 MiB in float32.
BLOCK = 1 << 24
# Causal products are cut at least so often, each part without the keys that it cannot see.
CAUSAL_PARTS = 4

_running = threading.local()
_stock: Any = None  # MLX's function, once `product` stands in its place


NAME = "(attention product)"  # in tables and stats: no module has it


@dataclass
class AttentionLayer:
    """What replacement knows of a model's attention, kept on the model as `_moe_attention`."""

    name: str
    counters: Counters


def model_class(base: type) -> type:
    """The subclass of a model's class whose attention products run here during a call.

    MLX offers no other place to step in: `mx.fast.scaled_dot_product_attention` is wrapped
    once for the process and goes to the original unless such a model is running on the thread.
    """
    global _stock
    if _stock is None:
        _stock, mx.fast.scaled_dot_product_attention = mx.fast.scaled_dot_product_attention, product
    return _stepping_in(base)


@cache
def _stepping_in(base: type) -> type:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer = getattr(_running, "layer", None)
        _running.layer = None if self.training else self._moe_attention
        try:
            return base.__call__(self, *args, **kwargs)
        finally:
            _running.layer = outer

    return subclass(base, __call__=__call__)


def product(q: mx.array, k: mx.array, v: mx.array, **kwargs: Any) -> mx.array:
    """`mx.fast.scaled_dot_product_attention`, on the kernels while a replaced model runs.

    Shapes: q [B, N, L, D], k [B, M, S, D], v [B, M, S, V], N a multiple of M; result
    [B, N, L, V]. Scores, softmax and sums in float32, as stock's.
    """
    layer = getattr(_running, "layer", None)
    if layer is None:
        return _stock(q, k, v, **kwargs)
    layer.counters.called(q.shape[0] * q.shape[-2])
    if q.size * k.shape[-2] < SMALLEST:
        layer.counters.left_small()
        return _stock(q, k, v, **kwargs)
    call = Product(kwargs)
    if reason := call.stock_reason(q, k, v):
        layer.counters.fell_back(reason, DETAILS[reason])
        return _stock(q, k, v, **kwargs)
    try:
        result = eager(call.compute, call.stock, [q, k, v, *call.arrays.values()])
    except CannotEvaluate:
        layer.counters.fell_back("tracing", DETAILS["tracing"])
        return _stock(q, k, v, **kwargs)
    layer.counters.ran(call.kernels)
    return result


class Product:
    """One product: the options of the call, and its arrays for `eager`."""

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self.arrays = {
            name: value
            for name in ("mask", "sinks")
            if isinstance(value := options.get(name), mx.array)
        }
        self.kernels = 0

    def stock_reason(self, q: mx.array, k: mx.array, v: mx.array) -> str | None:
        if any(a.dtype not in FLOATS for a in (q, k, v)):
            return "dtype"
        known = self.options.keys() <= {"scale", "mask", "sinks", "stream", "force_fused"}
        return None if known and self._usual(q, k, v) else "arguments"

    def _usual(self, q: mx.array, k: mx.array, v: mx.array) -> bool:
        """Whether we compute this; what is wrong or rare is stock's to refuse or to do."""
        if not q.ndim == k.ndim == v.ndim == 4 or 0 in v.shape:
            return False
        mask, scale = self.options.get("mask"), self.options.get("scale")
        fits = q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and k.shape[:3] == v.shape[:3]
        if not fits or q.shape[1] % k.shape[1] or not isinstance(scale, float) or scale <= 0:
            return False
        if mask == "causal" if isinstance(mask, str) else mask is None:
            return mask is None or q.shape[2] <= k.shape[2]
        # Stock refuses a mask that would widen the result.
        narrow = (mx.bool_, promote(q.dtype, k.dtype, v.dtype))
        return isinstance(mask, mx.array) and mask.ndim <= 4 and mask.dtype in narrow

    def stock(self, q: mx.array, k: mx.array, v: mx.array, *arrays: mx.array) -> mx.array:
        return _stock(q, k, v, **{**self.options, **dict(zip(self.arrays, arrays, strict=True))})

    def compute(self, q: mx.array, k: mx.array, v: mx.array, *arrays: mx.array) -> mx.array:
        given = dict(zip(self.arrays, arrays, strict=True))
        queries, keys = q.shape[2], k.shape[2]
        causal = self.options.get("mask") == "causal" if "mask" not in given else False
        rows = max(1, BLOCK // (q.shape[0] * q.shape[1] * keys))
        if causal:
            rows = min(rows, -(-queries // CAUSAL_PARTS))
        parts = []
        for begin in range(0, queries, rows):
            end = min(begin + rows, queries)
            seen = keys - queries + end if causal else keys
            mask = given.get("mask")
            if mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
                mask = mask[..., begin:end, :]
            part = q[:, :, begin:end], k[:, :, :seen], v[:, :, :seen]
            parts.append(self._rows(*part, causal, mask, given.get("sinks")))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def _rows(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        causal: bool,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Some of the queries against the keys that they may see."""
        batch, heads, queries, _ = q.shape
        dtype = promote(q.dtype, k.dtype, v.dtype)
        shared = batch * k.shape[1]  # pairs of key and value heads: the "experts"
        ids = mx.array(np.arange(shared, dtype=np.uint32).repeat(heads // k.shape[1] * queries))
        ids = ids[:, None]
        scores = self._grouped(q.astype(dtype), ids, k, mx.float32, dtype)
        shape = (batch, heads, queries, k.shape[2])
        if mask is None and sinks is None:
            period = queries if causal else 0
            weights = filled(
                scores.shape, dtype, core.softmax, scores, self.options["scale"], period
            )
        else:
            if causal:
                mask = mx.tri(queries, shape[-1], shape[-1] - queries, dtype=mx.bool_)
            weights = self._softmax(scores.reshape(shape), mask, sinks).astype(dtype)
        out = self._grouped(weights, ids, v.swapaxes(-1, -2), dtype, dtype)
        return out.reshape(batch, heads, queries, -1)

    def _softmax(self, scores: mx.array, mask: mx.array | None, sinks: mx.array | None) -> mx.array:
        """Any mask, and sinks: logits that take weight and give nothing."""
        scores = scores * self.options["scale"]
        if mask is not None and mask.dtype == mx.bool_:
            # As stock: a row that sees nothing (padding) gets the mean of the values, not NaN.
            scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
        elif mask is not None:
            scores = scores + mask
        if sinks is None:
            return mx.softmax(scores, axis=-1)
        column = mx.broadcast_to(sinks.reshape(1, -1, 1, 1), (*scores.shape[:3], 1))
        scores = mx.concatenate([scores, column.astype(mx.float32)], axis=-1)
        return mx.softmax(scores, axis=-1)[..., :-1]

    def _grouped(
        self, x: mx.array, ids: mx.array, stack: mx.array, out_dtype: mx.Dtype, dtype: mx.Dtype
    ) -> mx.array:
        """Rows [.., K] of x times the matrix [B, M, N, K] that each one's id chooses."""
        rows, columns = stack.shape[-2:]
        matrix = mx.contiguous(stack.reshape(-1, rows, columns).astype(dtype))
        x = mx.contiguous(x.reshape(-1, columns))
        evaluate(x, ids, matrix)
        shape = (x.shape[0], 1, rows)
        out = filled(shape, out_dtype, core.grouped, x, ids, core.Matrix(matrix))
        self.kernels += 1
        return out
