"""Stock mlx-lm: `SwitchGLU` and the weighted sum, on the same random weights.

Variant `bf16` keeps bf16 scales and activations (what is published; far slower on a CPU-only
MLX), the default casts both to f32.
"""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU
from weights import random_layer
from worker import Missing, Sample, serve
from workload import SHAPES, random_rows, route


def stock_layer(shape_name: str, fmt: str, seed: int, dtype: mx.Dtype) -> nn.Module:
    """A SwitchGLU that holds the random weights, scales in `dtype`."""
    shape = SHAPES[shape_name]
    layer = random_layer(shape, fmt, seed)
    glu = SwitchGLU(shape.dim, shape.hidden, shape.experts)
    if layer.bits:
        nn.quantize(glu, layer.group_size, layer.bits)
    for name, arrays in zip(("gate_proj", "up_proj", "down_proj"), layer.projections, strict=True):
        projection = getattr(glu, name)
        projection.weight = arrays[0]
        if layer.bits:
            projection.scales, projection.biases = (array.astype(dtype) for array in arrays[1:])
    mx.eval(glu.parameters())
    return glu


def build(options: Namespace) -> tuple[Sample, dict[str, Any]]:
    if options.format == "bf16":
        raise Missing("stock MLX on CPU refuses unquantised bf16 experts")
    shape = SHAPES[options.shape]
    dtype = mx.bfloat16 if options.variant == "bf16" else mx.float32
    layers = [stock_layer(options.shape, options.format, i, dtype) for i in range(options.layers)]
    rng = np.random.default_rng(3)
    calls_made = 0

    def one(tokens: int) -> float:
        nonlocal calls_made
        layer, calls_made = calls_made % len(layers), calls_made + 1
        ids = mx.array(route(shape, options.routing, tokens, layer, calls_made).astype(np.uint32))
        x = mx.array(random_rows(rng, tokens, shape.dim)).astype(dtype)
        scores = mx.full((tokens, shape.top_k), 1 / shape.top_k, dtype=dtype)
        mx.eval(ids, x, scores)
        start = time.perf_counter()
        mx.eval((layers[layer](x, ids) * scores[..., None]).sum(-2))
        return time.perf_counter() - start

    return lambda tokens, calls: [one(tokens) for _ in range(calls)], {"layers": len(layers)}


if __name__ == "__main__":
    serve(build)
