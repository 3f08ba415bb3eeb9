"""Random MoE weights in MLX's layouts, made directly in their packed form."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from workload import Shape, to_bf16

GROUP = 64
BITS = 4


@dataclass(frozen=True)
class Layer:
    """gate, up, down: each (weight,) or, quantised, (weight, scales, biases)."""

    projections: list[tuple[mx.array, ...]]
    bits: int = 0
    group_size: int = 0


def bf16_array(bits: np.ndarray) -> mx.array:
    return mx.array(bits).view(mx.bfloat16)


def _quantised(rng: np.random.Generator, e: int, n: int, k: int) -> tuple[mx.array, ...]:
    """4-bit codes and bf16 scales and biases whose values have mean 0 and variance about 1/k."""
    codes = rng.integers(0, 1 << 32, (e, n, k * BITS // 32), dtype=np.uint32)
    step = rng.uniform(0.5, 1.5, (e, n, k // GROUP)) / (4.6 * np.sqrt(k))
    return mx.array(codes), bf16_array(to_bf16(step)), bf16_array(to_bf16(-7.5 * step))


def _dense(rng: np.random.Generator, e: int, n: int, k: int, fmt: str) -> tuple[mx.array, ...]:
    values = rng.random((e, n, k), dtype=np.float32)
    values -= 0.5
    values *= np.float32(np.sqrt(12 / k))
    return (mx.array(values) if fmt == "f32" else bf16_array(to_bf16(values)),)


def random_layer(shape: Shape, fmt: str, seed: int) -> Layer:
    """One layer in format `q4` (affine, group 64, bf16 scales), `bf16` or `f32`, evaluated."""
    rng = np.random.default_rng([5, seed])
    sizes = [(shape.hidden, shape.dim)] * 2 + [(shape.dim, shape.hidden)]
    if fmt == "q4":
        layer = Layer([_quantised(rng, shape.experts, *size) for size in sizes], BITS, GROUP)
    else:
        layer = Layer([_dense(rng, shape.experts, *size, fmt) for size in sizes])
    mx.eval(*layer.projections)
    return layer
