"""One dispatch for each group of experts against one for each expert, on the host executor.

    python benchmarks/dispatch.py [--check] [--dispatch-ms 0.2] [--experts 128] [--tokens 512]
                                  [--routing zipf] [--json F]

A forward of one layer (bucket, pack, submit, overflow on the kernels meanwhile, wait, combine),
both sides in turns, with the same largest capacity for each expert and a device-like wait before
each dispatch, one after the other. The default layer is small, so that a dispatch costs about as
much beside its work as on an accelerator: there a group of 8 experts of 2048 x 768 takes about
0.5 ms. Experts are grouped by their loads in other draws of the same routing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from common import format_seconds, in_turns, print_machine, spread, summary, write_json
from workload import Shape, route

from mlx_moe import core
from mlx_moe.static import Group, StaticLayer
from mlx_moe.static_flow import run
from mlx_moe.stats import StaticCounters
from mlx_moe.tables import table

REQUIRED = 3  # times fewer dispatches than experts touched
STEP = 32  # capacities are multiples of it
NEVER = 1 << 30


class Weights:
    """Random experts in a weight file, as a compiled group has them, and for the kernels."""

    def __init__(self, options: argparse.Namespace, directory: Path):
        self.width, self.inner = options.width, options.inner
        random = np.random.default_rng(options.seed + 1)
        shapes = [(self.inner, self.width)] * 2 + [(self.width, self.inner)]
        self.stacks = [
            (random.standard_normal((options.experts, *s)) / s[1] ** 0.5).astype(np.float16)
            for s in shapes
        ]
        self.path = directory / "weight.bin"
        self.path.write_bytes(b"".join(stack.tobytes() for stack in self.stacks))
        self.matrices = [core.Matrix(mx.array(stack)) for stack in self.stacks]

    def program(self, executor: Any, experts: np.ndarray, capacities: list[int]) -> int:
        size = 2 * self.width * self.inner
        count = self.stacks[0].shape[0]
        tensors = [
            (*(((matrix * count + int(e)) * size, None) for matrix in range(3)), None, None, None)
            for e in experts
        ]
        return executor.load(str(self.path), self.width, self.inner, "swiglu", capacities, tensors)


def layer(
    weights: Weights, executor: Any, tiers: np.ndarray, size: int
) -> tuple[StaticLayer, StaticCounters]:
    """All experts hot, `size` to a group; each has the capacity that its load asks for."""
    order = np.argsort(-tiers, kind="stable")
    groups = []
    for at in range(0, order.size, size):
        experts = np.sort(order[at : at + size]).astype(np.int32)
        tier = int(tiers[experts].max())
        capacities = list(range(STEP, tier + 1, STEP))
        program = weights.program(executor, experts, capacities)
        groups.append(Group(f"g{at}", experts, tuple(capacities), (program,), NEVER))
    return StaticLayer("layer", executor, groups, order.size, 1), StaticCounters("layer", set())


def measure(options: argparse.Namespace, directory: Path) -> dict[str, dict[str, Any]]:
    """For each side its times, and dispatches, padding and overflow of a forward."""
    weights = Weights(options, directory)
    shape = Shape(options.experts, options.top_k, options.width, options.inner)
    draws = [route(shape, options.routing, options.tokens, 0, call) for call in range(9)]
    *past, ids = [ids.astype(np.uint32) for ids in draws]
    loads = np.stack([np.bincount(i.reshape(-1), minlength=options.experts) for i in past])
    tiers = np.maximum(-(-np.quantile(loads, 0.9, axis=0) // STEP) * STEP, STEP).astype(int)
    random = np.random.default_rng(options.seed + 2)
    x = mx.array(random.standard_normal((options.tokens, options.width)).astype(np.float32))
    scores = mx.array(random.random((options.tokens, options.top_k)).astype(np.float32))
    routed = mx.array(ids)
    mx.eval(x, scores, routed)
    sides: dict[str, Any] = {}
    for name, size in (("grouped", options.group), ("one each", 1)):
        executor = core.HostExecutor(dispatch_seconds=options.dispatch_ms / 1e3)
        sides[name] = layer(weights, executor, tiers, size)

    def cold(assignments: np.ndarray) -> mx.array:
        rows = x[mx.array(assignments // options.top_k)].astype(mx.float16)
        own = mx.array(ids.reshape(-1)[assignments][:, None])
        out = mx.zeros((assignments.size, 1, options.width), mx.float16)
        mx.eval(rows, own, out)
        core.swiglu(rows, own, *weights.matrices, out)
        return out.reshape(-1, options.width)

    def forward(name: str) -> mx.array:
        static, counters = sides[name]
        return run(static, counters, x, routed, scores, cold, options.width, mx.float32)

    results = [np.array(forward(name)) for name in sides]
    wrong = np.linalg.norm(results[0] - results[1]) / np.linalg.norm(results[1])
    assert wrong < 2e-3, f"the two sides differ by {wrong}"
    facts = {name: counters.as_dict() for name, (_, counters) in sides.items()}
    calls = {name: lambda name=name: forward(name) for name in sides}
    for name, seconds in in_turns(calls, options.rounds).items():
        facts[name] |= summary(seconds)
        facts[name]["touched"] = int(np.unique(ids).size)
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--inner", type=int, default=128)
    parser.add_argument("--group", type=int, default=8, help="experts to a group")
    parser.add_argument("--routing", choices=("zipf", "uniform"), default="zipf")
    parser.add_argument("--dispatch-ms", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    parser.add_argument("--check", action="store_true", help="exit 1 unless it is as required")
    options = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as directory:
        facts = measure(options, Path(directory))
    slots = {name: f["hot"] + f["padding"] for name, f in facts.items()}
    rows = [
        [
            name,
            f["dispatches"],
            f["waits"],
            f"{f['padding'] / slots[name]:.0%}",
            f["spilled"],
            format_seconds(f["median"]),
            spread(f),
        ]
        for name, f in facts.items()
    ]
    header = ["dispatch", "dispatches", "waits", "padding", "spilled", "median", "spread"]
    print(table(header, rows))
    touched = facts["grouped"]["touched"]
    fewer = touched / facts["grouped"]["dispatches"]
    faster = facts["one each"]["median"] / facts["grouped"]["median"]
    print(
        f"{touched} experts touched: {fewer:.1f}x fewer dispatches (required {REQUIRED}x), "
        f"{faster:.2f}x as fast (required more than 1x)"
    )
    results = {"options": vars(options), **facts, "fewer": fewer, "faster": faster}
    write_json(options.json, results)
    return int(options.check and not (fewer >= REQUIRED and faster > 1))


if __name__ == "__main__":
    sys.exit(main())
