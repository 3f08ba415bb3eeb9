"""The simulator against this machine: fitted on some shapes, held to others that it did not see.

    python benchmarks/simulate_check.py [--check] [--only cpu disk ring] [--json F]

cpu     `core.swiglu_combine` on 4-bit layers, none of whose weights are in a cache when called.
        Fitted: seconds by rows of an expert, all experts alike, of FITTED shapes. Predicted: the
        same call on HELD_OUT shapes with real numbers of tokens, Zipf and uniform routing.
disk    the expert store's direct reads. Fitted: a start and a bandwidth, of one size of expert.
        Predicted: other numbers of experts, and of another size.
ring    `mx.distributed.all_sum` of two local ranks. Fitted: a start and a bandwidth, of two sizes.
        Predicted: sizes between.

`--check` exits 1 if a prediction of cpu is off by more than 20 %; disk and ring are printed. The
machine's own speed moves by a third within seconds. So every case, fitted or held out, is called
once in each of ROUNDS rounds, in another order each time; a round's speed is read off its fitted
cases and divided out; medians over rounds are fitted and compared. How far the medians of every
other round are from those of the rest is printed beside the error: so much is the machine's doing.
Ranks spin while they wait: never run `ring` at real-time priority.
Takes two and a half minutes, and 4 GB.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from common import last_level_cache_bytes, print_machine, timed, write_json
from contestants.ours import matrices
from simulate_links import disk, ring
from weights import random_layer
from workload import Shape, layers_beyond_cache, random_rows, route

from mlx_moe import core
from mlx_moe.devices import Device, load_device
from mlx_moe.measured import Measurements, Sample
from mlx_moe.progress import progress_bar
from mlx_moe.simulate import simulate
from mlx_moe.simulate_routing import Routing
from mlx_moe.simulate_shapes import SHAPES
from mlx_moe.tables import table
from mlx_moe.tune_fit import LEAST

LIMIT = 0.20
FITTED = [
    *(Shape(128, 8, 1024, 512), Shape(64, 8, 1024, 1024)),
    *(Shape(32, 4, 2048, 768), Shape(32, 4, 2048, 1536)),
]
HELD_OUT = [Shape(64, 8, 2048, 1024), Shape(32, 4, 1536, 768), Shape(128, 8, 1024, 768)]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)  # of each expert
FEW = (2, 4, 8)  # experts with one row
TOKENS = (1, 8, 32, 128, 512)
ROUTING = ("zipf", "uniform")
ROUNDS = 21


@cache
def larger_than_caches() -> np.ndarray:
    return np.ones(2 * last_level_cache_bytes() // 4, np.float32)


class Layers:
    """Layers of one shape that take turns, so that a call does not find its weights in a cache."""

    def __init__(self, shape: Shape):
        self.shape = shape
        count = layers_beyond_cache(shape, "q4", last_level_cache_bytes())
        self._arrays = [random_layer(shape, "q4", seed) for seed in range(count)]
        self._layers = [matrices(layer) for layer in self._arrays]
        self._turn = 0

    def seconds(self, ids: np.ndarray) -> float:
        """Of one call for expert ids [T, k]."""
        tokens, top_k = ids.shape
        self._turn = (self._turn + 1) % len(self._layers)
        x = mx.array(random_rows(np.random.default_rng(1), tokens, self.shape.dim))
        x = x.astype(mx.bfloat16)
        scores = mx.full((tokens, top_k), 1 / top_k, dtype=mx.float32)
        out, chosen = mx.zeros_like(x), mx.array(ids.astype(np.uint32))
        mx.eval(x, scores, out, chosen)
        gate, up, down = self._layers[self._turn]
        read = len(np.unique(ids)) * self.shape.expert_bytes("q4")
        if read * len(self._layers) < 2 * last_level_cache_bytes():  # few experts could stay there
            np.dot(larger_than_caches(), larger_than_caches())
        return timed(lambda: core.swiglu_combine(x, chosen, scores, gate, up, down, out))


def alike(shape: Shape, rows: int) -> np.ndarray:
    """Ids with so many rows for every expert."""
    tokens = -(-rows * shape.experts // shape.top_k)
    return (np.arange(tokens * shape.top_k) % shape.experts).reshape(tokens, shape.top_k)


Case = tuple[Any, ...]
Cases = dict[Shape, dict[Case, list[np.ndarray]]]  # ids [T, k] of each round, in turn
Taken = dict[Shape, dict[Case, list[float]]]  # seconds in each round


def fit_cases(shape: Shape) -> dict[Case, list[np.ndarray]]:
    """(experts, rows): all experts alike, and few with one row, for what a call takes."""
    random = np.random.default_rng(2)
    cases: dict[Case, list[np.ndarray]] = {
        (shape.experts, rows): [alike(shape, rows)] for rows in ROWS
    }
    for few in FEW:
        cases[few, 1] = [random.permutation(shape.experts)[None, :few] for _ in range(ROUNDS)]
    return cases


def held_out_cases(shape: Shape) -> dict[Case, list[np.ndarray]]:
    """(tokens, routing): ids that differ from call to call, so that no cache keeps the experts."""
    return {
        (tokens, routing): [route(shape, routing, tokens, 0, n) for n in range(ROUNDS)]
        for tokens in TOKENS
        for routing in ROUTING
    }


def in_rounds(cases: Cases) -> Taken:
    """Every case once a round, in another order each time: a machine's speed changes within
    seconds, and what is fitted must have seen the same of it as what is predicted."""
    layers = {}
    for shape in cases:
        layers[shape] = Layers(shape)
        print(f"built {shape.dim} x {shape.hidden}", file=sys.stderr)
    every = [(shape, case, ids) for shape, own in cases.items() for case, ids in own.items()]
    taken: Taken = {shape: {case: [] for case in own} for shape, own in cases.items()}
    random = np.random.default_rng(3)
    with progress_bar(total=ROUNDS, unit="round") as bar:
        for turn in range(ROUNDS):
            for number in random.permutation(len(every)):
                shape, case, ids = every[number]
                layers[shape].seconds(np.zeros((1, 1), np.int64))  # threads wake up untimed
                taken[shape][case].append(layers[shape].seconds(ids[turn % len(ids)]))
            bar.update()
    return taken


def at_one_speed(taken: Taken) -> Taken:
    """Seconds as at the machine's median speed: a round's own is read off the FITTED cases, never
    off those that are predicted."""
    seconds = np.array([own for shape in FITTED for own in taken[shape].values()])
    slow = np.median(seconds / np.median(seconds, axis=1, keepdims=True), axis=0)  # [rounds]
    print(f"rounds took {slow.min():.2f} to {slow.max():.2f} times the median one")
    return {
        shape: {case: (np.array(s) / slow).tolist() for case, s in own.items()}
        for shape, own in taken.items()
    }


def fitted(taken: Taken) -> dict[int, Device]:
    """Profiles whose curves are what the FITTED shapes took, by the size of expert that the start
    of a call is of.

    A call of n of E experts takes the start and n equal parts of the rest: the start is the median
    over few experts of what is left of them.
    """
    measured = {
        shape: {case: statistics.median(seconds) for case, seconds in taken[shape].items()}
        for shape in FITTED
    }
    starts: dict[Shape, float] = {}
    for shape in FITTED:
        many, own = measured[shape][shape.experts, 1], []
        for few in FEW:
            part = few / shape.experts
            own.append((measured[shape][few, 1] - part * many) / (1 - part))
        starts[shape] = max(statistics.median(own), LEAST)
    samples = tuple(
        Sample(
            "cold",
            shape.dim,
            shape.hidden,
            shape.experts,
            rows,
            max(seconds - starts[shape], LEAST),
        )
        for shape in FITTED
        for (experts, rows), seconds in measured[shape].items()
        if experts == shape.experts
    )
    device = replace(load_device("cpu"), curves=Measurements("now", None, samples))
    found = {}
    for shape, start in starts.items():
        number = replace(device.numbers["cold_seconds"], value=start)
        found[size_of(shape)] = replace(device, numbers={**device.numbers, "cold_seconds": number})
    return found


def size_of(shape: Shape) -> int:
    return shape.dim * shape.hidden


def between(devices: dict[int, Device], shape: Shape) -> Device:
    """The profile for experts of a size: as its curves are on the line between two sizes fitted,
    so is its start. `mlx_moe tune --model` measures at the model's own size."""
    sizes = sorted(devices)
    starts = [devices[size]["cold_seconds"] for size in sizes]
    device = devices[sizes[0]]
    start = float(np.interp(size_of(shape), sizes, starts))
    number = replace(device.numbers["cold_seconds"], value=start)
    return replace(device, numbers={**device.numbers, "cold_seconds": number})


def predicted(device: Device, shape: Shape, ids: np.ndarray) -> float:
    """What the simulator says of a call for expert ids [T, k]."""
    loads = np.bincount(ids.reshape(-1), minlength=shape.experts)[None].astype(np.float64)
    model = replace(SHAPES["qwen3-30b-a3b"], layers=1, experts=shape.experts, top_k=shape.top_k)
    facts = replace(model, hidden=shape.dim, inner=shape.hidden).facts()
    one = Routing("check", facts, np.array([len(ids)]), [loads], "ids")
    return simulate(one, device, ("cold",))[0].seconds


def cpu() -> list[dict[str, Any]]:
    asked = {shape: fit_cases(shape) for shape in FITTED}
    asked |= {shape: held_out_cases(shape) for shape in HELD_OUT}
    taken = at_one_speed(in_rounds(asked))
    devices = fitted(taken)
    found = []
    for shape in HELD_OUT:
        device = between(devices, shape)
        for (tokens, routing), seconds in taken[shape].items():
            guesses = [predicted(device, shape, ids) for ids in asked[shape][tokens, routing]]
            times = [guess / one for guess, one in zip(guesses, seconds, strict=True)]
            halves = [statistics.median(times[half::2]) for half in range(2)]
            median = statistics.median(seconds)
            size = f"{shape.experts} experts, top {shape.top_k}, {shape.dim} x {shape.hidden}"
            found.append(
                {
                    "part": "cpu",
                    "case": f"{size}, {tokens} tokens, {routing}",
                    "measured": median,
                    "predicted": median * statistics.median(times),
                    "apart": abs(halves[0] / halves[1] - 1),
                }
            )
    return found


PARTS = {"cpu": cpu, "disk": disk, "ring": ring}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--check", action="store_true", help="exit 1 on a miss")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    print_machine()
    results = []
    for part in options.only:
        try:
            results += PARTS[part]()
        except OSError as error:
            print(f"{part}: not measured: {error}")
    for r in results:
        r["error"] = r["predicted"] / r["measured"] - 1
    rows = [
        [
            f"{r['part']}: {r['case']}",
            f"{r['measured'] * 1e3:.3f}",
            f"{r['predicted'] * 1e3:.3f}",
            f"{r['error']:+.1%}",
        ]
        for r in results
    ]
    print(table(["held out", "measured, ms", "simulated, ms", "error"], rows))
    worst = 0.0
    for part in options.only:
        errors = [abs(r["error"]) for r in results if r["part"] == part]
        if errors:
            mean = statistics.mean(errors)
            print(f"{part}: error {mean:.1%} on average, {max(errors):.1%} at most")
            worst = max(errors) if part == "cpu" else worst
        apart = [r["apart"] for r in results if r["part"] == part and "apart" in r]
        if apart:
            print(
                f"{part}: half of the rounds against the other half: {statistics.mean(apart):.1%} "
                f"on average, {max(apart):.1%} at most"
            )
    print(f"required of cpu: {LIMIT:.0%} at most")
    write_json(options.json, results)
    return int(options.check and worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
