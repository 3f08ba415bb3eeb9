"""Experts shared over ranks of this machine, one thread each, against one process of one thread.

    python benchmarks/ranks.py [--ranks 2] [--experts 32] [--layers 3] [--tokens 1 64 512]

Layers of Qwen3-30B-A3B's shape (4-bit, bf16) with fewer experts, each rank on the ring over
127.0.0.1. Every rank runs the layers with experts kept whole, cut where one would wait (`auto`),
and all cut (`all`); one process runs the same. Columns: milliseconds a layer, the gain over one
process, the greatest share of the experts' bytes that a rank holds, and the error against one
process; then the time of an all_sum alone. Two ranks of one machine share its memory and caches:
this tells what sharing costs, not what a second machine gives.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from common import format_seconds, print_machine, timed, write_json

from mlx_moe.tables import table

SPLITS = ("none", "auto", "all")


def worker(options: argparse.Namespace) -> None:
    """A rank, or one process: prints JSON."""
    import mlx.core as mx
    from mlx_lm.models.qwen3_moe import Qwen3MoeSparseMoeBlock
    from models import qwen3_args, random_4bit

    import mlx_moe
    from mlx_moe.distributed import join

    mx.set_default_device(mx.cpu)
    ranks = join()
    args = qwen3_args(layers=1, experts=options.experts, vocab=64)
    load = 1.0 / np.arange(1, options.experts + 1)  # Zipf, for the placement

    def inputs(tokens: int) -> mx.array:
        x = np.random.default_rng(tokens).standard_normal((1, tokens, args.hidden_size))
        return mx.array(x.astype(np.float32)).astype(mx.bfloat16)

    found: dict[str, Any] = {"seconds": {}, "outputs": {}, "share": {}}
    for split in SPLITS if ranks else ("one process",):
        blocks = [random_4bit(Qwen3MoeSparseMoeBlock(args)) for _ in range(options.layers)]
        replacements = []
        for block in blocks:
            if ranks:
                ranks.split, ranks.counts = split, {"switch_mlp": load}
            replacements.append(mlx_moe.replace_moe_layers(block, group=ranks))
        held = [r.layers[0]._layer.ranked for r in replacements if ranks]
        found["share"][split] = max([h.nbytes / h.total_bytes for h in held], default=1.0)
        for tokens in options.tokens:
            x = inputs(tokens)
            mx.eval(x)
            calls = max(2, min(50, 512 // tokens))
            samples = []
            for _ in range(options.repeats):
                for block in blocks:
                    mx.eval(block(x))
                seconds = timed(
                    lambda: [mx.eval(block(x)) for _ in range(calls) for block in blocks]  # noqa: B023
                )
                samples.append(seconds / calls / len(blocks))
            key = f"{split}/{tokens}"
            found["seconds"][key] = statistics.median(samples)
            y = np.array(blocks[0](x).astype(mx.float32))
            found["outputs"][key] = y.reshape(-1)[:4096].tolist()
    if ranks:
        for size in (2048, 2048 * 512):
            array = mx.ones(size)
            ranks.all_sum(array)
            sums = [timed(lambda: ranks.all_sum(array)) for _ in range(30)]  # noqa: B023
            found["seconds"][f"all_sum/{4 * size}"] = statistics.median(sums)
        ranks.finish()
    if ranks is None or ranks.first:
        print(json.dumps(found))


def hostfile(size: int, folder: Path) -> Path:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(size)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in held]
    path = folder / "hosts.json"
    path.write_text(json.dumps(hosts))
    return path


def run(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """What rank 0, or the one process, says."""
    own = os.environ | {"MLX_MOE_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        if ranks > 1:
            own["MLX_HOSTFILE"] = str(hostfile(ranks, Path(folder)))
        command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
        processes = []
        for rank in range(ranks):
            env = own | ({"MLX_RANK": str(rank)} if ranks > 1 else {})
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed")
    return dict(json.loads(outputs[0]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return 0
    print_machine()
    one, many = run(options, 1), run(options, options.ranks)
    rows = []
    for tokens in options.tokens:
        alone = one["seconds"][f"one process/{tokens}"]
        want = np.array(one["outputs"][f"one process/{tokens}"])
        rows.append([tokens, "one process", f"{1e3 * alone:.2f}", "1.00x", "100 %", ""])
        for split in SPLITS:
            seconds = many["seconds"][f"{split}/{tokens}"]
            got = np.array(many["outputs"][f"{split}/{tokens}"])
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            cells = [f"{1e3 * seconds:.2f}", f"{alone / seconds:.2f}x"]
            share = f"{100 * many['share'][split]:.0f} %"
            rows.append([tokens, f"split {split}", *cells, share, f"{error:.1e}"])
    print(table(["tokens", f"{options.ranks} ranks", "ms a layer", "gain", "held", "error"], rows))
    for key, seconds in many["seconds"].items():
        if key.startswith("all_sum"):
            print(f"all_sum of {int(key.split('/')[1]):,} bytes: {format_seconds(seconds)}")
    write_json(options.json, {"one": one["seconds"], "ranks": many["seconds"]} | many["share"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
