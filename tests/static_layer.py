"""One small expert layer on the host executor, and routing with given loads."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from static_models import groups_of, host, plan_of
from switch_reference import EXPERTS, HIDDEN, WIDTH, exact, float64, only

HALF = 2e-3  # relative Frobenius error that half-precision tiles may have
ALL = [[0, 1, 2], [3], [4, 5, 6, 7]]
SOME = [[6, 0, 3], [5, 1]]  # 2, 4 and 7 are cold


def hot(
    model: nn.Module,
    directory: Path,
    members: list[list[int]] = SOME,
    tiers: tuple[int, ...] = (64, 32),
    *,
    splits: tuple[int, ...] = (),
    spill_limit: int = 1 << 30,
    static_from: int = 1,
    weights: str = "fp16",
    **options: Any,
) -> Any:
    """Replace the one layer of `model` with these groups."""
    tiers = tuple(itertools.islice(itertools.cycle(tiers), len(members)))
    groups = groups_of("e", members, tiers, HIDDEN, splits=splits, spill_limit=spill_limit)
    plan = plan_of(model, {"experts": groups}, static_from=static_from, weights=weights)
    return host(model, plan, directory, **options)


def static(replacement: Any) -> dict[str, Any]:
    """The static counters of the one layer, which must have had more hot than other work."""
    return only(replacement)["static"]


def routed(counts: dict[str, int]) -> int:
    return sum(counts[key] for key in ("hot", "cold", "spilled", "pruned"))


def weighted(model: nn.Module, x: mx.array, ids: mx.array, scores: mx.array) -> np.ndarray:
    return (exact(model.experts, x, ids) * float64(scores)[..., None]).sum(-2)


def routing(loads: list[int], tokens: int) -> tuple[mx.array, mx.array, mx.array]:
    """Inputs whose experts have exactly these loads, in a random order; top-k of 1."""
    assert sum(loads) == tokens
    ids = np.repeat(np.arange(EXPERTS), loads)
    np.random.default_rng(0).shuffle(ids)
    x = mx.random.normal((1, tokens, WIDTH))
    scores = mx.random.uniform(0.5, 1.5, (1, tokens, 1))
    return x, mx.array(ids.astype(np.uint32)).reshape(1, tokens, 1), scores
