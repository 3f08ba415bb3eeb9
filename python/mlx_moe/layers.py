"""The forward of a replaced expert layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchLinear

from . import cold_ops, core
from .custom import CannotEvaluate, eager, evaluate, filled, token_rows
from .deferred import Deferred
from .errors import InvalidArgument
from .static import Ints
from .static_path import StaticPath
from .stats import DETAILS, Counters
from .weights import (
    FLOATS,
    PLAIN_KEYS,
    Linear,
    UnknownFormat,
    promote,
    quantisation,
    shallow_copy,
    subclass,
)

if TYPE_CHECKING:
    from .distributed_layer import RankedExperts

PROJECTIONS = {"glu": ("gate_proj", "up_proj", "down_proj"), "mlp": ("fc1", "fc2")}
LINEARS = frozenset({SwitchLinear, QuantizedSwitchLinear})
INDEX_DTYPES = frozenset({mx.uint32, mx.int32})
# Below so many multiplications stock code is done before we have started: of f32 weights, of
# quantised ones with f32 scales, and with others, where stock is an order slower (measured).
SMALLEST, SMALLEST_QUANTISED, SMALLEST_PACKED = 1 << 18, 1 << 17, 1 << 14


@dataclass
class Layer:
    """What replacement knows of one layer, kept on the module as `_moe_layer`.

    Attributes:
        kind: "glu" (gate, up, down) or "mlp" (fc1, fc2).
        deferred: the calling block is known to take a `Deferred`.
        linears: classes of linear children whose forward is the plain one.
        swiglus: classes of activation that compute silu(gate) * up.
        observer: is called once per forward, before it, with (module, layer, x [..., K], indices
            [..., k], scores [..., k, 1] or None where they do not reach us), not evaluated.
        static: runs forwards of many tokens on a static executor.
        packed: experts that a plan keeps in the kernels' own layout, too.
        follower: is told the ids of each forward, not evaluated, and may change static and packed.
        stored: where its experts are if they stay on disk (`stored_layer.Stored`).
        ranked: runs every forward, with experts that are shared over ranks.
    """

    name: str
    kind: str
    deferred: bool
    counters: Counters
    linears: frozenset[type] = LINEARS
    swiglus: frozenset[type] = frozenset({SwiGLU})
    top_k: int | None = field(default=None, compare=False)
    observer: "Observer | None" = field(default=None, compare=False)
    static: StaticPath | None = field(default=None, compare=False)
    packed: "PackedCopies | None" = field(default=None, compare=False)
    follower: Any = field(default=None, compare=False)
    stored: Any = field(default=None, compare=False)
    ranked: "RankedExperts | None" = field(default=None, compare=False)

    @property
    def in_ops(self) -> bool:
        """Whether what is not static is left to MLX's own operations."""
        return self.static is not None and self.static.ops


@dataclass(frozen=True)
class PackedCopies:
    """Copies of some experts in the kernels' own layout.

    Attributes:
        copies: one for each projection.
        tokens: from which they are used.
        experts: that are copied.
    """

    copies: tuple[core.Packed, ...]
    tokens: int
    experts: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model has other arrays, which these copies are not of."""


Observer = Callable[[Any, Layer, mx.array, mx.array, mx.array | None], None]


@cache
def replaced_class(base: type) -> type:
    """The subclass of `base` (made once) whose instances run through `forward`."""

    def __call__(self: Any, x: mx.array, indices: mx.array, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            self._moe_layer.counters.fell_back("arguments", DETAILS["arguments"])
            return base.__call__(self, x, indices, *args, **kwargs)
        return forward(self, self._moe_layer, x, indices)

    return subclass(base, __call__=__call__)


def forward(module: Any, layer: Layer, x: mx.array, indices: mx.array) -> Any:
    """Outputs [..., k, D] of the experts `indices` [..., k] for `x` [..., K], as stock's."""
    tokens = x.size // x.shape[-1] if x.size else 0
    layer.counters.called(tokens)
    layer.top_k = indices.shape[-1]
    if layer.ranked is not None:
        return layer.ranked.forward(module, layer, x, indices)
    if reason := _stock_reason(module, layer, x, indices):
        layer.counters.fell_back(reason, DETAILS[reason])
        if layer.observer is not None:
            layer.observer(module, layer, x, indices, None)
        return type(module)._moe_base.__call__(module, x, indices)
    static = layer.static if layer.static is not None and layer.static.takes(tokens) else None
    watched = layer.observer is not None or static is not None
    if not watched and layer.in_ops:  # decoding: a lazy graph, in which nothing is read
        return type(module)._moe_base.__call__(module, x, indices)
    if not watched and _is_small(module, layer, indices.size):
        layer.counters.left_small()
        return type(module)._moe_base.__call__(module, x, indices)
    call = Call(module, layer, x, indices, static)
    # An observer and pruning want the scores also where they are not fused.
    return Deferred(call) if layer.deferred and (call.fused or watched) else call.run()


def _stock_reason(module: Any, layer: Layer, x: mx.array, indices: mx.array) -> str | None:
    if module.training:
        return "training"
    for name in PROJECTIONS[layer.kind]:
        child = module[name]
        if type(child) not in layer.linears or not child.keys() <= PLAIN_KEYS:
            return "adapter"
    activation = module.activation
    if isinstance(activation, dict) and activation:
        return "activation"
    if x.dtype not in FLOATS or not mx.issubdtype(indices.dtype, mx.integer):
        return "dtype"
    if x.ndim < 2 or x.shape[:-1] != indices.shape[:-1] or not indices.shape[-1]:
        return "shape"
    return None


def _is_small(module: Any, layer: Layer, assignments: int) -> bool:
    """Whether stock can run a call of so many rows, and is faster."""
    first = module[PROJECTIONS[layer.kind][0]]["weight"]
    least = max(SMALLEST, SMALLEST_QUANTISED, SMALLEST_PACKED)
    if assignments * (first.size // first.shape[0]) >= least:
        return False  # the usual case, at a glance
    linears = [module[name] for name in PROJECTIONS[layer.kind]]
    work = sum(
        linear["weight"].size // linear["weight"].shape[0] * _packing(linear) for linear in linears
    )
    return assignments * work < min(map(_smallest, linears))


def _packing(linear: Any) -> float:
    """Values in an element of the weight array."""
    return 32 / quantisation(linear).bits if "scales" in linear else 1


def _smallest(linear: Any) -> int:
    scales = linear.get("scales")
    if linear.get("global_scale") is not None:
        return 0  # MLX's CPU back end refuses these, and f16 and bf16
    if scales is None:
        return SMALLEST if linear["weight"].dtype == mx.float32 else 0
    return SMALLEST_QUANTISED if scales.dtype == mx.float32 else SMALLEST_PACKED


def weight_arrays(
    linears: Sequence[Linear], groups: Sequence[Sequence[mx.array]] | None = None
) -> list[mx.array]:
    """Every array of the linears; those that gradients reach (or `groups` for them) first."""
    groups = [linear.arrays for linear in linears] if groups is None else groups
    arrays = [a for group in groups for a in group]
    return arrays + [a for linear in linears for a in linear.fixed.values()]


class Call:
    """One forward: its inputs and the weights as they are now (see `deferred.Experts`)."""

    __slots__ = (
        "dtype",
        "fused",
        "indices",
        "layer",
        "linears",
        "module",
        "observer",
        "shape",
        "static",
        "x",
    )

    def __init__(
        self,
        module: Any,
        layer: Layer,
        x: mx.array,
        indices: mx.array,
        static: StaticPath | None = None,
    ):
        self.module, self.layer, self.x, self.indices = module, layer, x, indices
        self.observer, self.static = layer.observer, static
        names = PROJECTIONS[layer.kind]
        self.linears = [Linear(module[name], f"{layer.name}.{name}") for name in names]
        self.fused = (
            layer.kind == "glu"
            and type(module.activation) in layer.swiglus
            and "bias" not in self.linears[0].module
            and "bias" not in self.linears[1].module
        )
        self.shape = (*indices.shape, self.linears[-1].rows)
        self.dtype = promote(x.dtype, *[a.dtype for linear in self.linears for a in linear.arrays])

    def run(self, scores: mx.array | None = None) -> mx.array:
        if self.observer is not None:
            observer, self.observer = self.observer, None
            observer(self.module, self.layer, self.x, self.indices, scores)
        if scores is not None and not self.fused and self.static is None:
            return (self.run() * scores).sum(axis=-2)
        arrays = [self.x] if scores is None else [self.x, scores]
        for linear in self.linears:
            arrays += linear.arrays

        def split(given: tuple[mx.array, ...]) -> tuple[Any, Any]:
            """Regroup what follows x: per linear, and the scores."""
            at, groups = 0 if scores is None else 1, []
            for linear in self.linears:
                groups.append(given[at : at + len(linear.arrays)])
                at += len(linear.arrays)
            return groups, None if scores is None else given[0]

        def compute(x: mx.array, *given: mx.array) -> mx.array:
            groups, weights = split(given)
            return self._compute(x, groups, weights)

        def stock(x: mx.array, *given: mx.array) -> mx.array:
            groups, weights = split(given)
            y = self._stock(x, groups)
            return y if weights is None else (y * weights).sum(axis=-2)

        if self.static is None and self.layer.in_ops:
            return stock(*arrays)
        try:
            return eager(compute, stock, arrays)
        except CannotEvaluate:
            self.layer.counters.fell_back("tracing", DETAILS["tracing"])
            return stock(*arrays)
        except UnknownFormat as error:
            self.layer.counters.fell_back("format", str(error))
            try:
                return stock(*arrays)
            except ValueError:
                raise InvalidArgument(str(error)) from None
        except InvalidArgument as error:
            raise InvalidArgument(f"{self.layer.name}: {error}") from error

    def _stock(
        self, x: mx.array, groups: list[Sequence[mx.array]], ids: mx.array | None = None
    ) -> mx.array:
        """The module's own forward, with other weight arrays, also of other rows and experts."""
        base = type(self.module)._moe_base
        twin = shallow_copy(self.module, base)
        names = PROJECTIONS[self.layer.kind]
        for name, linear, arrays in zip(names, self.linears, groups, strict=True):
            twin[name] = linear.twin(arrays)
        return base.__call__(twin, x, self.indices if ids is None else ids)

    def _compute(
        self, x: mx.array, groups: list[Sequence[mx.array]], scores: mx.array | None
    ) -> mx.array:
        ids = self.indices
        if ids.dtype not in INDEX_DTYPES:
            ids = ids.astype(mx.int32)
        if self.layer.follower is not None:
            self.layer.follower.seen(ids)
        weights = weight_arrays(self.linears, groups)
        if self.static is not None and self.static.ops:
            stock = partial(self._stock, groups=groups)
            shape, dtype = (self.shape, self.dtype) if scores is None else self._sum_of(scores)
            return cold_ops.run(self.static, stock, x, ids, scores, weights, shape, dtype)
        if self.fused and x.dtype != self.dtype:
            x = x.astype(self.dtype)
        if self.static is not None or not self.fused:
            x = token_rows(x, x.shape[-1])
            ids = token_rows(ids, ids.shape[-1])
        evaluate(x, ids, *weights, *([] if scores is None else [scores]))
        matrices = self._matrices(groups)
        if self.static is not None and self.static.current(weights):
            return self._static(self.static, x, ids, scores, matrices)
        if self.fused:
            return self._swiglu(x, ids, scores, matrices)
        y = self._chain(x, ids, self.indices.shape, matrices)
        return y if scores is None else (y * scores).sum(axis=-2)

    def _matrices(self, groups: list[Sequence[mx.array]]) -> list[core.Matrix]:
        packed, tokens = self.layer.packed, self.indices.size // self.indices.shape[-1]
        copies = packed.copies if packed is not None and tokens >= packed.tokens else None
        return [
            linear.matrix(arrays, copy)
            for linear, arrays, copy in zip(
                self.linears, groups, copies or [None] * len(groups), strict=True
            )
        ]

    def _swiglu(
        self, x: mx.array, ids: mx.array, scores: mx.array | None, matrices: list[core.Matrix]
    ) -> mx.array:
        """All three projections in one call, and the weighted sum."""
        if scores is None:
            result = filled(self.shape, self.dtype, core.swiglu, x, ids, *matrices)
        else:
            shape, dtype = self._sum_of(scores)
            result = filled(shape, dtype, core.swiglu_combine, x, ids, scores, *matrices)
        self.layer.counters.ran(1)
        return result

    def _sum_of(self, scores: mx.array) -> tuple[tuple[int, ...], mx.Dtype]:
        """Shape and dtype of the weighted sum."""
        return (*self.shape[:-2], self.shape[-1]), promote(self.dtype, scores.dtype)

    def _static(
        self,
        static: StaticPath,
        x: mx.array,
        ids: mx.array,
        scores: mx.array | None,
        matrices: list[core.Matrix],
    ) -> mx.array:
        """Hot assignments on the static executor, the others on the kernels meanwhile."""
        flat = ids.reshape(-1)

        def cold(assignments: Ints) -> mx.array:
            chosen = mx.array(assignments)
            return self._rows(x[chosen // ids.shape[-1]], flat[chosen][:, None], matrices)

        weights = None
        if scores is not None:
            weights = token_rows(scores.astype(mx.float32), ids.shape[-1])
            evaluate(weights)
        shape, dtype = (self.shape, self.dtype) if scores is None else self._sum_of(scores)
        return static.run(x, ids, weights, cold, shape[-1], dtype).reshape(shape)

    def _rows(self, x: mx.array, ids: mx.array, matrices: list[core.Matrix]) -> mx.array:
        """Outputs [n, D] of one expert each, ids [n, 1], for rows x [n, K]."""
        evaluate(x, ids)
        shape = (*ids.shape, self.shape[-1])
        if self.fused:
            y = filled(shape, self.dtype, core.swiglu, x, ids, *matrices)
            self.layer.counters.ran(1)
        else:
            y = self._chain(x, ids, ids.shape, matrices)
            evaluate(y)
        return y.reshape(-1, self.shape[-1])

    def _chain(
        self, x: mx.array, ids: mx.array, shape: tuple[int, ...], matrices: list[core.Matrix]
    ) -> mx.array:
        """Any activation: grouped projections with MLX's own arithmetic between them.

        x [T, K], ids [T, k]; outputs [..., k, D] for ids of `shape` [..., k].
        """
        tokens, k = ids.shape

        def grouped(rows: mx.array, linear: Linear, matrix: core.Matrix) -> mx.array:
            dtype = linear.out_dtype(rows.dtype)
            rows = rows.astype(dtype)
            evaluate(rows)
            out = filled((tokens, k, linear.rows), dtype, core.grouped, rows, ids, matrix)
            self.layer.counters.ran(1)
            return out.reshape(*shape, 1, linear.rows)

        inner = [grouped(x, *pair) for pair in zip(self.linears[:-1], matrices, strict=False)]
        inner = inner[::-1]  # activations take (up, gate)
        hidden = self.module.activation(*inner)
        hidden = mx.contiguous(hidden.reshape(tokens, k, -1))
        return grouped(hidden, self.linears[-1], matrices[-1]).reshape(*shape, self.shape[-1])
