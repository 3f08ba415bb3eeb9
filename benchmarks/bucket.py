"""core.bucket against np.argsort(kind="stable") on the ids that MLX hands over, in turns."""

import argparse
import json
import statistics
import sys
import time

import numpy as np

from mlx_moe import core


def uniform_ids(tokens: int, top_k: int, experts: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return np.argsort(random.random((tokens, experts)), axis=1)[:, :top_k].astype(np.uint32)


def measure(tokens: int, top_k: int, experts: int, rounds: int) -> dict[str, float]:
    """Median microseconds a call, Python overhead included."""
    ids = uniform_ids(tokens, top_k, experts)
    flat = ids.reshape(-1)
    calls = {
        "bucket": lambda: core.bucket(ids, experts),
        "argsort": lambda: np.argsort(flat, kind="stable"),
    }
    order, _ = core.bucket(ids, experts)
    assert np.array_equal(order, np.argsort(flat, kind="stable"))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter_ns()
            call()
            times[name].append((time.perf_counter_ns() - start) / 1000)
    medians = {f"{name}_us": statistics.median(values) for name, values in times.items()}
    return {**medians, "ratio": medians["argsort_us"] / medians["bucket_us"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    shape = {"tokens": args.tokens, "top_k": args.top_k, "experts": args.experts}
    result = {**shape, **measure(**shape, rounds=args.rounds)}
    if args.json:
        print(json.dumps(result))
    else:
        print(f"T={args.tokens} k={args.top_k} E={args.experts}")
        print(f"core.bucket          {result['bucket_us']:9.1f} us")
        print(f"np.argsort (stable)  {result['argsort_us']:9.1f} us")
        print(f"ratio                {result['ratio']:9.1f} x  (required: 20)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
