"""What calibration adds to a replaced prefill of the same documents.

    python benchmarks/calibrate.py [--repeats 7] [--quick] [--check] [--json F]

Prefill is mlx-lm's: chunks of 512 tokens, a fresh cache for each document, the cache evaluated
after each chunk. Calibration is `mlx_moe.calibrate` from the call to the written file: identity,
counting, quantiles and saving. Both run the same replaced model, in turns; the figure is the
median of the pairs' ratios, of the clock and of processor time (all threads), which other work on
the machine disturbs less. Models: the trained example, and two layers of Qwen3-30B-A3B (128
experts, top-8, 2048 x 768, 4-bit). `--check` exits 1 if either is
above 15 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from common import format_seconds, print_machine, spread, summary, write_json
from mlx_lm.models.cache import make_prompt_cache
from models import qwen3

import mlx_moe
from mlx_moe.tables import table

LIMIT = 0.15
CHUNK, VOCAB = 512, 2048
EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-qwen3-moe"


def example() -> Any:
    return mlx_lm.load(str(EXAMPLE))[0]


def qwen3_30b() -> Any:
    return qwen3(layers=2, experts=128, vocab=VOCAB)


# A model, and the lengths of the documents that it reads.
CASES = {
    "tiny-qwen3-moe": (example, (1024, 1024, 700)),
    "Qwen3-30B-A3B, 2 layers": (qwen3_30b, (1024, 700)),
}


def prefill(model: Any, documents: list[list[int]]) -> None:
    for document in documents:
        cache = make_prompt_cache(model)
        for start in range(0, len(document), CHUNK):
            model(mx.array(document[start : start + CHUNK])[None], cache=cache)
            mx.eval([c.state for c in cache])
        mx.clear_cache()


def measure(model: Any, lengths: tuple[int, ...], repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    documents = [rng.integers(0, VOCAB, length).tolist() for length in lengths]
    mlx_moe.replace_moe_layers(model)
    mlx_moe.replace_linear_layers(model)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "c.npz"
        calls = {
            "prefill": lambda: prefill(model, documents),
            "calibrate": lambda: mlx_moe.calibrate(model, documents, chunk=CHUNK, out=out),
        }
        for call in calls.values():  # warm up
            call()
        clocks: dict[str, dict[str, list[float]]] = {name: {} for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                for clock, seconds in both_clocks(call).items():
                    clocks[name].setdefault(clock, []).append(seconds)
    return {
        "tokens": sum(lengths),
        **{name: summary(seconds["clock"]) for name, seconds in clocks.items()},
        "overhead": overheads(clocks, "clock"),
        "processor_overhead": overheads(clocks, "processor"),
    }


def both_clocks(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds of one call."""
    clock, processor = time.perf_counter(), time.process_time()
    call()
    return {"clock": time.perf_counter() - clock, "processor": time.process_time() - processor}


def overheads(clocks: dict[str, dict[str, list[float]]], clock: str) -> list[float]:
    """First quartile, median and third of what calibrating adds to the prefill before it."""
    pairs = zip(clocks["prefill"][clock], clocks["calibrate"][clock], strict=True)
    ratios = [calibrate / prefill - 1 for prefill, calibrate in pairs]
    return [float(q) for q in np.percentile(ratios, [25, 50, 75])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="three repeats")
    parser.add_argument("--check", action="store_true", help="exit 1 above 15 %%")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    print_machine()
    repeats = 3 if options.quick else options.repeats
    results = {name: measure(make(), lengths, repeats) for name, (make, lengths) in CASES.items()}
    header = [
        "model",
        "tokens",
        "prefill",
        "spread",
        "calibrate",
        "spread",
        "overhead",
        "of processor time",
    ]
    rows = []
    for name, row in results.items():
        cells: list[Any] = [name, row["tokens"]]
        for side in ("prefill", "calibrate"):
            cells += [format_seconds(row[side]["median"]), spread(row[side])]
        for kind in ("overhead", "processor_overhead"):
            low, median, high = row[kind]
            cells.append(f"{median:+.1%} ({low:+.1%} to {high:+.1%})")
        rows.append(cells)
    print(table(header, rows))
    write_json(options.json, results)
    medians = [row[k][1] for row in results.values() for k in ("overhead", "processor_overhead")]
    slow = max(medians) > LIMIT
    return 1 if options.check and slow else 0


if __name__ == "__main__":
    sys.exit(main())
