"""Times of the cold path on this machine: experts with loads, reading weights, packed copies."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from . import core
from .errors import InvalidArgument
from .layer_facts import WeightFacts
from .layers import PROJECTIONS
from .measured import Sample
from .replace import replace_moe_layers

MOST_BYTES = 1 << 30  # of weights and of what bandwidth is measured with
MOST_LAYERS = 48  # as models have: of small experts all are in the cache there too
SCALE = 0.01
PACKED_ROWS = 64  # of each expert, where packed copies are tried


@dataclass(frozen=True)
class Shape:
    """Sizes and format of the experts that are measured.

    Attributes:
        experts: that each call gives a load.
        top_k: of them for each token.
    """

    hidden: int
    inner: int
    experts: int
    top_k: int
    weights: WeightFacts

    def __str__(self) -> str:
        """ "2048 x 768 in affine 4 bits"."""
        facts = self.weights
        form = facts.dtype if facts.bits is None else f"{facts.mode} {facts.bits} bits"
        return f"{self.hidden} x {self.inner} in {form}"

    @property
    def flops(self) -> float:
        """Of one row of one expert."""
        return 2.0 * 3 * self.hidden * self.inner


def random_layer(shape: Shape) -> SwitchGLU:
    """A layer with weights of the format, as mlx-lm builds it, without computing them.

    Raises InvalidArgument for a format that the sizes do not fit.
    """
    facts, random = shape.weights, np.random.default_rng(0)
    layer = SwitchGLU(shape.hidden, shape.inner, shape.experts)
    for name in PROJECTIONS["glu"]:
        rows, cols = shape.inner, shape.hidden
        if name == "down_proj":
            rows, cols = cols, rows
        try:
            layer[name] = _linear(shape.experts, rows, cols, facts, random)
        except ValueError as error:
            raise InvalidArgument(f"cannot measure experts of {shape}: {error}") from error
    mx.eval(layer.parameters())
    return layer


def _linear(experts: int, rows: int, cols: int, facts: WeightFacts, random: Any) -> nn.Module:
    if facts.bits is None:
        plain = SwitchLinear(cols, rows, experts, bias=False)
        values = random.standard_normal((experts, rows, cols), np.float32) * SCALE
        plain["weight"] = mx.array(values).astype(getattr(mx, facts.dtype))
        return plain
    how: dict[str, Any] = {"bits": facts.bits, "group_size": facts.group_size, "mode": facts.mode}
    linear = QuantizedSwitchLinear(cols, rows, experts, bias=False, **how)
    words = random.integers(0, 1 << 32, linear["weight"].shape, np.uint32)
    linear["weight"] = mx.array(words)
    scales = linear["scales"]
    if scales.dtype == mx.uint8:
        linear["scales"] = mx.full(scales.shape, 120, mx.uint8)
    else:
        dtype = getattr(mx, facts.dtype)
        linear["scales"] = mx.full(scales.shape, SCALE, dtype)
        linear["biases"] = mx.full(scales.shape, -SCALE, dtype)
    return linear


def copies(layer: SwitchGLU, count: int) -> list[SwitchGLU]:
    """Layers with the same values at other addresses, so that no cache keeps them."""
    found = [layer]
    for _ in range(count - 1):
        other = SwitchGLU(1, 1, 1)
        for name in PROJECTIONS["glu"]:
            linear = layer[name]
            twin = linear.__class__.__new__(linear.__class__)
            twin.__dict__.update(linear.__dict__)
            arrays = {key: mx.array(np.array(linear[key].view(mx.uint8))) for key in linear}
            dict.update(twin, {k: a.view(linear[k].dtype) for k, a in arrays.items()})
            other[name] = twin
        mx.eval(other.parameters())
        found.append(other)
    return found


def layer_bytes(layer: SwitchGLU) -> int:
    return sum(int(layer[name][key].nbytes) for name in PROJECTIONS["glu"] for key in layer[name])


def routing(shape: Shape, rows: int, experts: int) -> tuple[mx.array, mx.array]:
    """x [T, d] and ids [T, k] with `rows` rows for each of the first `experts` experts."""
    top_k = min(shape.top_k, experts)
    tokens = -(-rows * experts // top_k)
    ids = (np.arange(tokens * top_k) % experts).reshape(tokens, top_k).astype(np.uint32)
    x = np.random.default_rng(1).standard_normal((tokens, shape.hidden), np.float32)
    dtype = mx.float32 if shape.weights.dtype == "float32" else mx.bfloat16
    return mx.array(x).astype(dtype), mx.array(ids)


class ColdPath:
    """Layers on the path that `auto` takes for them here; they take turns, to be read afresh."""

    def __init__(self, shape: Shape, cache_bytes: int):
        self.shape = shape
        first = random_layer(shape)
        self.expert_bytes = layer_bytes(first) / shape.experts
        count = min(2 * cache_bytes, MOST_BYTES) // layer_bytes(first) + 1
        self.layers = copies(first, min(max(2, count), MOST_LAYERS))
        for layer in self.layers:
            layer.eval()  # in training mode it would be stock's
            replace_moe_layers(layer)
        self._turn = 0

    def call(self, x: mx.array, ids: mx.array) -> None:
        self._turn = (self._turn + 1) % len(self.layers)
        mx.eval(self.layers[self._turn](x, ids))

    def sample(self, rows: int, repeats: int, experts: int | None = None) -> Sample:
        experts = self.shape.experts if experts is None else experts
        x, ids = routing(self.shape, rows, experts)
        mx.eval(x, ids)
        seconds = timed(lambda: self.call(x, ids), repeats)
        return Sample("cold", self.shape.hidden, self.shape.inner, experts, rows, seconds)


def timed(call: Callable[[], Any], repeats: int) -> float:
    """The median of some calls after one that warms up, in seconds."""
    call()
    return median(timed_once(call) for _ in range(repeats))


def timed_once(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call()
    return max(perf_counter() - start, 1e-9)


def packed_speedup(shape: Shape, repeats: int) -> float | None:
    """How many times faster the kernels are with packed copies; None where they have none.

    In turns, at a load at which computing and not reading takes the time.
    """
    layer = random_layer(shape)
    linears = [layer[name] for name in PROJECTIONS["glu"]]
    plain = [_matrix(linear) for linear in linears]
    copied = [core.Packed(matrix, list(range(shape.experts))) for matrix in plain]
    if not all(copy.nbytes for copy in copied):
        return None
    fast = [_matrix(linear, copy) for linear, copy in zip(linears, copied, strict=True)]
    x, ids = routing(shape, PACKED_ROWS, shape.experts)
    out = mx.zeros((*ids.shape, shape.hidden), x.dtype)
    mx.eval(x, ids, out)

    def run(matrices: list[core.Matrix]) -> float:
        gate, up, down = matrices
        return timed_once(lambda: core.swiglu(x, ids, gate, up, down, out))

    run(plain)
    run(fast)
    taken = [(run(plain), run(fast)) for _ in range(repeats)]
    return median(slow for slow, _ in taken) / median(quick for _, quick in taken)


def fixed_seconds(shape: Shape, repeats: int) -> float:
    """What one expert takes beside its rows, its weights in the cache: the most that a copy which
    needs no unpacking could save.

    From two loads, at which computing takes most of the time.
    """
    one = replace(shape, experts=1, top_k=1)
    layer = random_layer(one)
    gate, up, down = (_matrix(layer[name]) for name in PROJECTIONS["glu"])
    found = []
    for rows in (PACKED_ROWS, 4 * PACKED_ROWS):
        x, ids = routing(one, rows, 1)
        out = mx.zeros((rows, 1, shape.hidden), x.dtype)
        mx.eval(x, ids, out)
        found.append(timed(partial(core.swiglu, x, ids, gate, up, down, out), 5 * repeats))
    few, many = found
    return max(few - (many - few) / 3, 0.0)


def _matrix(linear: Any, packed: core.Packed | None = None) -> core.Matrix:
    how: dict[str, Any] = {}
    if "scales" in linear:
        how = {"mode": linear.mode, "bits": linear.bits, "group_size": linear.group_size}
    return core.Matrix(**{key: linear[key] for key in linear}, **how, packed=packed)
