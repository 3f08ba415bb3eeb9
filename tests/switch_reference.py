"""Small expert layers of every kind, and their float64 values."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_moe import Replacement, core

WIDTH, HIDDEN, EXPERTS, TOP_K = 64, 128, 8, 2
FORMATS = ("float32", "bfloat16", "float16", "affine-4", "affine-8", "mxfp4", "mxfp8", "nvfp4")
# Relative Frobenius error against float64: rounding of the activations, nothing else.
TOLERANCE = {mx.float32: 1e-5, mx.bfloat16: 6e-3, mx.float16: 1e-3}


class Block(nn.Module):
    """The smallest caller of an expert layer: routing is given, the sum is stock's."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.experts = experts

    def __call__(self, x: mx.array, ids: mx.array, scores: mx.array) -> mx.array:
        y = self.experts(x, ids)
        return (y * scores[..., None]).sum(axis=-2).astype(y.dtype)


class FamilyBlock(Block):
    """The same from a model file that is known to take a deferred result."""


FamilyBlock.__module__ = "mlx_lm.models.qwen3_moe"


def glu(bias: bool = False, **kwargs: Any) -> SwitchGLU:
    return _biased(SwitchGLU(WIDTH, HIDDEN, EXPERTS, bias=bias, **kwargs))


def mlp(bias: bool = False, **kwargs: Any) -> SwitchMLP:
    return _biased(SwitchMLP(WIDTH, HIDDEN, EXPERTS, bias=bias, **kwargs))


def block(layer: nn.Module, weights: str = "float32", caller: type[Block] = FamilyBlock) -> Block:
    """`layer` in a block in evaluation mode, its weights in one of FORMATS."""
    quantise(layer, weights)
    made = caller(layer)
    made.eval()
    mx.eval(made.parameters())
    return made


def inputs(tokens: int = 3, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array, mx.array]:
    """x [1, T, WIDTH], distinct experts [1, T, TOP_K], scores [1, T, TOP_K]."""
    x = mx.random.normal((1, tokens, WIDTH)).astype(dtype)
    ids = mx.argsort(mx.random.uniform(shape=(1, tokens, EXPERTS)), axis=-1)[..., :TOP_K]
    scores = mx.softmax(mx.random.normal((1, tokens, TOP_K)), axis=-1).astype(dtype)
    mx.eval(x, ids, scores)
    return x, ids, scores


def exact(layer: Any, x: mx.array, ids: mx.array) -> np.ndarray:
    """float64 outputs [..., k, WIDTH] of a SwiGLU layer with its dequantised weights."""
    chosen, rows = np.array(ids), float64(x)[..., None, :]
    up, gate = (_project(layer[name], rows, chosen) for name in ("up_proj", "gate_proj"))
    return _project(layer["down_proj"], gate / (1 + np.exp(-gate)) * up, chosen)


def calls_since(before: dict[str, int]) -> dict[str, int]:
    """C++ calls since `before = core.calls()`, by function."""
    now = core.calls()
    return {name: n - before.get(name, 0) for name, n in now.items() if n != before.get(name, 0)}


def only(replacement: Replacement) -> dict[str, Any]:
    """The counters of the one layer that was replaced."""
    (counts,) = replacement.stats().values()
    return counts


def in_threads(run: Callable[[int], float], cases: int, times: int = 40) -> list[float]:
    """Results of `run(case)`, every case `times` times, from four threads at once."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda i: run(i % cases), range(cases * times)))


def quantise(model: nn.Module, weights: str) -> None:
    """Give `model` weights of one of FORMATS, in place."""
    sizes = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
    if weights.startswith("affine"):
        nn.quantize(model, 64, int(weights[-1]))
    elif weights in sizes:
        nn.quantize(model, *sizes[weights], mode=weights)
    else:
        model.set_dtype(getattr(mx, weights))


def float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def error(found: mx.array, expected: np.ndarray) -> float:
    """Relative Frobenius error."""
    return float(np.linalg.norm(float64(found) - expected) / np.linalg.norm(expected))


def _project(linear: Any, x: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    weight = linear["weight"]
    if "scales" in linear:
        how = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
        weight = mx.dequantize(weight, linear["scales"], linear.get("biases"), **how)
    y = np.einsum(
        "...nk,...k->...n",
        float64(weight)[chosen],
        np.broadcast_to(x, (*chosen.shape, x.shape[-1])),
    )
    return y + float64(linear["bias"])[chosen] if "bias" in linear else y


def _biased(layer: Any) -> Any:
    for child in layer.children().values():
        if "bias" in child:
            child.bias = mx.random.normal(child.bias.shape)
    return layer
