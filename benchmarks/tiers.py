"""Padding of the tiers that make_plan chooses, against one capacity for all experts.

    python benchmarks/tiers.py [--check] [--json F]

The routing is gpt-oss-20b's: counts of 32 experts in 24 layers, top-4, in 291 domains. A fixed seed
parts the domains in two; the plan is made from chunks of the one half and measured on chunks of
the other. A chunk of T tokens is T * 4 assignments in every layer, drawn from the counts of
`--domains` domains mixed in random proportions.

Padding is the empty slots among the slots dispatched. Overflow is the share of assignments beyond
capacity, measured on the unseen half; the one capacity is the least (any whole number) that
overflows no more than the plan. "at their tiers" gives every expert its own tier in every chunk,
"as run" lets each group take the smallest tier that fits, as layers do. No group takes a second
tile, so that overflow is that of the capacities.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from common import write_json

from mlx_moe.calibration import Calibration, LayerStatistics
from mlx_moe.identity import ModelIdentity
from mlx_moe.layer_facts import LayerFacts, WeightFacts
from mlx_moe.plan import LayerPlan
from mlx_moe.planner import make_plan
from mlx_moe.tables import table

DATA = Path(__file__).parent / "data" / "gpt-oss-20b-experts.json.gz"
LAYERS, EXPERTS, TOP_K, HIDDEN = 24, 32, 4, 2880
REQUIRED = 0.25  # less padding
SEED = 20
LARGEST = 1 << 30  # bytes; no budget in the way


@lru_cache
def domains() -> list[np.ndarray]:
    """Shares [24, 32] of each domain, in the file's order."""
    with gzip.open(DATA) as file:
        counts = json.load(file)["domains"]
    return [np.array(c, float) / np.sum(c, axis=1, keepdims=True) for c in counts.values()]


def halves() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The domains that the plan sees, and those it does not."""
    order = np.random.default_rng(SEED).permutation(len(domains()))
    shares = [domains()[i] for i in order]
    return shares[: len(shares) // 2], shares[len(shares) // 2 :]


def draw(shares: list[np.ndarray], tokens: int, chunks: int, mixed: int, seed: int) -> np.ndarray:
    """Loads [chunks, 24, 32] of chunks that mix `mixed` of the domains."""
    random = np.random.default_rng(seed)
    loads = np.zeros((chunks, LAYERS, EXPERTS), np.int64)
    for chunk in range(chunks):
        chosen = random.choice(len(shares), mixed, replace=False)
        parts = random.dirichlet(np.ones(mixed))
        mixture = sum(part * shares[i] for part, i in zip(parts, chosen, strict=True))
        loads[chunk] = random.multinomial(tokens * TOP_K, mixture)
    return np.minimum(loads, tokens)  # a token goes to an expert once


def calibration(loads: np.ndarray, tokens: int) -> Calibration:
    """As calibrate would write it for gpt-oss-20b; what planning does not read is left empty."""
    quantised = WeightFacts("mxfp4", 4, 32, "bfloat16")
    facts = [
        LayerFacts(
            name=f"model.layers.{i}.mlp.experts",
            family="gpt_oss",
            kind="glu",
            experts=EXPERTS,
            top_k=TOP_K,
            hidden=HIDDEN,
            inner=HIDDEN,
            activation="SwiGLU",
            biases=True,
            weights=quantised,
        )
        for i in range(LAYERS)
    ]
    nothing = np.full((EXPERTS, 5), np.nan, np.float32)
    together = np.zeros((EXPERTS, EXPERTS), np.uint64)
    statistics = [
        LayerStatistics(loads[:, i].astype(np.uint32), together, nothing, nothing)
        for i in range(LAYERS)
    ]
    identity = ModelIdentity("openai/gpt-oss-20b")
    return Calibration(identity, tokens, [tokens] * len(loads), facts, statistics)


@dataclass
class Count:
    """Slots dispatched, assignments in them and all assignments."""

    slots: float = 0
    served: float = 0
    assignments: float = 0

    @property
    def padding(self) -> float:
        return 1 - self.served / self.slots

    @property
    def overflow(self) -> float:
        return 1 - self.served / self.assignments


def count_layer(layer: LayerPlan, loads: np.ndarray, as_run: bool) -> Count:
    """What a layer's groups dispatch for loads [chunks, E]."""
    count = Count(assignments=float(loads.sum()))
    for group in layer.groups:
        own = loads[:, group.experts]
        capacities = np.array(layer.capacities(group) if as_run else [group.tier])
        fits = np.searchsorted(capacities, own.max(axis=1))
        capacity = capacities[np.minimum(fits, len(capacities) - 1)]
        count.slots += float(capacity.sum()) * len(group.experts)
        count.served += float(np.minimum(own, capacity[:, None]).sum())
    return count


def count_plan(layers: tuple[LayerPlan, ...], loads: np.ndarray, as_run: bool) -> Count:
    total = Count()
    for i, layer in enumerate(layers):
        one = count_layer(layer, loads[:, i], as_run)
        total.slots += one.slots
        total.served += one.served
        total.assignments += one.assignments
    return total


def one_capacity(loads: np.ndarray, overflow: float) -> tuple[int, Count]:
    """The least capacity for all experts that overflows no more, and what it dispatches."""
    most = int(loads.max())
    number = np.bincount(loads.reshape(-1), minlength=most + 1)
    served = np.cumsum(np.cumsum(number[::-1])[::-1][1:])  # by a capacity of 1, 2, ...
    capacity = int(np.argmax(1 - served / loads.sum() <= overflow + 1e-12)) + 1
    slots = float(capacity * loads.size)
    return capacity, Count(slots, float(served[capacity - 1]), float(loads.sum()))


def measure(tokens: int, target: float, mixed: int, chunks: int, max_tiers: int) -> dict[str, Any]:
    seen, unseen = halves()
    planned = make_plan(
        calibration(draw(seen, tokens, chunks, mixed, seed=1), tokens),
        "m2-max",
        memory=LARGEST << 20,
        max_tiers=max_tiers,
        overflow=target,
        force_hot=1.0,  # all experts, as the one capacity is for all
    )
    loads = draw(unseen, tokens, chunks, mixed, seed=2)
    own = count_plan(planned.layers, loads, as_run=False)
    run = count_plan(planned.layers, loads, as_run=True)
    capacity, flat = one_capacity(loads, run.overflow)
    return {
        "tokens": tokens,
        "target": target,
        "domains": mixed,
        "overflow": run.overflow,
        "capacity": capacity,
        "capacity_overflow": flat.overflow,
        "capacity_padding": flat.padding,
        "tier_padding": own.padding,
        "run_padding": run.padding,
        "tiers_less": 1 - own.padding / flat.padding,
        "less": 1 - run.padding / flat.padding,
        "fewer_empty_slots": 1 - (run.slots - run.served) / (flat.slots - flat.served),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--overflow", type=float, nargs="+", default=[0.01, 0.05])
    parser.add_argument("--domains", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--chunks", type=int, default=256, help="of each half (default: 256)")
    parser.add_argument("--max-tiers", type=int, default=4)
    parser.add_argument("--check", action="store_true", help="exit 1 on a miss")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    results = [
        measure(tokens, target, mixed, options.chunks, options.max_tiers)
        for mixed in options.domains
        for tokens in options.tokens
        for target in options.overflow
    ]
    header = ["domains a chunk", "tokens", "overflow", "one capacity", "its padding"]
    header += ["at their tiers", "as run", "less padding", "fewer empty slots"]
    rows = [
        [
            r["domains"],
            r["tokens"],
            f"{r['overflow']:.2%}",
            r["capacity"],
            f"{r['capacity_padding']:.1%}",
            f"{r['tier_padding']:.1%}",
            f"{r['run_padding']:.1%}",
            f"{r['less']:.1%}",
            f"{r['fewer_empty_slots']:.1%}",
        ]
        for r in results
    ]
    print(table(header, rows))
    write_json(options.json, results)
    least = min(r["less"] for r in results)
    print(f"least: {least:.1%} less padding (required: {REQUIRED:.0%})")
    return int(options.check and least < REQUIRED)


if __name__ == "__main__":
    sys.exit(main())
