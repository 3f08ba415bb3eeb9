"""The expert store: reads against the disk, decoding under a limit, first tokens, memory.

A synthetic model of 4-bit experts in a file of `--size`; routing drawn from gpt-oss-20b's domains,
and recorded of the example model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import print_machine, write_json
from store_checkpoint import (
    DOMAINS,
    EXPERTS,
    LAYERS,
    TOP_K,
    drop_cache,
    inner_for,
    slot_bytes,
    write_model,
)
from store_decode import measure_draws, measure_full, measure_traces
from store_reads import measure_reads
from store_routing import check_policies, recorded
from store_start import measure_first, measure_memory

PARTS_OF_IT = ("policies", "reads", "draws", "traces", "first", "memory", "full")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=1.0, help="GB of experts (1)")
    parser.add_argument("--tokens", type=int, default=20, help="to decode in each case (20)")
    parser.add_argument("--domains", type=int, default=3, help=f"drawn from, to {DOMAINS} (3)")
    parser.add_argument("--repeats", type=int, default=7, help="first tokens of each side (7)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--keep", action="store_true", help="files there, and use those found")
    parser.add_argument("--parts", nargs="+", choices=PARTS_OF_IT, default=PARTS_OF_IT)
    parser.add_argument("--check", action="store_true", help="exit 1 on a miss (at --size 6)")
    parser.add_argument("--json")
    args = parser.parse_args()
    print_machine()
    if args.keep:
        folder = Path(args.folder) / f"store-{args.size:g}"
        folder.mkdir(parents=True, exist_ok=True)
        missed = measure(args, folder)
    else:
        with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
            missed = measure(args, Path(temporary))
    for miss in missed:
        print(f"missed: {miss}")
    return 1 if args.check and missed else 0


def measure(args: argparse.Namespace, folder: Path) -> list[str]:
    """Runs the parts; returns what missed its mark."""
    path, inner = folder / "model.safetensors", inner_for(int(args.size * 1e9))
    if not path.exists():
        write_model(path, inner)
    drop_cache(path)
    total = LAYERS * EXPERTS * slot_bytes(path, inner)
    print(f"{total / 1e9:.2f} GB in {LAYERS} x {EXPERTS} experts, top-{TOP_K}")
    results: dict[str, Any] = {}
    wanted = {"policies", "traces"} & set(args.parts)
    traces = recorded(folder, args.keep) if wanted else {}
    measured: dict[str, Callable[[], list[str]]] = {
        "policies": lambda: check_policies(traces),
        "reads": lambda: measure_reads(path, inner, results),
        "draws": lambda: measure_draws(path, inner, args.tokens, args.domains, results),
        "traces": lambda: measure_traces(path, inner, traces, args.tokens, results),
        "first": lambda: measure_first(path, inner, args.repeats, results),
        "memory": lambda: measure_memory(path, inner, results),
        "full": lambda: measure_full(path, inner, 5 * args.tokens, results),
    }
    missed = [miss for part in args.parts for miss in measured[part]()]
    write_json(args.json, results)
    return missed


if __name__ == "__main__":
    sys.exit(main())
