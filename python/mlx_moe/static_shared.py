"""A shared expert, which every token passes, as a static group of its own."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .custom import CannotEvaluate, begin, eager, evaluate, token_rows
from .layers import weight_arrays
from .static import Ints
from .static_path import StaticPath
from .stats import DETAILS, Counters
from .weights import FLOATS, PLAIN_KEYS, Linear, own_class, promote, shallow_copy, subclass

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
LINEARS = frozenset({nn.Linear, nn.QuantizedLinear})


@dataclass
class SharedLayer:
    """What replacement knows of a shared expert, kept on the module as `_moe_shared`."""

    name: str
    counters: Counters
    static: StaticPath
    top_k: int | None = field(default=1, compare=False)


@cache
def shared_class(base: type) -> type:
    """The subclass of `base` (made once) whose instances run through `forward`."""

    def __call__(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            self._moe_shared.counters.fell_back("arguments", DETAILS["arguments"])
            return base.__call__(self, x, *args, **kwargs)
        return forward(self, self._moe_shared, x)

    return subclass(base, __call__=__call__)


def forward(module: Any, layer: SharedLayer, x: mx.array) -> mx.array:
    """The expert's output [..., D] for x [..., K], as stock's."""
    base = type(module)._moe_base
    tokens = x.size // x.shape[-1] if x.size else 0
    layer.counters.called(tokens)
    reason = _stock_reason(module, x)
    if reason:
        layer.counters.fell_back(reason, DETAILS[reason])
    if reason or not layer.static.takes(tokens):
        return base.__call__(module, x)

    linears = [Linear(module[name], f"{layer.name}.{name}") for name in PROJECTIONS]
    arrays = [a for linear in linears for a in linear.arrays]

    def compute(x: mx.array, *given: mx.array) -> mx.array:
        rows = token_rows(x, x.shape[-1])
        weights = [*given, *weight_arrays(linears)[len(arrays) :]]
        evaluate(rows, *weights)
        if not layer.static.current(weights):
            y = base.__call__(module, x)
            evaluate(y)
            return y

        def cold(assignments: Ints) -> mx.array:
            y = base.__call__(module, rows[mx.array(assignments)])
            begin(y)
            return y

        ids = mx.zeros((tokens, 1), mx.uint32)
        evaluate(ids)
        width = linears[-1].rows
        dtype = promote(x.dtype, *[a.dtype for a in arrays])
        y = layer.static.run(rows, ids, None, cold, width, dtype)
        return y.reshape(*x.shape[:-1], width)

    def stock(x: mx.array, *given: mx.array) -> mx.array:
        twin, at = shallow_copy(module, base), 0
        for name, linear in zip(PROJECTIONS, linears, strict=True):
            twin[name] = linear.twin(given[at : at + len(linear.arrays)])
            at += len(linear.arrays)
        return base.__call__(twin, x)

    try:
        return eager(compute, stock, [x, *arrays])
    except CannotEvaluate:
        layer.counters.fell_back("tracing", DETAILS["tracing"])
        return base.__call__(module, x)


def _stock_reason(module: Any, x: mx.array) -> str | None:
    if module.training:
        return "training"
    for name in PROJECTIONS:
        child = module[name]
        if own_class(child) not in LINEARS or not child.keys() <= PLAIN_KEYS:
            return "adapter"
    if x.dtype not in FLOATS:
        return "dtype"
    return "shape" if x.ndim < 2 else None
