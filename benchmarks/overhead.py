"""What our Python and evaluation add to one expert layer at one token: layer call - core call.

    python benchmarks/overhead.py [--repeats 2000] [--check] [--json F]

The layer call is what a block does, `(layer(x, ids) * scores[..., None]).sum(-2)`, evaluated; the
core call is `core.swiglu_combine` on the same arrays and the same weights. Taken in turns; the
figure is the median of the pairs' differences, beside their quartiles. The layer call cannot do
without evaluating its input, so the last column has what MLX takes to evaluate one addition of
eight numbers, in turns with the others: on virtual machines, where waking a thread on another core
takes 50 us, more than all else. `--check` exits 1 above 60 us.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from common import format_seconds, in_turns, print_machine, write_json
from mlx_lm.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from models import qwen3_args, random_4bit
from workload import random_rows

import mlx_moe
from mlx_moe import core
from mlx_moe.tables import table

LIMIT_SECONDS = 60e-6
SIZES = {"tiny (64 -> 64)": (64, 64), "Qwen3 (2048 -> 768)": (2048, 768)}
EXPERTS = 16


def block(dim: int, hidden: int) -> nn.Module:
    args = qwen3_args(layers=1, experts=EXPERTS, vocab=64)
    args.hidden_size, args.moe_intermediate_size = dim, hidden
    return random_4bit(Qwen3MoeSparseMoeBlock(args))


def calls(module: nn.Module, dim: int) -> dict[str, Callable[[], None]]:
    """The layer as its block calls it, and the core as the layer calls it."""
    experts = module.switch_mlp
    x = mx.array(random_rows(np.random.default_rng(3), 1, dim)).astype(mx.bfloat16)
    ids = mx.arange(8, dtype=mx.uint32)[None]
    scores = mx.full((1, 8), 0.125, dtype=mx.bfloat16)
    out = mx.zeros((1, dim), dtype=mx.bfloat16)
    mx.eval(x, ids, scores, out)
    matrices = [
        core.Matrix(p.weight, p.scales, p.biases, mode=p.mode, bits=p.bits, group_size=p.group_size)
        for p in (experts.gate_proj, experts.up_proj, experts.down_proj)
    ]
    return {
        "mx.eval": lambda: mx.eval(scores + 1),
        "layer": lambda: mx.eval((experts(x, ids) * scores[..., None]).sum(-2)),
        "core": lambda: core.swiglu_combine(x, ids, scores, *matrices, out),
    }


def measure(dim: int, hidden: int, repeats: int) -> dict[str, float]:
    module = block(dim, hidden)
    mlx_moe.replace_moe_layers(module)
    before = core.calls().get("swiglu_combine", 0)
    both = calls(module, dim)
    both["layer"]()
    if core.calls().get("swiglu_combine", 0) != before + 1:
        raise SystemExit("the layer did not run the fused kernel: nothing to measure")
    in_turns(both, repeats // 10)
    seconds = in_turns(both, repeats)
    pairs = zip(seconds["layer"], seconds["core"], strict=True)
    quarter, half, three_quarters = statistics.quantiles(layer - alone for layer, alone in pairs)
    return {
        "layer": statistics.median(seconds["layer"]),
        "core": statistics.median(seconds["core"]),
        "overhead": half,
        "quarter": quarter,
        "three_quarters": three_quarters,
        "mx.eval": statistics.median(seconds["mx.eval"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--quick", action="store_true", help="300 repeats")
    parser.add_argument("--check", action="store_true", help="exit 1 above 60 us")
    parser.add_argument("--json")
    options = parser.parse_args()
    repeats = 300 if options.quick else options.repeats
    print_machine()
    results = {name: measure(*size, repeats) for name, size in SIZES.items()}
    header = [
        "layer, one token",
        "layer call",
        "core call",
        "overhead",
        "25 %",
        "75 %",
        "one mx.eval",
    ]
    print(
        table(
            header, [[n, *(format_seconds(v) for v in row.values())] for n, row in results.items()]
        )
    )
    write_json(options.json, results)
    slow = any(row["overhead"] > LIMIT_SECONDS for row in results.values())
    return 1 if options.check and slow else 0


if __name__ == "__main__":
    sys.exit(main())
