"""core.bucket against np.argsort(kind="stable") on the ids that MLX hands over, in turns.

    python benchmarks/bucket.py [--tokens 2048] [--top-k 8] [--experts 128] [--json F]

Times are of whole calls from Python, on uint32 ids.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import format_seconds, in_turns, print_machine, spread, summary, write_json

from mlx_moe import core
from mlx_moe.tables import table

REQUIRED = 20  # times argsort, at the default size


def uniform_ids(tokens: int, top_k: int, experts: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return np.argsort(random.random((tokens, experts)), axis=1)[:, :top_k].astype(np.uint32)


def measure(ids: np.ndarray, experts: int, rounds: int) -> dict[str, dict[str, float]]:
    """Summaries of both, in seconds a call."""
    flat = ids.reshape(-1)
    calls = {
        "core.bucket": lambda: core.bucket(ids, experts),
        "np.argsort": lambda: np.argsort(flat, kind="stable"),
    }
    order, _ = core.bucket(ids, experts)
    assert np.array_equal(order, np.argsort(flat, kind="stable"))
    return {name: summary(seconds) for name, seconds in in_turns(calls, rounds).items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json")
    options = parser.parse_args()
    print_machine()
    ids = uniform_ids(options.tokens, options.top_k, options.experts)
    stats = measure(ids, options.experts, options.rounds)
    rows = [[name, format_seconds(s["median"]), spread(s)] for name, s in stats.items()]
    print(table([f"{ids.shape} ids, {options.experts} experts", "median", "spread"], rows))
    ratio = stats["np.argsort"]["median"] / stats["core.bucket"]["median"]
    print(f"core.bucket is {ratio:.1f}x np.argsort (required at the default size: {REQUIRED}x)")
    write_json(options.json, {"options": vars(options), **stats, "ratio": ratio})


if __name__ == "__main__":
    main()
