"""What the static path costs in quality on the example model, spilled and pruned.

    python benchmarks/quality.py [--check] [--json F] [--work DIR] [--skip-spill | --skip-prune]

1. Spill: the model in f32, its hot experts in fp16 tiles, overflow computed cold. Relative
   Frobenius error of the logits against the same model all on the cold path, and greedy text of 20
   prompts: where it parts from the cold path's, how near the two best tokens were.
2. Prune: the 4-bit model at the capacity factor whose drop rate is nearest 15 %. Accuracy on the
   2,400 items of examples/data against the cold path (--reference stock: against stock mlx-lm, an
   hour of one core), beside it the same capacities with overflow dropped at random.

Each calibrates on examples/data, plans for an m2-max with most assignments hot, compiles, and runs
on the host executor. --work keeps what was compiled and, of the items, the eighths that are done: a
run that was stopped goes on from there. --check fails
unless: error at most 2e-3, texts part only where the margin is below twice the error that 99 % of
tokens stay below; drop rate 10 to 20 %, less than 1.1 points lost, and more lost at random.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from common import print_machine, write_json
from mlx_lm.models.cache import make_prompt_cache

import mlx_moe
from mlx_moe.durable import write_json as write_whole
from mlx_moe.evaluation_data import Source, read_sources
from mlx_moe.evaluation_sides import counted, expert_layers
from mlx_moe.evaluation_tasks import paired
from mlx_moe.intervals import Interval
from mlx_moe.progress import progress_bar
from mlx_moe.static_paths import all_cold
from mlx_moe.tables import table
from mlx_moe.text import TextFiles

EXAMPLES = Path(__file__).parent.parent / "examples"
MODEL, DATA = EXAMPLES / "tiny-qwen3-moe", EXAMPLES / "data"
DEVICE, FORCE_HOT = "m2-max", 0.8
CALIBRATION_TOKENS = 60_000
WINDOWS, WINDOW = 12, 512  # of text, whose logits are compared; tokens
PROMPTS, PROMPT, STEPS = 20, 128, 32  # prompts, tokens, tokens generated
FACTORS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8)
SEARCH_TOKENS = 3072
WANTED_DROP = 0.15
PARTS = 8  # of the items, each kept when it is done
LIMITS = {"logit_error": 2e-3, "points": 1.1, "drop": (0.10, 0.20), "hot": 0.5, "items": 2000}


def prepared(model: Path, work: Path, **options: Any) -> tuple[Path, Path]:
    """A plan for the model and its artifacts, made where `work` has none."""
    plan_file, artifacts = work / "plan.json", work / "artifacts"
    if not plan_file.exists():
        work.mkdir(parents=True, exist_ok=True)
        loaded, tokenizer = mlx_moe.load(model)
        calibration = mlx_moe.calibrate(
            loaded,
            documents(tokenizer),
            max_tokens=CALIBRATION_TOKENS,
            files=model,
            progress=True,
        )
        plan = mlx_moe.make_plan(calibration, DEVICE, force_hot=FORCE_HOT, **options)
        plan.save(plan_file)
    mlx_moe.compile_plan(model, mlx_moe.Plan.load(plan_file), artifacts)
    return plan_file, artifacts


def documents(tokenizer: Any) -> list[list[int]]:
    """The calibration passages, from the files in turns."""
    files = [
        [document.tokens for document in TextFiles([path], tokenizer, WINDOW)]
        for path in sorted(DATA.glob("*.calibration.jsonl"))
    ]
    return [passage for passages in zip_longest(*files) for passage in passages if passage]


def spill(work: Path) -> dict[str, Any]:
    float32 = work / "float32"
    if not float32.exists():
        mlx_lm.convert(str(MODEL), str(float32), dequantize=True, dtype="float32")
    plan, artifacts = prepared(float32, work / "spill", overflow=0.05)
    model, tokenizer = mlx_lm.load(str(float32))
    mlx_moe.replace_moe_layers(model, plan, artifacts=artifacts, backend="host")
    mlx_moe.replace_linear_layers(model)
    sources = read_sources(sorted(DATA.glob("*.text.jsonl")), tokenizer)
    logits = compare_logits(model, sources)
    return {**logits, "texts": compare_texts(model, sources, logits["token_error"]["p99"])}


def windows(sources: list[Any], length: int, count: int) -> list[np.ndarray]:
    """[1, length] tokens, from the sources in turns."""
    return [
        np.array(sources[i % len(sources)].text[at : at + length], np.int32)[None]
        for i, at in enumerate(length * (n // len(sources)) for n in range(count))
    ]


def forward(model: Any, tokens: Any, cache: Any = None) -> np.ndarray:
    logits = model(mx.array(tokens), cache=cache)
    mx.eval(logits)
    return np.array(logits[0], np.float64)


def compare_logits(model: Any, sources: list[Any]) -> dict[str, Any]:
    layers = expert_layers(model)
    squares = norm = 0.0
    largest = []  # of each token
    counts: dict[str, int] = {}
    for tokens in progress_bar(iterable=windows(sources, WINDOW, WINDOWS), desc="logits"):
        before = counted(layers)
        found = forward(model, tokens)
        for name, count in counted(layers).items():
            counts[name] = counts.get(name, 0) + count - before[name]
        with all_cold(model):
            reference = forward(model, tokens)
        squares += float(((found - reference) ** 2).sum())
        norm += float((reference**2).sum())
        largest += list(np.abs(found - reference).max(axis=1))
    return {
        "tokens": WINDOW * WINDOWS,
        "logit_error": math.sqrt(squares / norm),
        "token_error": {f"p{p}": float(np.percentile(largest, p)) for p in (50, 99, 100)},
        "hot_share": counts["hot"] / counts["assignments"],
        "spilled": counts["spilled"],
    }


def compare_texts(model: Any, sources: list[Any], error: float) -> dict[str, Any]:
    """Greedy text after each prompt; where both part, the margin of the cold path's best two."""
    margins = []
    for tokens in progress_bar(iterable=windows(sources, PROMPT, PROMPTS), desc="texts"):
        found, _ = greedy(model, tokens)
        with all_cold(model):
            text, gaps = greedy(model, tokens)
        differing = np.flatnonzero(found != text)
        if differing.size:
            margins.append(float(gaps[differing[0]]))
    return {
        "prompts": PROMPTS,
        "tokens": STEPS,
        "parted": len(margins),
        "margins": margins,
        "unexplained": sum(margin > 2 * error for margin in margins),
    }


def greedy(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """STEPS tokens, and at each how far the second best logit was below the best."""
    cache = make_prompt_cache(model)
    text, gaps = [], []
    for _ in range(STEPS):
        last = forward(model, tokens, cache)[-1]
        second, best = np.partition(last, -2)[-2:]
        text.append(int(last.argmax()))
        gaps.append(best - second)
        tokens = np.array([[text[-1]]], np.int32)
    return np.array(text), np.array(gaps)


def prune(work: Path, reference: str) -> dict[str, Any]:
    plan, artifacts = prepared(MODEL, work / "prune")
    model, tokenizer = mlx_lm.load(str(MODEL))
    options: dict[str, Any] = {
        "plan": plan,
        "artifacts": artifacts,
        "overflow": "prune",
        "progress": True,
    }
    text = read_sources(sorted(DATA.glob("*.text.jsonl")), tokenizer)
    items = read_sources(sorted(DATA.glob("*.choice.jsonl")), tokenizer)
    search = mlx_moe.evaluate(
        model,
        tokenizer,
        text,
        capacity_factors=FACTORS,
        reference="cpu",
        text_tokens=SEARCH_TOKENS,
        **options,
    )
    factor = min(search.sides[1:], key=lambda s: abs(s.drop_rate - WANTED_DROP)).side.factor
    done = work / f"{reference}-{factor:g}-{mlx_moe.Plan.load(plan).sha256[:12]}"
    done.mkdir(exist_ok=True)
    parts = []
    for number in progress_bar(iterable=range(PARTS), desc="parts", unit="part"):
        file = done / f"{number}-of-{PARTS}.json"
        if not file.exists():
            found = mlx_moe.evaluate(
                model,
                tokenizer,
                [part_of(source, number) for source in items],
                capacity_factors=[factor],
                random_control=True,
                reference=reference,
                **options,
            )
            write_whole(file, [s.as_dict() for s in found.sides if s.side.factor == factor])
        parts.append(json.loads(file.read_text()))
    kept, random = (together([part[i] for part in parts]) for i in range(2))
    return {"reference": reference, "capacity_factor": factor, "prune": kept, "random": random}


def part_of(source: Source, number: int) -> Source:
    """One of PARTS equal parts of a file's questions."""
    count = len(source.questions)
    own = source.questions[count * number // PARTS : count * (number + 1) // PARTS]
    return Source(source.name, questions=own)


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One side's figures over all parts."""
    cells = np.zeros(4, int)  # items by who is right: both, the reference alone, the side, nobody
    for part in parts:
        choice = part["choice"]
        right = round(choice["reference"]["value"] * choice["items"])
        gained, lost = choice["gained"], choice["lost"]
        cells += [right - lost, lost, gained, choice["items"] - right - gained]
    counts = {
        name: sum(part["assignments"][name] for part in parts) for name in parts[0]["assignments"]
    }
    of_hot = counts["hot"] + counts["spilled"] + counts["pruned"]
    figures = paired(
        np.repeat([True, True, False, False], cells), np.repeat([True, False, True, False], cells)
    )
    return {
        "items": int(cells.sum()),
        "hot_share": counts["hot"] / counts["assignments"],
        "drop_rate": counts["pruned"] / of_hot,
        **{k: v.as_dict() if isinstance(v, Interval) else v for k, v in figures.items()},
    }


def report_spill(found: dict[str, Any]) -> list[str]:
    """Print the figures; what is not as it must be."""
    texts = found["texts"]
    rows = [
        ["relative error of the logits", f"{found['logit_error']:.2e}"],
        *(
            [f"largest error of a token's logits, {name}", f"{error:.2e}"]
            for name, error in found["token_error"].items()
        ),
        ["assignments on the executor", f"{found['hot_share']:.1%}"],
        ["assignments spilled", found["spilled"]],
        ["texts that part", f"{texts['parted']} of {texts['prompts']}"],
        ["margins there", " ".join(f"{m:.1e}" for m in texts["margins"]) or None],
    ]
    print(table([f"spill, f32, {found['tokens']} tokens", ""], rows))
    return [
        text
        for failed, text in (
            (found["logit_error"] > LIMITS["logit_error"], "the logits' error"),
            (texts["unexplained"], "a text parts where the margin is above the error"),
            (found["hot_share"] < LIMITS["hot"], "too few assignments were hot"),
            (not found["spilled"], "nothing was spilled"),
        )
        if failed
    ]


def report_prune(found: dict[str, Any]) -> list[str]:
    rows = []
    for name in ("prune", "random"):
        side = found[name]
        difference = side["difference"]
        rows.append(
            [
                f"dropped by {'score' if name == 'prune' else 'lot'}",
                f"{side['drop_rate']:.1%}",
                f"{side['reference']['value']:.1%}",
                f"{side['accuracy']['value']:.1%}",
                f"{100 * difference['value']:+.2f}",
                f"[{100 * difference['low']:+.2f}, {100 * difference['high']:+.2f}]",
            ]
        )
    title = f"factor {found['capacity_factor']}, {found['prune']['items']} items"
    header = [title, "dropped", found["reference"], "accuracy", "points", "95 %"]
    print(table(header, rows))
    lost, at_random = (-100 * found[side]["difference"]["value"] for side in ("prune", "random"))
    low, high = LIMITS["drop"]
    return [
        text
        for failed, text in (
            (found["prune"]["items"] < LIMITS["items"], "too few items"),
            (not 0.6 <= found["prune"]["reference"]["value"] <= 0.95, "the items' difficulty"),
            (not low <= found["prune"]["drop_rate"] <= high, "the drop rate"),
            (found["prune"]["hot_share"] < LIMITS["hot"], "too few assignments were hot"),
            (lost >= LIMITS["points"], "accuracy lost"),
            (at_random <= lost, "random drop lost no more"),
        )
        if failed
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail where a figure is not reached")
    parser.add_argument("--json")
    parser.add_argument("--work", type=Path, help="directory for plans and artifacts")
    parser.add_argument("--reference", choices=("stock", "cpu"), default="cpu")
    parser.add_argument("--skip-spill", action="store_true")
    parser.add_argument("--skip-prune", action="store_true")
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    print_machine()
    results: dict[str, Any] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        if not options.skip_spill:
            results["spill"] = spill(work)
            failed += report_spill(results["spill"])
        if not options.skip_prune:
            results["prune"] = prune(work, options.reference)
            failed += report_prune(results["prune"])
    write_json(options.json, results)
    if options.check and failed:
        raise SystemExit(f"not reached: {', '.join(failed)}")


if __name__ == "__main__":
    main()
