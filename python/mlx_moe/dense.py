"""The same kernels for dense linear layers, where MLX computes on the CPU."""

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import attention, core
from .custom import CannotEvaluate, eager, evaluate, filled
from .errors import InvalidArgument, NoMoELayers
from .find import find_modules, named_modules
from .replace import resolve_backend, swap, unswap
from .replacement import ReplacedLayer, Replacement
from .stats import DETAILS, Counters
from .weights import FLOATS, PLAIN_KEYS, Linear, UnknownFormat, describe, own_class, subclass

# The forward that is taken over, by exact class: subclasses may compute something else.
FORWARDS = {
    nn.Linear: "__call__",
    nn.QuantizedLinear: "__call__",
    nn.Embedding: "as_linear",
    nn.QuantizedEmbedding: "as_linear",
}
# Below this many multiplications stock code is done before we have started, measured at one
# token; stock is an order slower on packed weights whose scales are not f32.
SMALLEST, SMALLEST_PACKED = 1 << 16, 1 << 13


@dataclass
class DenseLayer:
    """What replacement knows of one dense layer, kept on the module as `_moe_dense`.

    Attributes:
        model: the model's root, for its training flag: `nn.quantize` on a model in evaluation
            mode leaves its new layers in training mode.
    """

    name: str
    counters: Counters
    model: "weakref.ref[nn.Module]"

    def training(self, module: Any) -> bool:
        model = self.model()
        return module.training and (model is None or model.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DenseLayer":
        """The copy's model is the copied one, where that is being copied too."""
        model = self.model()
        root = self.model if model is None else weakref.ref(memo.get(id(model), model))
        return DenseLayer(self.name, copy.deepcopy(self.counters, memo), root)


def replace_linear_layers(model: nn.Module, *, backend: str = "auto") -> Replacement:
    """Run a model's dense layers and attention products on the kernels.

    These are `nn.Linear`, `nn.QuantizedLinear`, tied embeddings' `as_linear`, and every
    `mx.fast.scaled_dot_product_attention` during a call of `model`.

    Subclasses and adapters stay as they are (the layer inside an adapter is replaced). The
    rules are those of `replace_moe_layers`: same parameters and tree, exact `restore`, stock
    code in training mode and inside `mx.compile`, stock gradients.

    Args:
        model: any MLX module; changed in place.
        backend: "cpu", "stock", or "auto": "cpu" where MLX's default device is the CPU.

    Returns:
        The `Replacement`; `experts` and `top_k` of its layers are None, and its last row is
        "(attention product)", for all of the model's.

    Raises:
        InvalidArgument: unknown backend, or no model.
        NoMoELayers: the model has no such layer; nothing was changed.
    """
    target = resolve_backend(backend)
    logged: set[str] = set()
    found = find_modules(model, lambda m: own_class(m) in FORWARDS)
    root = weakref.ref(model)
    rows = []
    for name, module, parent in found:
        dtype, bits = describe(module)
        family = type(parent).__module__.rpartition(".")[2]
        layer = DenseLayer(name, Counters(name, logged), root) if target == "cpu" else None
        rows.append(
            (module, ReplacedLayer(name, "dense", family, None, dtype, bits, target, layer))
        )
    if not rows:
        raise NoMoELayers(
            f"{type(model).__module__}.{type(model).__name__} has no nn.Linear, "
            "nn.QuantizedLinear or embedding layer; nothing was replaced"
        )
    for module, row in rows:
        swap(module, row, dense_class, "_moe_dense")
    replaced = [row for _, row in rows]
    if own_class(model) not in FORWARDS:  # a lone linear layer has no attention
        replaced.append(_attention_row(model, target, logged))
        swap(model, replaced[-1], attention.model_class, "_moe_attention")
    return Replacement(replaced, model, restore_linear_layers)


def _attention_row(model: nn.Module, target: str, logged: set[str]) -> ReplacedLayer:
    name, family = attention.NAME, own_class(model).__module__.rpartition(".")[2]
    counters = Counters(name, logged)
    layer = attention.AttentionLayer(name, counters) if target == "cpu" else None
    return ReplacedLayer(name, "attention", family, None, "input's", None, target, layer)


def restore_linear_layers(model: nn.Module) -> None:
    """Undo `replace_linear_layers` on every layer of `model`; without any, do nothing."""
    for module in named_modules(model).values():
        unswap(module, "_moe_attention")
        unswap(module, "_moe_dense")


@cache
def dense_class(base: Any) -> Any:
    """The subclass of `base` (made once) whose matrix product runs through `forward`."""

    def method(self: Any, x: mx.array) -> mx.array:
        return forward(self, self._moe_dense, x)

    def to_quantized(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Stock's quantised layer, replaced like the one it takes the place of."""
        made = base.to_quantized(self, *args, **kwargs)
        if type(made) in FORWARDS:
            made.__dict__["_moe_dense"] = self._moe_dense
            made.__class__ = dense_class(made.__class__)
        return made

    body: dict[str, Any] = {FORWARDS[base]: method}
    if hasattr(base, "to_quantized"):
        body["to_quantized"] = to_quantized
    return subclass(base, **body)


def forward(module: Any, layer: DenseLayer, x: mx.array) -> mx.array:
    """`x` [..., K] times the module's weight [N, K], plus its bias: [..., N]."""
    base = type(module)._moe_base
    stock = getattr(base, FORWARDS[base])
    tokens = x.size // x.shape[-1] if x.size else 0
    layer.counters.called(tokens)
    if reason := _stock_reason(module, layer, x):
        layer.counters.fell_back(reason, DETAILS[reason])
        return stock(module, x)
    if _is_small(module, tokens * x.shape[-1]):
        layer.counters.left_small()
        return stock(module, x)
    linear = Linear(module, layer.name)

    def compute(x: mx.array, *arrays: mx.array) -> mx.array:
        result = _product(linear, x, arrays)
        layer.counters.ran(1)
        return result

    def differentiable(x: mx.array, *arrays: mx.array) -> mx.array:
        return stock(linear.twin(arrays), x)

    try:
        return eager(compute, differentiable, [x, *linear.arrays])
    except CannotEvaluate:
        layer.counters.fell_back("tracing", DETAILS["tracing"])
        return stock(module, x)
    except UnknownFormat as error:
        layer.counters.fell_back("format", str(error))
        try:
            return stock(module, x)
        except ValueError:
            raise InvalidArgument(str(error)) from None
    except InvalidArgument as error:
        raise InvalidArgument(f"{layer.name}: {error}") from error


def _stock_reason(module: Any, layer: DenseLayer, x: mx.array) -> str | None:
    if layer.training(module):
        return "training"
    if not module.keys() <= PLAIN_KEYS:
        return "adapter"
    if x.ndim < 2:
        return "shape"
    return None if x.dtype in FLOATS else "dtype"


def _product(linear: Linear, x: mx.array, arrays: Sequence[mx.array]) -> mx.array:
    """The kernel's result, with `arrays` for the layer's own."""
    dtype = linear.out_dtype(x.dtype)
    rows = x if x.dtype == dtype else x.astype(dtype)
    evaluate(rows, *arrays, *linear.fixed.values())
    shape, matrix = (*x.shape[:-1], linear.rows), linear.matrix(arrays)
    return filled(shape, dtype, core.linear, rows, matrix)


def _is_small(module: Any, values: int) -> bool:
    """Whether stock is faster for an input of so many values."""
    scales = module.get("scales")
    packed = scales is not None and scales.dtype != mx.float32
    return values * module["weight"].shape[0] < (SMALLEST_PACKED if packed else SMALLEST)
