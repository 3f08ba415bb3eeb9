"""Our kernels: `mlx_moe.core.swiglu_combine` on MLX arrays of random weights."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

import mlx.core as mx
import numpy as np
from weights import Layer, random_layer
from worker import Sample, serve
from workload import SHAPES, random_rows, route

from mlx_moe import core

ROW_DTYPE = {"q4": mx.bfloat16, "bf16": mx.bfloat16, "f32": mx.float32}


def matrices(layer: Layer) -> list[Any]:
    """gate, up and down as the core's matrices, over the arrays in place."""
    if layer.bits:
        return [
            core.Matrix(w, s, b, mode="affine", bits=layer.bits, group_size=layer.group_size)
            for w, s, b in layer.projections
        ]
    return [core.Matrix(w) for (w,) in layer.projections]


def build(options: Namespace) -> tuple[Sample, dict[str, Any]]:
    shape, dtype = SHAPES[options.shape], ROW_DTYPE[options.format]
    arrays = [random_layer(shape, options.format, seed) for seed in range(options.layers)]
    layers = [matrices(layer) for layer in arrays]
    rng = np.random.default_rng(3)
    calls_made = 0

    def one(tokens: int) -> float:
        nonlocal calls_made
        layer, calls_made = calls_made % len(layers), calls_made + 1
        ids = mx.array(route(shape, options.routing, tokens, layer, calls_made).astype(np.uint32))
        x = mx.array(random_rows(rng, tokens, shape.dim)).astype(dtype)
        scores = mx.full((tokens, shape.top_k), 1 / shape.top_k, dtype=mx.float32)
        out = mx.zeros((tokens, shape.dim), dtype=dtype)
        mx.eval(ids, x, scores, out)
        start = time.perf_counter()
        core.swiglu_combine(x, ids, scores, *layers[layer], out)
        return time.perf_counter() - start

    def sample(tokens: int, calls: int) -> list[float]:
        one(tokens)  # after a wait: threads and pages wake up untimed
        return [one(tokens) for _ in range(calls)]

    return sample, {"isa": core.isa(), "threads": core.num_threads(), "layers": len(layers)}


if __name__ == "__main__":
    serve(build)
