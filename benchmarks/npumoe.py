"""SIMULATED: NPUMoE's evaluation shapes on M2 Max and M2 Ultra, beside the paper's ratios.

    python benchmarks/npumoe.py [--tokens 2048] [--json F]

Nothing here is run on a Mac, and nothing was fitted to the paper (arXiv 2604.18788): the numbers
are those of the device profiles (python/mlx_moe/devices), others' or assumed, and the ratios come
out as they do. Compared are prefill steps of Phi-3.5-MoE, Phi-tiny-MoE and Qwen3-30B-A3B: experts
and attention on the processor (cpu); on the GPU (cold); experts as one Core ML program each, one
capacity for all (naive); and ours: planned beside the GPU (plan), planned beside the processor
(plan-cpu), and with 90 % of the assignments forced onto the Neural Engine (forced).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import write_json

from mlx_moe.cost import bytes_of
from mlx_moe.devices import Device, load_device
from mlx_moe.layer_facts import WeightFacts
from mlx_moe.simulate import STRATEGIES, Outcome, simulate
from mlx_moe.simulate_layers import Dense
from mlx_moe.simulate_routing import Routing, of_histograms, read_histograms
from mlx_moe.simulate_shapes import SHAPES, Shape
from mlx_moe.tables import table

DATA = Path(__file__).parent / "data" / "gpt-oss-20b-experts.json.gz"
MODELS = ("phi-3.5-moe", "phi-tiny-moe", "qwen3-30b-a3b")
DEVICES = {"m2-max": 96, "m2-ultra": 192}  # GB
LAYERS = 6  # of each model, with different routing; the rest is alike
CHUNKS = 2  # of a prompt; attention sees those before
PROMPTS = 6
SEED = 6
OURS = ("plan", "plan-cpu", "forced")
BASELINES = ("cpu", "cold", "naive")
PAPER = {"seconds": (1.32, 5.55), "joules": (1.81, 7.37), "cpu_seconds": (1.78, 5.54)}
WORDS = {"seconds": "latency", "joules": "energy", "cpu_seconds": "processor time"}
ASSUMPTIONS = [
    ("model shapes", "config.json of each model on Hugging Face"),
    ("weights", "4 bits in groups of 64 (mlx-lm's default); static programs fp16. --bf16: 16 bits"),
    ("routing", "gpt-oss-20b's popularity by layer and domain, resampled to the model's experts: "
     "the models' own is not known to us"),
    ("prompts", f"{CHUNKS} chunks each; the paper's long-context work is not known in detail"),
    ("attention", "on the processor with cpu and plan-cpu, else on the GPU"),
    ("memory", "96 and 192 GB, the largest Mac Studios with these chips (Apple's specifications); "
     "half of what the experts leave is for hot ones"),
    ("speeds and watts", "the device profiles'; --sources prints each with its source"),
    ("energy", "of busy units and cores; what the machine draws besides is in --json"),
    ("processor time", "all cores while they compute; one core for every dispatch and wait"),
    ("left out", "shared memory bandwidth, heat, loading of programs"),
]  # fmt: skip


def steps(shape: Shape, tokens: int, seed: int) -> Routing:
    histograms = read_histograms(DATA)
    facts = replace(shape, layers=LAYERS).facts()
    found = of_histograms(histograms, facts, tokens, 2 * CHUNKS * PROMPTS, seed)
    return found


def dense(shape: Shape, routing: Routing, tokens: int) -> Dense:
    """Attention of the steps that are simulated: chunk 0, 1, ... of prompt after prompt."""
    _, rest = routing.halves()
    flops = [shape.attention_flops(tokens, (i % CHUNKS) * tokens) for i in range(rest.steps)]
    return Dense(np.array(flops), shape.attention_weights * bytes_of(shape.weights))


def experiment(
    model: str, device: Device, tokens: int, memory: float, bf16: bool
) -> tuple[list[Outcome], str]:
    shape = SHAPES[model]
    if bf16:
        shape = replace(shape, weights=WeightFacts(None, None, None, "bfloat16"))
    expert_bytes = 3 * shape.hidden * shape.inner * bytes_of(shape.weights)
    left = memory - shape.layers * shape.experts * expert_bytes
    hot = int(max(left, 0) / 2 * LAYERS / shape.layers)
    routing = steps(shape, tokens, SEED)
    outcomes = simulate(routing, device, memory=hot, dense=dense(shape, routing, tokens))
    fits = "" if left > 0 else " (does not fit this memory)"
    return outcomes, fits


def ratios(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Each of ours against each baseline: how many times less."""
    by_name = {o.strategy: o for o in outcomes}
    found = []
    for ours in OURS:
        for base in BASELINES:
            pair = {"ours": ours, "against": base}
            for key in PAPER:
                pair[key] = getattr(by_name[base], key) / getattr(by_name[ours], key)
            found.append(pair)
    return found


def numbers_table(devices: dict[str, Device]) -> str:
    """Every number that was used, with its source."""
    rows = []
    for name, device in devices.items():
        for key, number in {**device.numbers, **device.simulation}.items():
            if key == "memory_bytes":
                continue  # see the assumptions
            rows.append([f"{name} {key}", f"{number.value:.4g} {number.unit}", number.source])
    return "\n".join(f"{key:<26} {value:<32} {source}" for key, value, source in rows)


def print_results(results: list[dict[str, Any]]) -> None:
    rows = []
    for r in results:
        for o in r["outcomes"]:
            rows.append(
                [
                    f"{r['model']}, {r['device']}, {r['tokens']}{r['fits']}",
                    o["strategy"],
                    f"{o['seconds'] * 1e3 / LAYERS:.2f}",
                    f"{o['joules'] / LAYERS:.3f}",
                    f"{o['cpu_seconds'] * 1e3 / LAYERS:.2f}",
                    f"{o['dispatches'] / LAYERS:.1f}",
                    o["note"],
                ]
            )
    header = ["model, device, tokens", "strategy", "ms", "J", "CPU ms", "dispatches", ""]
    print("\nSIMULATED, a layer's experts and attention, means of steps:\n")
    print(table(header, rows))
    print("\nSIMULATED, times less than each baseline, least to most over models and devices:\n")
    rows = []
    for ours in OURS:
        for base in BASELINES:
            pairs = [
                p for r in results for p in r["ratios"] if (p["ours"], p["against"]) == (ours, base)
            ]
            cells = [f"{min(p[k] for p in pairs):.2f} to {max(p[k] for p in pairs):.2f}x"
                     for k in PAPER]  # fmt: skip
            rows.append([f"{ours} against {base}", *cells])
    paper = [f"{low:.2f} to {high:.2f}x" for low, high in PAPER.values()]
    rows.append(["NPUMoE against its baselines (arXiv 2604.18788, measured there)", *paper])
    print(table(["", *(WORDS[key] for key in PAPER)], rows))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="of a chunk")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--bf16", action="store_true", help="the models' weights in 16 bits")
    parser.add_argument("--sources", action="store_true", help="every number, with its source")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    devices = {name: load_device(name) for name in DEVICES}
    print("ASSUMPTIONS\n")
    print("\n".join(f"{name:<18} {what}" for name, what in ASSUMPTIONS))
    if options.sources:
        print("\nNUMBERS\n\n" + numbers_table(devices))
    results = []
    for model in options.models:
        for name, memory in DEVICES.items():
            for tokens in options.tokens:
                outcomes, fits = experiment(
                    model, devices[name], tokens, memory * 1e9, options.bf16
                )
                results.append(
                    {
                        "model": model,
                        "device": name,
                        "tokens": tokens,
                        "fits": fits,
                        "outcomes": [o.as_dict() for o in outcomes],
                        "ratios": ratios(outcomes),
                    }
                )
                print(f"simulated {model} on {name}, {tokens} tokens", file=sys.stderr)
    print_results(results)
    write_json(options.json, {"simulated": True, "strategies": STRATEGIES, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
