"""One MoE layer: our kernels against llama.cpp, kt-kernel and stock MLX, in turns in one run.

    python benchmarks/layer.py --shape qwen3 --tokens 1 8 16 32 64 512 --format q4 \
        --routing zipf --isa amx vnni avx512 avx2 --threads 2 --against llama kt kt@1 stock

Every contestant is a process that builds its layers once and waits, stopped, for its turn; a
round gives each one turn at each number of tokens. Layers are cycled and routed afresh at every
call, and together exceed twice the last-level cache. Printed: the median over rounds, the spread
around it, GFLOP/s, the share of the machine's floor, and how many times faster ours is. All of
them have large memory pages where those are for the asking, as with our commands.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import (
    format_seconds,
    last_level_cache_bytes,
    print_machine,
    spread,
    summary,
    write_json,
)
from floor import floor_seconds
from worker import Contestant, closing
from workload import BITS_PER_WEIGHT, SHAPES, active_experts, layers_beyond_cache

from mlx_moe import large_pages
from mlx_moe.tables import table

STOCK = {"stock", "stock-bf16"}
COMPARATORS = {"llama": "llama.py", "kt": "kt.py", "stock": "stock.py", "stock-bf16": "stock.py"}
COLUMNS = ("tokens", "who", "time", "spread", "a token", "GFLOP/s", "of floor", "ratio", "rounds")
TURN_TOKENS = 64  # tokens in one turn, so that short calls are averaged over many


def options_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64, 512])
    parser.add_argument("--format", choices=BITS_PER_WEIGHT, default="q4")
    parser.add_argument("--routing", choices=("zipf", "uniform"), default="zipf")
    parser.add_argument("--isa", nargs="+", default=["best"], help="ours with each: amx vnni ...")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--against", nargs="*", default=["llama", "kt"], metavar="NAME[@THREADS]",
        help=f"any of {', '.join(COMPARATORS)}; kt@1 is kt with one thread",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--stock-repeats", type=int, default=1, help="rounds with stock")
    parser.add_argument("--layers", type=int, help="default: beyond twice the last-level cache")
    parser.add_argument("--quick", action="store_true", help="three rounds, stock one")
    parser.add_argument("--check", action="store_true", help="exit 1 on a cliff of > 5 %%")
    parser.add_argument("--bench-python", default=sys.executable, help="python of llama and kt")
    parser.add_argument("--cache", default=str(Path(tempfile.gettempdir()) / "mlx-moe-bench"))
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    if options.quick:
        options.repeats, options.stock_repeats = 3, 1
    return options


def start(name: str, options: argparse.Namespace, layers: int) -> Contestant:
    """The process of `ours:ISA`, or of a comparator with an optional `@THREADS`."""
    kind, _, threads = name.partition("@")
    count = int(threads) if threads else options.threads
    arguments = {
        "shape": options.shape,
        "format": options.format,
        "routing": options.routing,
        "threads": count,
        "layers": layers,
        "max-tokens": max(options.tokens),
        "cache": options.cache,
        "variant": kind.partition("-")[2],
    }
    if kind.startswith("ours"):
        env = {"MLX_MOE_NUM_THREADS": str(count)}
        isa = kind.partition(":")[2]
        if isa != "best":
            env["MLX_MOE_ISA"] = isa
        return Contestant("ours.py", sys.executable, arguments, env)
    python = sys.executable if kind in STOCK else options.bench_python
    return Contestant(COMPARATORS[kind], python, arguments, {})


def race(
    contestants: dict[str, Contestant], options: argparse.Namespace
) -> dict[tuple[int, str], list[float]]:
    """(tokens, name) -> one median of a turn's calls per round, in seconds a call."""
    seconds: dict[tuple[int, str], list[float]] = {}
    for turn in range(options.repeats):
        for tokens in options.tokens:
            for name, contestant in contestants.items():
                stock = name.partition("@")[0] in STOCK
                if stock and turn >= options.stock_repeats:
                    continue
                calls = 1 if stock else max(2, TURN_TOKENS // tokens)
                taken = contestant.sample(tokens, calls)
                seconds.setdefault((tokens, name), []).append(statistics.median(taken))
        print(f"round {turn + 1} of {options.repeats}", file=sys.stderr)
    return seconds


def report(
    seconds: dict[tuple[int, str], list[float]],
    contestants: dict[str, Contestant],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """One row per (tokens, contestant), ratios against the first of ours."""
    shape, ours = SHAPES[options.shape], next(iter(contestants))
    isa = contestants[ours].about["isa"]
    rows = []
    for (tokens, name), samples in seconds.items():
        stats = summary(samples)
        active = active_experts(shape, options.routing, tokens)
        read = active * shape.expert_bytes(options.format)
        floor = floor_seconds(read, shape.flops(tokens), isa, options.threads)
        rows.append(
            {
                "tokens": tokens,
                "contestant": name,
                **stats,
                "gflops": shape.flops(tokens) / stats["median"] / 1e9,
                "share_of_floor": floor / stats["median"],
                "ours_is_faster_by": stats["median"] / statistics.median(seconds[tokens, ours]),
            }
        )
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    cells = [
        [
            row["tokens"],
            row["contestant"],
            format_seconds(row["median"]),
            spread(row),
            format_seconds(row["median"] / row["tokens"]),
            f"{row['gflops']:.1f}",
            f"{100 * row['share_of_floor']:.0f} %",
            f"{row['ours_is_faster_by']:.2f}x",
            row["samples"],
        ]
        for row in rows
    ]
    print(table(COLUMNS, cells))


def cliffs(rows: list[dict[str, Any]], name: str) -> list[str]:
    """Where a contestant's time per token rises by more than 5 % from one size to the next."""
    mine = sorted((r["tokens"], r["median"] / r["tokens"]) for r in rows if r["contestant"] == name)
    return [
        f"{name}: a token takes {100 * (after / before - 1):.0f} % longer at {b} tokens than at {a}"
        for (a, before), (b, after) in pairwise(mine)
        if after > 1.05 * before
    ]


def main() -> int:
    options = options_of()
    shape = SHAPES[options.shape]
    layers = options.layers or layers_beyond_cache(shape, options.format, last_level_cache_bytes())
    names = [f"ours:{isa}" for isa in options.isa] + options.against
    print_machine()
    print(f"{options.shape} {shape}, {options.format}, {options.routing}, {layers} layers")
    with closing({}) as contestants:
        for name in names:
            contestant = contestants[name] = start(name, options, layers)
            print(f"{name}: {contestant.missing or contestant.about}")
            if contestant.missing:
                contestants.pop(name).close()
        if not contestants or not next(iter(contestants)).startswith("ours"):
            print("our kernels did not start; BENCH_VERBOSE=1 shows why")
            return 1
        rows = report(race(contestants, options), contestants, options)
        found = [line for name in contestants if name[:4] == "ours" for line in cliffs(rows, name)]
    print_rows(rows)
    print(*found, sep="\n", end="\n" if found else "")
    write_json(options.json, {"options": vars(options), "layers": layers, "rows": rows})
    return 1 if options.check and found else 0


if __name__ == "__main__":
    large_pages.restart()
    sys.exit(main())
