"""Recorded routing of the trained example model, and what policies would hit of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from store_checkpoint import EXPERTS, LAYERS, TOP_K

from mlx_moe.cache_policies import Belady, Simulation
from mlx_moe.cache_replay import TOKENS, best_policy, replay
from mlx_moe.cache_trace import Trace

MODEL = Path(__file__).parent.parent / "examples" / "tiny-qwen3-moe"
TEXTS = Path(__file__).parent.parent / "examples" / "data"
SUBJECTS = ("code", "pydoc", "scripture")
DOCUMENTS, LENGTH = 3, 96  # continued of each subject, by so many tokens
SHARES = (0.25, 0.5, 0.75)  # of all experts in memory
FIRST_RUN = f"lfu:{TOKENS}"


def recorded(folder: Path, keep: bool) -> dict[str, Trace]:
    """Traces of greedy and of sampled texts of each subject, made by `mlx_moe trace`.

    keep: those that are in the folder are good.
    """
    traces = {}
    for subject in SUBJECTS:
        for kind, temperature in (("greedy", 0.0), ("sampled", 0.8)):
            path = folder / f"{subject}-{kind}.npz"
            if not (keep and path.exists()):
                _record(path, subject, temperature)
            traces[f"{subject}, {kind}"] = Trace.load(path)
    return traces


def _record(path: Path, subject: str, temperature: float) -> None:
    command = [sys.executable, "-m", "mlx_moe", "trace", "--model", str(MODEL), "-o", str(path)]
    command += ["--data", str(TEXTS / f"{subject}.text.jsonl"), "--temp", str(temperature)]
    command += ["--max-documents", str(DOCUMENTS), "--max-tokens", str(LENGTH)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"mlx_moe trace failed:\n{ran.stderr[-2000:]}")


def decoded(trace: Trace) -> np.ndarray:
    """[tokens, layers, k] of a trace's single tokens."""
    single = np.flatnonzero(trace.tokens == 1)
    ids = [trace.experts[trace.offsets[i] : trace.offsets[i + 1]] for i in single]
    return np.array(ids, np.uint32).reshape(-1, len(trace.layers), trace.layers[0].top_k)


def check_policies(traces: dict[str, Trace]) -> list[str]:
    """Counts hits while decoding, no timing; returns where `auto` was behind lru."""
    missed = []
    for name, trace in traces.items():
        line = f"hits, {name:<18}"
        for share in SHARES:
            budget = int(share * trace.sizes.sum())
            chosen = best_policy(_head(trace), budget)
            hits = {
                policy: replay(trace, budget, policy).decode.hit_rate
                for policy in {"lru", FIRST_RUN, chosen, "belady"}
            }
            line += f"  {share:.0%}: lru {hits['lru']:.3f} first run {hits[FIRST_RUN]:.3f}"
            line += f" {chosen} {hits[chosen]:.3f} belady {hits['belady']:.3f}"
            missed += [
                f"{policy} hits {hits[policy]:.3f} of {name} at {share:.0%}, lru {hits['lru']:.3f}"
                for policy in sorted({FIRST_RUN, chosen})
                if hits[policy] < hits["lru"]
            ]
        print(line)
    return missed


def _head(trace: Trace) -> Trace:
    """Its first half: what a store would choose the policy for the rest by."""
    most = len(trace) // 2 // len(trace.layers) * len(trace.layers)
    end = int(trace.offsets[most])
    parts = trace.layer[:most], trace.tokens[:most], trace.offsets[: most + 1], trace.experts[:end]
    return Trace(trace.identity, trace.layers, *parts)


def belady(before: np.ndarray, ids: np.ndarray, slots: int) -> float:
    """Share of hits of the optimum over `ids`, when `before` came before them."""
    first = np.arange(LAYERS)[:, None] * EXPERTS
    steps = np.sort(np.concatenate([before, ids]).astype(np.int64) + first, axis=-1)
    steps = steps.reshape(-1, TOP_K)
    bank = Simulation(np.ones(LAYERS * EXPERTS), slots, Belady(LAYERS * EXPERTS, steps.ravel()))
    outcomes = [bank.access(step) for step in steps][len(before) * LAYERS :]
    return sum(o.hits for o in outcomes) / (len(ids) * LAYERS * TOP_K)
