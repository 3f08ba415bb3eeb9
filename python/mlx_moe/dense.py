"""The same kernels for dense linear layers, where MLX computes on the CPU."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import core
from .custom import CannotEvaluate, eager, evaluate, token_rows
from .errors import InvalidArgument, NoMoELayers
from .replace import ReplacedLayer, Replacement, find_modules, resolve_backend, swap, unswap
from .stats import DETAILS, Counters
from .weights import FLOATS, PLAIN_KEYS, Linear, UnknownFormat, describe, own_class

# The forward that is taken over, by exact class: subclasses may compute something else.
FORWARDS = {
    nn.Linear: "__call__",
    nn.QuantizedLinear: "__call__",
    nn.Embedding: "as_linear",
    nn.QuantizedEmbedding: "as_linear",
}
# Below this many multiplications stock code is done before we have started (measured).
SMALLEST = 1 << 15


@dataclass
class DenseLayer:
    """What replacement knows of one dense layer, kept on the module as `_moe_dense`."""

    name: str
    counters: Counters


def replace_linear_layers(model: nn.Module, *, backend: str = "auto") -> Replacement:
    """Run `nn.Linear`, `nn.QuantizedLinear` and tied embeddings' `as_linear` on the kernels.

    Subclasses and adapters stay as they are (the layer inside an adapter is replaced). The
    rules are those of `replace_moe_layers`: same parameters and tree, exact `restore`, stock
    code in training mode and inside `mx.compile`, stock gradients.

    Args:
        model: any MLX module; changed in place.
        backend: "cpu", "stock", or "auto": "cpu" where MLX's default device is the CPU.

    Returns:
        The `Replacement`; `experts` and `top_k` of its layers are None.

    Raises:
        InvalidArgument: unknown backend.
        NoMoELayers: the model has no such layer; nothing was changed.
    """
    target = resolve_backend(backend)
    logged: set[str] = set()
    rows = []
    for name, module, parent in find_modules(model, lambda m: own_class(m) in FORWARDS):
        dtype, bits = describe(module)
        family = type(parent).__module__.rpartition(".")[2]
        layer = DenseLayer(name, Counters(name, logged)) if target == "cpu" else None
        rows.append((module, ReplacedLayer(name, family, None, dtype, bits, target, layer)))
    if not rows:
        raise NoMoELayers(
            f"{type(model).__module__}.{type(model).__name__} has no nn.Linear, "
            "nn.QuantizedLinear or embedding layer; nothing was replaced"
        )
    for module, row in rows:
        swap(module, row, dense_class, "_moe_dense")
    return Replacement([row for _, row in rows], model, restore_linear_layers)


def restore_linear_layers(model: nn.Module) -> None:
    """Undo `replace_linear_layers` on every layer of `model`; without any, do nothing."""
    for _, module in model.named_modules():
        unswap(module, "_moe_dense")


def dense_class(base: type) -> type:
    """The subclass of `base` (made once) whose matrix product runs through `forward`."""
    if base not in _classes:

        def method(self: Any, x: mx.array) -> mx.array:
            return forward(self, self._moe_dense, x)

        def to_quantized(self: Any, *args: Any, **kwargs: Any) -> Any:
            """Stock's quantised layer, replaced like the one it takes the place of."""
            made = base.to_quantized(self, *args, **kwargs)
            if type(made) in FORWARDS:
                made.__dict__["_moe_dense"] = self._moe_dense
                made.__class__ = dense_class(type(made))
            return made

        body = {FORWARDS[base]: method, "__module__": base.__module__, "_moe_base": base}
        if hasattr(base, "to_quantized"):
            body["to_quantized"] = to_quantized
        _classes[base] = type(base.__name__, (base,), body)
    return _classes[base]


_classes: dict[type, type] = {}


def forward(module: Any, layer: DenseLayer, x: mx.array) -> mx.array:
    """`x` [..., K] times the module's weight [N, K], plus its bias: [..., N]."""
    counters = layer.counters
    base = type(module)._moe_base
    weight = module["weight"]
    tokens = x.size // x.shape[-1] if x.size else 0
    counters.called(tokens)

    def fall_back(reason: str, detail: str = "") -> None:
        counters.fell_back(reason, detail or DETAILS[reason])

    def stock(x: mx.array, *arrays: mx.array) -> mx.array:
        twin = linear.twin(list(arrays))
        return getattr(base, FORWARDS[base])(twin, x)

    def compute(x: mx.array, *arrays: mx.array) -> mx.array:
        rows = token_rows(x, x.shape[-1]).astype(dtype)
        out = mx.zeros((tokens, linear.rows), dtype)
        evaluate(rows, out, *arrays, *linear.fixed.values())
        core.linear(rows, linear.matrix(list(arrays)), out)
        counters.ran(1)
        return out.reshape(*x.shape[:-1], linear.rows)

    reason = (
        "training"
        if module.training
        else "adapter"
        if not module.keys() <= PLAIN_KEYS
        else "dtype"
        if x.dtype not in FLOATS
        else None
    )
    if reason or tokens * weight.size < SMALLEST:
        if reason:
            fall_back(reason)
        return getattr(base, FORWARDS[base])(module, x)
    linear = Linear(module)
    dtype = linear.out_dtype(x.dtype)
    try:
        return eager(compute, stock, [x, *linear.arrays])
    except CannotEvaluate:
        fall_back("tracing")
    except UnknownFormat as error:
        fall_back("format", str(error))
    except InvalidArgument as error:
        raise InvalidArgument(f"{layer.name}: {error}") from error
    return getattr(base, FORWARDS[base])(module, x)
