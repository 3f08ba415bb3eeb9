"""One expert at one token, by one thread and split over two, beside the bandwidth of each.

    python benchmarks/split_expert.py [--megabytes 1400] [--calls 400] [--check] [--json F]

At one token an expert is a read of its weights: two threads gain what two threads read faster.
Qwen3-30B-A3B's expert (2048 -> 768, 4-bit, group 64, bf16), another one at each call, of more than
twice the last-level cache. A process for each number of threads, which take turns; read bandwidth
is measured in the same turns (`floor.py`). `--check` exits 1 if two threads gain less than 1.5x
where their bandwidth does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
from common import format_seconds, last_level_cache_bytes, print_machine, timed, write_json

from mlx_moe.tables import table

DIM, HIDDEN, THREADS = 2048, 768, (1, 2)
GAIN = 1.5


def worker(experts: int, calls: int) -> None:
    """For every line of stdin a turn: a line of JSON with seconds a call and bytes a second."""
    import mlx.core as mx
    from floor import bandwidth
    from weights import random_layer
    from workload import Shape, random_rows

    from mlx_moe import core

    mx.set_default_device(mx.cpu)
    layer = random_layer(Shape(experts, 1, DIM, HIDDEN), "q4", 1)
    how = {"bits": layer.bits, "group_size": layer.group_size}
    matrices = [core.Matrix(*projection, **how) for projection in layer.projections]
    rng = np.random.default_rng(2)
    x = mx.array(random_rows(rng, 1, DIM)).astype(mx.bfloat16)
    scores, out = mx.ones((1, 1), mx.float32), mx.zeros((1, DIM), mx.bfloat16)
    mx.eval(x, scores, out)
    order = rng.permutation(experts).astype(np.uint32)
    at = 0
    print(json.dumps({"bytes": sum(m.nbytes for m in matrices) // experts}), flush=True)
    for _ in sys.stdin:
        seconds = []
        for _ in range(calls):
            ids = order[at % experts][None, None].copy()
            at += 1
            seconds.append(
                timed(lambda: core.swiglu_combine(x, ids, scores, *matrices, out))  # noqa: B023
            )
        bandwidth.cache_clear()
        read = bandwidth(core.num_threads(), repeats=3)
        print(json.dumps([statistics.median(seconds), read]), flush=True)


def start(threads: int, experts: int, calls: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--worker", str(experts), "--calls", str(calls)]
    return subprocess.Popen(
        command,
        env=os.environ | {"MLX_MOE_NUM_THREADS": str(threads)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )


def measure(experts: int, calls: int, rounds: int) -> tuple[int, dict[int, list[list[float]]]]:
    """Bytes of an expert, and (seconds a call, bytes a second) of every turn by threads."""
    workers = {threads: start(threads, experts, calls) for threads in THREADS}
    turns: dict[int, list[list[float]]] = {threads: [] for threads in THREADS}
    try:
        sizes = [json.loads(w.stdout.readline())["bytes"] for w in workers.values() if w.stdout]
        for _ in range(rounds):
            for threads, process in workers.items():
                assert process.stdin and process.stdout
                process.stdin.write("\n")
                process.stdin.flush()
                turns[threads].append(json.loads(process.stdout.readline()))
    finally:
        for process in workers.values():
            process.kill()
    return sizes[0], turns


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = max(700, 5 * last_level_cache_bytes() // 2 >> 20)
    parser.add_argument(
        "--megabytes", type=int, default=default, help="of experts to cycle through"
    )
    parser.add_argument("--calls", type=int, default=200, help="calls in a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit 1 on a gain below 1.5x")
    parser.add_argument("--json")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    experts = options.worker or (options.megabytes << 20) // (3 * DIM * HIDDEN * 9 // 16)
    if options.worker:
        worker(experts, options.calls)
        return 0
    print_machine()
    size, turns = measure(experts, options.calls, options.rounds)
    rows, results = [], {}
    for threads, found in turns.items():
        seconds = statistics.median(turn[0] for turn in found)
        read = statistics.median(turn[1] for turn in found)
        results[threads] = {"seconds": seconds, "reads": size / seconds, "bandwidth": read}
        cells = [format_seconds(seconds), f"{size / seconds / 1e9:.1f}", f"{read / 1e9:.1f}"]
        rows.append([threads, *cells])
    header = ["threads", "one expert", "it reads GB/s", "bandwidth GB/s"]
    print(table(header, rows))
    gain = results[1]["seconds"] / results[2]["seconds"]
    allowed = results[2]["bandwidth"] / results[1]["bandwidth"]
    print(
        f"{experts} experts of {size / 1e6:.2f} MB; two threads are {gain:.2f}x one; their "
        f"bandwidth is {allowed:.2f}x"
    )
    write_json(options.json, results | {"gain": gain, "bandwidth_gain": allowed})
    return 1 if options.check and gain < min(GAIN, allowed) else 0


if __name__ == "__main__":
    sys.exit(main())
