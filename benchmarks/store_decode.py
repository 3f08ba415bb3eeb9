"""Tokens a second of decoding: under a limit against no cache, and with every expert in a slot
against arrays in memory."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from common import format_seconds
from store_checkpoint import (
    EXPERTS,
    GROUP,
    LAYERS,
    TOP_K,
    decode,
    draws,
    open_store,
    slot_bytes,
    stored,
    through,
    touch_memory,
)
from store_routing import belady, decoded

from mlx_moe import core
from mlx_moe.cache_trace import Trace
from mlx_moe.store_counts import ExpertCounts
from mlx_moe.store_files import PARTS, StoredExperts
from mlx_moe.store_forward import Glu

FILL = 24  # tokens that fill the slots, not timed
KNOWN = 64  # tokens of the same kind that counts were kept of
TURN = 3  # tokens
DEFAULT = "25 %, counts"
LEAST, LEAST_HITS = 2.0, 0.75  # x no cache, x belady
LEAST_FULL = 0.95


class Case:
    """Some tokens through a store of `layers` layers: no cache against a quarter in memory."""

    def __init__(self, path: Path, inner: int, layers: int, known: np.ndarray, ids: np.ndarray):
        slot = slot_bytes(path, inner)
        quarter = layers * EXPERTS * slot // 4
        self.ids, self.counts = ids, path.with_name("counts.npz")
        self.counts.unlink(missing_ok=True)
        counts = ExpertCounts([(x.name, x.experts) for x in stored(inner, layers)])
        for token in known:
            counts.add_token(0, list(token))
            counts.decoded(list(token))
        counts.save(self.counts)
        touch_memory(4 * quarter)
        sides: dict[str, tuple[int, dict[str, Any]]] = {
            "no cache": (TOP_K * slot, {"policy": "lru", "prefetch": False}),
            "25 %, first run": (quarter, {"prefetch": False}),
            DEFAULT: (quarter, {"counts": self._copy(0), "prefetch": False}),
            f"{DEFAULT}, reads ahead": (quarter, {"counts": self._copy(1)}),
        }
        self.stores = {
            name: open_store(path, inner, memory, layers, direct=True, **options)
            for name, (memory, options) in sides.items()
        }

    def _copy(self, number: int) -> Path:
        """The counts in a file that the store may add to."""
        return Path(shutil.copy(self.counts, self.counts.with_name(f"copy{number}.npz")))

    def run(self) -> dict[str, dict[str, float]]:
        """By side: seconds, and what its stats became, over all tokens but those that fill."""
        fill, ids = self.ids[:FILL], self.ids[FILL:]
        for name, store in self.stores.items():
            decode(store, fill[-1:] if name == "no cache" else fill)
        first = {name: store.stats() for name, store in self.stores.items()}
        seconds = dict.fromkeys(self.stores, 0.0)
        for turn, at in enumerate(range(0, len(ids), TURN)):
            for name in list(self.stores)[:: 1 if turn % 2 else -1]:
                seconds[name] += sum(decode(self.stores[name], ids[at : at + TURN]))
        found = {}
        for name, store in self.stores.items():
            now = store.stats()
            found[name] = {k: now[k] - first[name][k] for k in KEPT} | {"seconds": seconds[name]}
            store.close()
        return found


KEPT = ("hits", "misses", "prefetch_useful", "prefetch_issued", "bytes_read", "stall_seconds")


def hit_rate(stats: dict[str, float]) -> float:
    """Of demands; what was read ahead is no hit."""
    return stats["hits"] / (stats["hits"] + stats["misses"] + stats["prefetch_useful"])


def report(kind: str, cases: list[dict[str, dict[str, float]]], tokens: int) -> list[str]:
    """A line for each side; the seconds of all cases against those of no cache."""
    total = {name: sum(case[name]["seconds"] for case in cases) for name in cases[0]}
    print(f"decode, {kind}: {len(cases)} x {tokens} tokens")
    for name, seconds in total.items():
        ratios = [case["no cache"]["seconds"] / case[name]["seconds"] for case in cases]
        hits = statistics.mean(hit_rate(case[name]) for case in cases)
        stall = sum(case[name]["stall_seconds"] for case in cases) / seconds
        read = sum(case[name]["bytes_read"] for case in cases) / (len(cases) * tokens)
        print(
            f"  {name:<26} {format_seconds(seconds / len(cases) / tokens):>8} a token, "
            f"{total['no cache'] / seconds:.2f} x no cache ({min(ratios):.2f}-{max(ratios):.2f}), "
            f"hits {hits:.3f}, {read / 1e6:.0f} MB, {stall:.0%} waiting"
        )
    missed = []
    for name in (DEFAULT, f"{DEFAULT}, reads ahead"):
        if (ratio := total["no cache"] / total[name]) < LEAST:
            missed.append(f"decode, {kind}, {name}: {ratio:.2f} x no cache, expected {LEAST}")
    return missed


def measure_draws(
    path: Path, inner: int, tokens: int, domains: int, results: dict[str, Any]
) -> list[str]:
    """Routing drawn from gpt-oss-20b's histograms, one domain a case."""
    cases, best = [], []
    for domain in range(domains):
        ids = np.concatenate([draws(FILL, domain, seed=2), draws(tokens, domain)])
        best.append(belady(ids[:FILL], ids[FILL:], LAYERS * EXPERTS // 4))
        cases.append(Case(path, inner, LAYERS, draws(KNOWN, domain, seed=1), ids).run())
    missed = report("drawn from gpt-oss-20b", cases, tokens)
    mine, optimum = (
        statistics.mean(rates) for rates in ([hit_rate(case[DEFAULT]) for case in cases], best)
    )
    print(f"  hits are {mine / optimum:.2f} x belady's {optimum:.3f}")
    if mine < LEAST_HITS * optimum:
        missed.append(f"hits: {mine / optimum:.2f} x belady's, expected {LEAST_HITS}")
    results["draws"] = {"cases": cases, "belady": best}
    return missed


def measure_traces(
    path: Path, inner: int, traces: dict[str, Trace], tokens: int, results: dict[str, Any]
) -> list[str]:
    """Recorded routing, through as many layers as the recorded model has."""
    cases = []
    for trace in traces.values():
        ids = decoded(trace)
        known, rest = ids[:KNOWN], ids[KNOWN : KNOWN + FILL + tokens]
        cases.append(Case(path, inner, len(trace.layers), known, rest).run())
    results["traces"] = dict(zip(traces, cases, strict=True))
    return report("recorded of the example model", cases, tokens)


class InMemory:
    """A layer whose experts are all there, with the call of a stored one."""

    def __init__(self, experts: StoredExperts, matrices: list[core.Matrix]):
        self.experts, self.matrices = experts, matrices

    def run(self, x: mx.array, ids: mx.array, scores: Any, forward: Glu) -> mx.array:
        return forward.whole(x, ids, scores, self.matrices)


def in_memory(path: Path, inner: int) -> list[InMemory]:
    """Layers over arrays, as replaced layers have them."""
    tensors = mx.load(str(path))
    mx.eval(tensors)
    layers = []
    for x in stored(inner):
        arrays = ([tensors[f"{x.name}.{name}.{p}"] for p in PARTS[:3]] for name in x.projections)
        matrices = [core.Matrix(*three, bits=4, group_size=GROUP) for three in arrays]
        layers.append(InMemory(x, matrices))
    return layers


def measure_full(path: Path, inner: int, tokens: int, results: dict[str, Any]) -> list[str]:
    """In turns of ten tokens. Reads ahead are on, as they are by default."""
    every = np.arange(EXPERTS, dtype=np.uint32).reshape(-1, 1, TOP_K)  # tokens that ask for all
    arrays = in_memory(path, inner)
    with open_store(path, inner, 1 << 40, direct=True) as store:
        decode(store, np.repeat(every, LAYERS, axis=1))
        sides: dict[str, list[Any]] = {"slots": list(store.layers.values()), "arrays": arrays}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for turn, at in enumerate(range(0, len(ids := draws(tokens)), 10)):
            for name in list(sides)[:: 1 if turn % 2 else -1]:
                seconds[name] += through(sides[name], ids[at : at + 10])
    slots, base = (statistics.median(seconds[name]) for name in sides)
    print(
        f"all experts in memory: slots {format_seconds(slots)} a token, arrays "
        f"{format_seconds(base)}: {base / slots:.3f} x their tokens/s"
    )
    results["full"] = seconds
    if base / slots < LEAST_FULL:
        return [f"all in memory: {base / slots:.3f} x arrays, expected {LEAST_FULL}"]
    return []
