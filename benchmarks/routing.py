"""Bucket, capacity, pack and combine of a whole layer against one memcpy of its rows, in turns.

    python benchmarks/routing.py [--tokens 2048] [--top-k 8] [--experts 128] [--dim 2048]
                                 [--routing uniform] [--dtype bfloat16] [--check] [--json F]

The chain, as the static path runs it: `core.bucket` and `core.capacity` on the ids, one
`core.pack_groups` of token rows [T, d] into the fp16 tiles of all groups, one `core.combine` of
result tiles as large back to [T, d] in float32. Experts are grouped by load, 8 to a group; a
group's capacity is its largest load, rounded up to 32, so every assignment goes through a tile.
What lies between pack and combine, the experts, is left out; all memory was touched before.

The copy: the T * k rows of fp16 that the tiles hold, padding left out, read once and written once
by memcpy, 1 MiB at a time by as many threads as the core has. The chain moves those rows twice,
into the tiles and out of the results, and writes the padding too: `bytes` says how many each step
reads and writes. The ratio is the median of the rounds' ratios, each of a chain to the copy beside
it. `--check` exits 1 above 2.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
from common import format_seconds, in_turns, print_machine, spread, summary, timed, write_json
from workload import Shape, random_rows, route

from mlx_moe import core
from mlx_moe.tables import table

LIMIT = 2.0  # times the copy, at the default size
GROUP, CAPACITY_STEP = 8, 32
COPY_CHUNK = 1 << 20
MIB = 1 << 20


class Layer:
    """The routing of one layer and all memory that a forward needs."""

    def __init__(self, shape: Shape, tokens: int, routing: str, dtype: str):
        self.shape = shape
        random = np.random.default_rng(0)
        self.x = mx.array(random_rows(random, tokens, shape.dim)).astype(getattr(mx, dtype))
        mx.eval(self.x)
        self.ids = route(shape, routing, tokens, 0, 0)
        self.scores = random.random((tokens, shape.top_k), dtype=np.float32)
        self.out = np.ones((tokens, shape.dim), np.float32)
        loads = np.bincount(self.ids.reshape(-1), minlength=shape.experts)
        ranked = np.argsort(-loads, kind="stable").astype(np.int32)
        self.groups = [ranked[i : i + GROUP] for i in range(0, shape.experts, GROUP)]
        self.capacities = np.empty(shape.experts, np.int32)
        for group in self.groups:
            self.capacities[group] = -(-loads[group].max() // CAPACITY_STEP) * CAPACITY_STEP
        sizes = [(len(group), self.capacities[group[0]]) for group in self.groups]
        self.tiles = [np.ones((*size, shape.dim), np.float16) for size in sizes]
        self.results = [np.ones((g * c, shape.dim), np.float16) for g, c in sizes]
        self.slots = [np.ones(size, np.int32) for size in sizes]
        self.slot_rows = [slots.reshape(-1) for slots in self.slots]
        self.seconds: dict[str, list[float]] = {}

    def chain(self) -> None:
        order, offsets = self._step("bucket", core.bucket, self.ids, self.shape.experts)
        kept, kept_offsets, _ = self._step(
            "capacity", core.capacity, order, offsets, self.capacities
        )
        k = self.shape.top_k
        arguments = (self.x, kept, kept_offsets, self.groups, k, self.tiles, self.slots)
        self._step("pack", core.pack_groups, *arguments)
        self._step("combine", core.combine, self.results, self.slot_rows, self.scores, self.out)

    def _step(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        result: list[Any] = []
        seconds = timed(lambda: result.append(call(*arguments)))
        self.seconds.setdefault(name, []).append(seconds)
        return result[0]

    def check(self) -> None:
        """The sums of the packed rows are the tokens themselves times their scores' sums."""
        self.chain()
        for tile, result in zip(self.tiles, self.results, strict=True):
            result[:] = tile.reshape(result.shape)
        self.chain()
        half = np.array(self.x.astype(mx.float16).astype(mx.float32))
        want = half * self.scores.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(self.out, want, rtol=1e-4, atol=1e-4)
        self.seconds.clear()

    def bytes_moved(self) -> dict[str, int]:
        """Bytes that each step must read and write."""
        rows, tiles = self.ids.size * self.shape.dim * 2, sum(t.nbytes for t in self.tiles)
        return {"pack": self.x.nbytes + tiles, "combine": rows + self.out.nbytes, "copy": 2 * rows}


class Copy:
    """memcpy of so many bytes by so many threads."""

    def __init__(self, size: int, threads: int):
        self.source, self.target = np.full(size, 3, np.uint8), np.full(size, 5, np.uint8)
        self.threads = threads
        self.pool = ThreadPoolExecutor(max(1, threads - 1))

    def __call__(self) -> None:
        chunks = itertools.count(0, COPY_CHUNK)  # next() is atomic
        others = [self.pool.submit(self._copy, chunks) for _ in range(self.threads - 1)]
        self._copy(chunks)
        for other in others:
            other.result()

    def _copy(self, chunks: itertools.count[int]) -> None:
        size, source, target = self.source.size, self.source.ctypes.data, self.target.ctypes.data
        while (at := next(chunks)) < size:
            ctypes.memmove(target + at, source + at, min(COPY_CHUNK, size - at))


def measure(layer: Layer, rounds: int) -> dict[str, Any]:
    """Summaries in seconds, and the ratio of the chain to the copy."""
    layer.check()
    moved = layer.bytes_moved()
    copy = Copy(moved["copy"] // 2, core.num_threads())
    alone = Copy(copy.source.size, 1)
    in_turns({"chain": layer.chain, "copy": copy}, 2)
    layer.seconds.clear()
    seconds = in_turns({"chain": layer.chain, "copy": copy, "copy, 1 thread": alone}, rounds)
    ratios = [a / b for a, b in zip(seconds["chain"], seconds["copy"], strict=True)]
    steps = {name: summary(values) for name, values in {**layer.seconds, **seconds}.items()}
    moved |= {"chain": moved["pack"] + moved["combine"], "copy, 1 thread": moved["copy"]}
    return {"steps": steps, "bytes": moved, "ratio": summary(ratios)}


def print_results(results: dict[str, Any]) -> None:
    rows = []
    for name, stats in results["steps"].items():
        moved = results["bytes"].get(name)
        rate = moved and f"{moved / stats['median'] / 1e9:.1f} GB/s"
        megabytes = moved and f"{moved / MIB:.0f} MiB"
        rows.append([name, format_seconds(stats["median"]), spread(stats), megabytes, rate])
    print(table([f"{core.num_threads()} threads", "median", "spread", "bytes", "rate"], rows))
    ratio = results["ratio"]
    print(
        f"the chain takes {ratio['median']:.2f}x the copy, spread {spread(ratio)} "
        f"(required at the default size: {LIMIT}x)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--routing", choices=["uniform", "zipf"], default="uniform")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of x"
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--check", action="store_true", help=f"exit 1 above {LIMIT}x the copy")
    parser.add_argument("--json")
    options = parser.parse_args()
    print_machine()
    shape = Shape(options.experts, options.top_k, options.dim, hidden=0)
    layer = Layer(shape, options.tokens, options.routing, options.dtype)
    slots = sum(s.size for s in layer.slots)
    print(
        f"{options.tokens} tokens x {options.top_k}, {options.routing}: {layer.ids.size} "
        f"assignments in {slots} slots of {len(layer.groups)} tiles, d {options.dim}, "
        f"{options.dtype}, {core.isa()}"
    )
    results = measure(layer, options.rounds)
    print_results(results)
    write_json(options.json, {"options": vars(options), **results})
    return 1 if options.check and results["ratio"]["median"] > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
