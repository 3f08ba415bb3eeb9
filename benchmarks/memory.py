"""Peak resident memory of a replaced model against stock: no second copy of the weights.

    python benchmarks/memory.py [--layers 2] [--experts 64] [--tokens 64] [--json F]

Each side builds the same packed random model and runs one prefill in a process of its own; the
figure is the process's peak RSS. Exits 1 where replaced exceeds stock by more than 5 % and the
buffers that a prefill's hidden rows need.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

from common import print_machine, write_json
from models import all_logits, prompt, qwen3

import mlx_moe
from mlx_moe.tables import table

VOCAB = 4096
ALLOWED = 1.05


def peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def tile_buffer_bytes(tokens: int) -> int:
    """f32 rows of every assignment: gathered input, hidden and output."""
    return tokens * 8 * (2048 + 2 * 768 + 2048) * 4


def run(side: str, options: argparse.Namespace) -> int:
    """Peak RSS in bytes of this process after one prefill."""
    model = qwen3(options.layers, options.experts, VOCAB)
    if side == "replaced":
        mlx_moe.replace_moe_layers(model)
        mlx_moe.replace_linear_layers(model)
    all_logits(model, prompt(options.tokens, VOCAB))
    return peak_rss_bytes()


def measured(side: str) -> int:
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--side", choices=("stock", "replaced"), help=argparse.SUPPRESS)
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.side:
        print(run(options.side, options))
        return 0
    print_machine()
    peaks = {side: measured(side) for side in ("stock", "replaced")}
    limit = ALLOWED * peaks["stock"] + tile_buffer_bytes(options.tokens)
    rows = [[side, f"{peak / 2**20:.0f} MiB"] for side, peak in peaks.items()]
    print(table(["model", "peak RSS"], [*rows, ["limit", f"{limit / 2**20:.0f} MiB"]]))
    write_json(options.json, {**peaks, "limit": limit})
    return 1 if peaks["replaced"] > limit else 0


if __name__ == "__main__":
    sys.exit(main())
