"""Calibrations of made-up models, for tests of planning."""

import numpy as np

from mlx_moe.calibration import Calibration, LayerStatistics
from mlx_moe.identity import ModelIdentity
from mlx_moe.layer_facts import LayerFacts, SharedFacts, WeightFacts

FOUR_BITS = WeightFacts("affine", 4, 64, "bfloat16")


def facts(
    number: int = 0,
    experts: int = 16,
    top_k: int = 2,
    hidden: int = 2048,
    inner: int = 768,
    kind: str = "glu",
    biases: bool = False,
    shared: int | None = None,
    weights: WeightFacts = FOUR_BITS,
) -> LayerFacts:
    beside = SharedFacts(f"model.layers.{number}.mlp.shared_expert", shared) if shared else None
    return LayerFacts(
        name=f"model.layers.{number}.mlp.switch_mlp",
        family="qwen3_moe",
        kind=kind,
        experts=experts,
        top_k=top_k,
        hidden=hidden,
        inner=inner,
        activation="SwiGLU",
        biases=biases,
        weights=weights,
        shared=beside,
    )


def zipf(
    experts: int, top_k: int, chunk: int, chunks: int, skew: float, seed: int = 0
) -> np.ndarray:
    """Loads [chunks, E] uint32: popularity 1 / rank ** skew, shuffled, varying over chunks."""
    random = np.random.default_rng([seed, experts])
    shares = random.permutation(1.0 / np.arange(1, experts + 1) ** skew)
    shares /= shares.sum()
    drawn = [
        random.multinomial(chunk * top_k, random.dirichlet(shares * 50 * experts))
        for _ in range(chunks)
    ]
    return np.minimum(np.array(drawn), chunk).astype(np.uint32)


def calibration(loads: list[np.ndarray], layers: list[LayerFacts], chunk: int) -> Calibration:
    """A calibration with these loads; every chunk is full."""
    statistics = []
    for own in loads:
        together = np.diag(own.sum(axis=0)).astype(np.uint64)
        unknown = np.full((own.shape[1], 5), np.nan, np.float32)
        statistics.append(LayerStatistics(own, together, unknown, unknown))
    identity = ModelIdentity("made-up", config="0" * 64)
    return Calibration(identity, chunk, [chunk] * len(loads[0]), layers, statistics)


def skewed(
    count: int = 2, chunk: int = 512, chunks: int = 24, skew: float = 1.0, **options: object
) -> Calibration:
    """A model of `count` layers with skewed routing."""
    layers = [facts(i, **options) for i in range(count)]  # type: ignore[arg-type]
    loads = [
        zipf(layer.experts, layer.top_k, chunk, chunks, skew, seed)
        for seed, layer in enumerate(layers)
    ]
    return calibration(loads, layers, chunk)
