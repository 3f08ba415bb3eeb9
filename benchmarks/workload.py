"""The layers that are timed and the routing that they get. Needs numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

BITS_PER_WEIGHT = {"q4": 4.5, "bf16": 16.0, "f32": 32.0}  # q4: 4 bits, 16-bit scale + bias per 64


@dataclass(frozen=True)
class Shape:
    """One MoE layer: E experts, k a token, SwiGLU of width d -> ff -> d."""

    experts: int
    top_k: int
    dim: int
    hidden: int

    def flops(self, tokens: int) -> float:
        """Multiplications and additions of the three matrices."""
        return 2.0 * 3 * tokens * self.top_k * self.dim * self.hidden

    def expert_bytes(self, fmt: str) -> float:
        return 3 * self.dim * self.hidden * BITS_PER_WEIGHT[fmt] / 8

    def layer_bytes(self, fmt: str) -> float:
        return self.experts * self.expert_bytes(fmt)


SHAPES = {
    "qwen3": Shape(experts=128, top_k=8, dim=2048, hidden=768),  # Qwen3-30B-A3B
    "olmoe": Shape(experts=64, top_k=8, dim=2048, hidden=1024),  # OLMoE-1B-7B
    "tiny": Shape(experts=16, top_k=2, dim=256, hidden=128),  # to try the commands
}


@lru_cache
def popularity(experts: int, routing: str, layer: int) -> np.ndarray:
    """Probability of each expert: `uniform`, or `zipf` = 1 / rank, ranks shuffled per layer."""
    if routing == "uniform":
        return np.full(experts, 1.0 / experts)
    weights = 1.0 / np.arange(1, experts + 1)
    return np.random.default_rng([7, layer]).permutation(weights / weights.sum())


def route_keys(shape: Shape, routing: str, tokens: int, layer: int, call: int) -> np.ndarray:
    """Router logits [tokens, E] f64, fresh for every (layer, call): log popularity + Gumbel noise.

    The k largest of a row are k experts drawn without replacement in proportion to popularity.
    """
    rng = np.random.default_rng([11, layer, call])
    noise = rng.gumbel(size=(tokens, shape.experts))
    return np.log(popularity(shape.experts, routing, layer)) + noise


def route(shape: Shape, routing: str, tokens: int, layer: int, call: int) -> np.ndarray:
    """Expert ids [tokens, k] int32, distinct within a token."""
    keys = route_keys(shape, routing, tokens, layer, call)
    return np.argsort(-keys, axis=1)[:, : shape.top_k].astype(np.int32)


def active_experts(shape: Shape, routing: str, tokens: int, samples: int = 8) -> float:
    """Mean number of distinct experts that one call touches."""
    counts = [np.unique(route(shape, routing, tokens, 0, call)).size for call in range(samples)]
    return float(np.mean(counts))


def layers_beyond_cache(shape: Shape, fmt: str, cache_bytes: int) -> int:
    """Layers that together exceed twice the last-level cache: no weight is re-read from it."""
    return int(2 * cache_bytes // shape.layer_bytes(fmt)) + 1


def to_bf16(values: np.ndarray) -> np.ndarray:
    """uint16 bit patterns of float32 values, rounded towards zero (good enough for random data)."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def random_rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)
