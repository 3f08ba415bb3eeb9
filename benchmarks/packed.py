"""What prepacked copies of a quarter of the experts bring on this machine's kernels.

    python benchmarks/packed.py [--check] [--shape qwen3] [--tokens 512] [--rounds 7] [--json F]

One layer in 4 bits with Zipf routing, the quarter of the experts that are fullest in other draws
packed, against all read in place, in turns; then one token, to see that decode is not slower.

Where the kernels in use have no layout of their own for copies (of the instruction sets only AMX
has one) that is said, with what a copy could save at most: what an expert takes beside its rows,
its weights in the cache, against what reading a copy takes.

--check fails where copies exist and bring less than 1.15x, or make decode more than 5 % slower.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import mlx.core as mx
import numpy as np
from common import (
    format_seconds,
    in_turns,
    last_level_cache_bytes,
    print_machine,
    spread,
    summary,
    write_json,
)
from weights import Layer, bf16_array, random_layer
from workload import SHAPES, Shape, random_rows, route, to_bf16

from mlx_moe import core
from mlx_moe.layer_facts import WeightFacts
from mlx_moe.machine import has_packed_copies
from mlx_moe.plan_cpu import PACKED_BYTES
from mlx_moe.tables import table
from mlx_moe.tune_cold import Shape as Measured
from mlx_moe.tune_cold import fixed_seconds
from mlx_moe.tune_static import read_bandwidth

REQUIRED, SLOWER = 1.15, 1.05  # prefill faster, decode slower at most
PAST = 8  # draws that the packed experts are chosen by


def without_copies(shape: Shape) -> dict[str, Any]:
    facts = WeightFacts("affine", 4, 64, "bfloat16")
    fixed = fixed_seconds(Measured(shape.dim, shape.hidden, 1, 1, facts), 5)
    bandwidth = read_bandwidth(2 * last_level_cache_bytes(), core.num_threads(), 3)
    read = PACKED_BYTES * 3 * shape.dim * shape.hidden / bandwidth
    print(
        f"packing does not pay here: the kernel in use ({core.isa()}) reads weights in place. "
        f"An expert takes {format_seconds(fixed)} beside its rows, which is all that a copy could "
        f"save, and a copy takes {format_seconds(read)} to read"
    )
    return {"isa": core.isa(), "copies": False, "fixed_seconds": fixed, "read_seconds": read}


def matrices(layer: Layer, experts: list[int] | None) -> list[core.Matrix]:
    how: dict[str, Any] = {"mode": "affine", "bits": layer.bits, "group_size": layer.group_size}
    found = []
    for arrays in layer.projections:
        packed = None if experts is None else core.Packed(core.Matrix(*arrays, **how), experts)
        found.append(core.Matrix(*arrays, **how, packed=packed))
    return found


def with_copies(shape: Shape, tokens: int, rounds: int) -> dict[str, Any]:
    layer = random_layer(shape, "q4", 0)
    past = np.concatenate([route(shape, "zipf", tokens, 0, call) for call in range(PAST)])
    order = np.argsort(-np.bincount(past.reshape(-1), minlength=shape.experts), kind="stable")
    sides = {
        "in place": matrices(layer, None),
        "packed": matrices(layer, sorted(order[: shape.experts // 4].tolist())),
    }
    results: dict[str, Any] = {"isa": core.isa(), "copies": True}
    for name, count in (("prefill", tokens), ("decode", 1)):
        random = np.random.default_rng(1)
        x = bf16_array(to_bf16(random_rows(random, count, shape.dim)))
        ids = mx.array(route(shape, "zipf", count, 0, PAST).astype(np.uint32))
        scores = mx.array(np.full((count, shape.top_k), 1 / shape.top_k, np.float32))
        out = mx.zeros((count, shape.dim), mx.bfloat16)
        mx.eval(x, ids, scores, out)

        def run(side: str) -> np.ndarray:
            core.swiglu_combine(x, ids, scores, *sides[side], out)  # noqa: B023
            return np.array(out.astype(mx.float32))  # noqa: B023

        one, other = run("in place"), run("packed")
        wrong = float(np.linalg.norm(one - other) / np.linalg.norm(one))
        assert wrong < 1e-2, f"the two sides differ by {wrong}"
        repeats = rounds if count > 1 else 20 * rounds
        seconds = in_turns({side: lambda side=side: run(side) for side in sides}, repeats)
        results[name] = {side: summary(taken) for side, taken in seconds.items()}
        results[name]["ratio"] = (
            results[name]["in place"]["median"] / results[name]["packed"]["median"]
        )
    rows = [
        [
            f"{name}, {side}",
            format_seconds(results[name][side]["median"]),
            spread(results[name][side]),
            f"{results[name]['ratio']:.2f}x" if side == "packed" else None,
        ]
        for name in ("prefill", "decode")
        for side in sides
    ]
    print(table(["a quarter packed", "median", "spread", "ratio"], rows))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="exit 1 where copies are too slow")
    parser.add_argument("--json")
    options = parser.parse_args()
    print_machine()
    shape = SHAPES[options.shape]
    if has_packed_copies():
        found = with_copies(shape, options.tokens, options.rounds)
        reached = found["prefill"]["ratio"] >= REQUIRED
        reached &= found["decode"]["ratio"] >= 1 / SLOWER
    else:
        found, reached = without_copies(shape), True
    write_json(options.json, found)
    return int(options.check and not reached)


if __name__ == "__main__":
    sys.exit(main())
