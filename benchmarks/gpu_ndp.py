"""SIMULATED: experts on a GPU with near-data units (NDP), beside the GPU-NDP paper's ratios.

    python benchmarks/gpu_ndp.py [--experts 2 4 8 32] [--hidden 1024 2048 4096] [--units 2 4 8]

Nothing here is run, and nothing was fitted to the paper (arXiv 2601.03992): the numbers are in the
table of assumptions that is printed first. A GPU has attention; the experts lie in memory modules
with a processing unit each, reached over one bus. Decoding and short prompts, as at the edge:

    static      whole experts dealt out to the units, as expert parallelism does
    balanced    whole experts where mlx_moe.schedule.Scheduler puts them, live
    tensor      the same, and it may split an expert over units
    prefetched  the same with the GPU as one more unit: the experts that pay most are in its memory,
                by counts kept while running, before they are asked for

A scheduler has seen the steps before; what re-plans move travels over the bus too.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import write_json

from mlx_moe.cost import expert_of
from mlx_moe.devices import load_device
from mlx_moe.layer_facts import WeightFacts
from mlx_moe.simulate import outcome
from mlx_moe.simulate_layers import Dense
from mlx_moe.simulate_routing import Routing, of_histograms, read_histograms
from mlx_moe.simulate_schedule import scheduled, scheduler_of
from mlx_moe.simulate_shapes import Shape
from mlx_moe.simulate_spread import Link, OnUnits, Spread, SpreadUnit, device_of, fixed, in_turn
from mlx_moe.tables import table

DATA = Path(__file__).parent / "data" / "gpt-oss-20b-experts.json.gz"
STRATEGIES = ("static", "balanced", "tensor", "prefetched")
PAPER = "GPU-NDP against the state of the art (arXiv 2601.03992): 2.41x mean, 2.56x max"
LAYERS, CONTEXT, SEED = 4, 1024, 601
STEPS, STAY = 64, 16  # half of them are seen before; so many in a row are of one domain
INNER = 3.5  # times hidden
GPU_SHARE = 0.25  # of the experts that the GPU's memory holds

GPU_FLOPS, GPU_BANDWIDTH, GPU_START = 0.5 * 112.6e12, 0.8 * 960e9, 5e-6
NDP_FLOPS, NDP_BANDWIDTH, NDP_START = 256e9, 2 * 38.4e9, 2e-6
BUS = Link("bus", 5e-6, 0.8 * 63e9)
ASSUMPTIONS = [
    ("GPU", "RTX 5080: 112.6 TFLOP/s in fp16 with f32 sums, taken by half; 960 GB/s, taken at 0.8 "
     "(NVIDIA's specification; shares assumed)"),
    ("GPU's start", "5 us for each expert with work: a kernel launch (assumed)"),
    ("GPU's memory", "a quarter of the experts: 16 GB of the 60 GB of Qwen3-30B-A3B in 16 bits"),
    ("NDP unit", "76.8 GB/s: a DDR5-4800 module's 38.4 GB/s (JEDEC), twice by working on its two "
     "ranks at once (assumed); 256 GFLOP/s (assumed)"),
    ("NDP unit's start", "2 us for each expert, or part of one, with work (assumed)"),
    ("bus", "PCIe 5.0 x16, 63 GB/s, taken at 0.8; 5 us a message (assumed). One for all units"),
    ("experts", f"SwiGLU, 16 bits, inner features {INNER} times hidden as in Mixtral, top 2 (32 "
     "experts: top 4)"),
    ("routing", "gpt-oss-20b's popularity by layer and domain, resampled; another domain after "
     f"{STAY} steps"),
    ("attention", f"on the GPU, hidden / 128 heads, a quarter of them for keys, {CONTEXT} tokens "
     "before"),
    ("left out", "energy (no numbers), the router, refresh and other traffic of the modules"),
]  # fmt: skip


def units_of(count: int) -> list[SpreadUnit]:
    base = load_device("cpu")
    gpu = device_of(
        base,
        "gpu",
        cold_flops=GPU_FLOPS,
        cold_bandwidth=GPU_BANDWIDTH,
        cold_seconds=GPU_START,
    )
    ndp = device_of(
        base,
        "ndp",
        cold_flops=NDP_FLOPS,
        cold_bandwidth=NDP_BANDWIDTH,
        cold_seconds=NDP_START,
    )
    modules = [SpreadUnit(f"ndp{i}", ndp, BUS) for i in range(count)]
    return [SpreadUnit("gpu", gpu, BUS, rows=False), *modules]


def shape_of(experts: int, hidden: int) -> Shape:
    heads = hidden // 128
    top_k = 4 if experts >= 32 else 2
    sizes = (LAYERS, experts, top_k, hidden, int(INNER * hidden), heads, max(1, heads // 4), 128)
    return Shape("mixtral", *sizes, WeightFacts(None, None, None, "bfloat16"))


def simulated(experts: int, hidden: int, count: int, tokens: int) -> dict[str, Any]:
    shape, units = shape_of(experts, hidden), units_of(count)
    histograms = read_histograms(DATA)
    drawn = of_histograms(histograms, shape.facts(), tokens, STEPS, SEED, stay=STAY)
    before, steps = drawn.only(slice(0, STEPS // 2)), drawn.only(slice(STEPS // 2, None))
    flops = shape.attention_flops(tokens, CONTEXT)
    dense = Dense(np.full(steps.steps, flops), 2.0 * shape.attention_weights)
    found: dict[str, Any] = {"experts": experts, "hidden": hidden, "units": count, "tokens": tokens}
    for name in STRATEGIES:
        spreads = [spread_of(name, units, before, steps, layer) for layer in range(LAYERS)]
        done = outcome(name, OnUnits(steps, units, spreads, dense), steps.steps, None)
        found[name] = done.as_dict()
        found[name]["moved"] = sum(float(s.arriving.sum()) for s in spreads)
        found[name]["times"] = found["static"]["seconds"] / done.seconds
    return found


def spread_of(
    name: str, units: list[SpreadUnit], before: Routing, steps: Routing, layer: int
) -> Spread:
    """Where a layer's experts are; the GPU is unit 0, the modules the others."""
    facts, count = steps.facts[layer], len(units) - 1
    if name == "static":
        return fixed(in_turn(facts.experts, range(1, count + 1), count + 1), steps.steps)
    members = units if name == "prefetched" else units[1:]
    size = facts.experts * expert_of(facts).cold_bytes
    memory = [GPU_SHARE * size, *[size] * count] if name == "prefetched" else None
    shards = 1 if name == "balanced" else count
    scheduler = scheduler_of(facts, members, shards, memory)
    found = scheduled(scheduler, before.loads[layer], steps.loads[layer])
    if name == "prefetched":
        return found
    return Spread(_beside_gpu(found.shares), _beside_gpu(found.arriving))


def _beside_gpu(values: Any) -> Any:
    """The same with nothing on the GPU, which comes first."""
    return np.concatenate([np.zeros_like(values[..., :1]), values], axis=-1)


def summary_rows(results: list[dict[str, Any]], key: str) -> list[list[object]]:
    rows: list[list[object]] = []
    for value in sorted({r[key] for r in results}):
        own = [r for r in results if r[key] == value]
        cells = [f"{key} {value}", len(own)]
        for name in STRATEGIES[1:]:
            times = [r[name]["times"] for r in own]
            cells.append(f"{statistics.mean(times):.2f} ({min(times):.2f} to {max(times):.2f})")
        rows.append(cells)
    return rows


def print_results(results: list[dict[str, Any]]) -> None:
    header = ["SIMULATED, times faster than static", "cases", *STRATEGIES[1:]]
    rows = [row for key in ("tokens", "experts", "hidden", "units")
            for row in summary_rows(results, key)]  # fmt: skip
    every = [dict(r, all="cases") for r in results]
    print("\n" + table(header, [*rows, *summary_rows(every, "all")]))
    print("mean (least to most) of latency with attention\n" + PAPER)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, nargs="+", default=[2, 4, 8, 32])
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--units", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if min(options.experts) < 2 or min(options.units) < 1 or min(options.tokens) < 1:
        parser.error("expected 2 experts, a unit and a token, or more")
    if any(hidden < 128 or hidden % 128 for hidden in options.hidden):
        parser.error("expected --hidden of whole heads: multiples of 128")
    print("ASSUMPTIONS\n")
    print("\n".join(f"{name:<18} {what}" for name, what in ASSUMPTIONS))
    grid = itertools.product(options.experts, options.hidden, options.units, options.tokens)
    results = [simulated(*case) for case in grid]
    print_results(results)
    write_json(options.json, {"simulated": True, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
