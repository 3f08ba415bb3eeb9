"""`mlx_moe benchmark`: prefill and decode, stock against replaced, in turns."""

import argparse
import platform
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from .. import core
from ..energy import open_meter
from ..tables import table
from .common import (
    add_backend_option,
    add_json_option,
    add_trust_option,
    check_targets,
    command,
    positive,
    say,
    write_json,
)
from .energy_report import as_text as energy_text
from .energy_report import report as energy_report
from .measure import SIDES, Measurement, Workload, measure

PERCENTILES = (50, 95, 99)
PREFILL_STEP_SIZE = 2048  # as mlx_lm.generate


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_moe benchmark",
        description="Time the prefill of a random prompt and the decoding of further tokens, "
        "with the stock layers and with the replaced ones by turns, all logits evaluated.",
    )
    parser.add_argument("--model", required=True, help="Model directory or Hugging Face repo")
    for flags, default, text in (
        (("--prompt-tokens", "-p"), 512, "Length of the prompt"),
        (("--generation-tokens", "-g"), 64, "Tokens to decode"),
        (("--batch-size", "-b"), 1, "Prompts at a time"),
        (("--num-trials", "-n"), 5, "Trials of each side"),
        (("--prefill-step-size",), PREFILL_STEP_SIZE, "Prompt tokens per step"),
    ):
        parser.add_argument(
            *flags, type=positive, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--energy",
        action="store_true",
        help="Also joules per token (RAPL on Linux, powermetrics as root on macOS; of the whole "
        "machine), processor seconds and cycles",
    )
    add_json_option(parser)
    add_trust_option(parser)
    add_backend_option(parser)
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    from ..loading import load_stock, replace_layers
    from ..replace import resolve_backend

    check_targets(json=args.json)
    resolve_backend(args.backend)
    model, _, config, _ = load_stock(args.model, args.trust_remote_code)
    workload = Workload(
        vocabulary=config.get("vocab_size") or config["text_config"]["vocab_size"],
        batch_size=args.batch_size,
        prompt_tokens=args.prompt_tokens,
        generation_tokens=args.generation_tokens,
        prefill_step_size=args.prefill_step_size,
    )
    replaced = replace_layers(model, args.backend)
    energy = None
    if args.energy:
        with open_meter() as meter:
            measurement = measure(replaced, workload, args.num_trials, meter)
            energy = energy_report(measurement, workload, meter.rails.missing)
    else:
        measurement = measure(replaced, workload, args.num_trials)
    report = {
        "model": args.model,
        "backend": args.backend,
        "trials": args.num_trials,
        "workload": vars(workload),
        "machine": machine(),
        **results(measurement, workload),
    }
    if energy is not None:
        report["energy"] = energy
    say(as_text(report), args.json)
    write_json(report, args.json)
    return 0


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "device": mx.default_device().type.name,
        "isa": core.isa(),
        "threads": core.num_threads(),
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
    }


def results(measurement: Measurement, workload: Workload) -> dict[str, Any]:
    """Statistics by phase and side, None for a stock side that cannot run."""
    phases: dict[str, Any] = {"prefill": {}, "decode": {}}
    for side in SIDES:
        trials = measurement.trials[side]
        prefill = [trial.prefill for trial in trials]
        decode = [seconds for trial in trials for seconds in trial.decode]
        prompt = workload.batch_size * workload.prompt_tokens
        phases["prefill"][side] = statistics(prefill, prompt)
        phases["decode"][side] = statistics(decode, workload.batch_size)
    for phase in phases.values():
        stock, replaced = phase["stock"], phase["replaced"]
        phase["ratio"] = stock["median_ms"] / replaced["median_ms"] if stock else None
    return {
        **phases,
        "same_top_token": measurement.agreement(),
        "stock_error": measurement.stock_error,
    }


def statistics(seconds: list[float], tokens: int) -> dict[str, float] | None:
    if not seconds:
        return None
    median = float(np.median(seconds))
    spread = {f"p{p}_ms": 1e3 * float(np.percentile(seconds, p)) for p in PERCENTILES}
    return {"tokens_per_s": tokens / median, "median_ms": 1e3 * median, **spread}


def as_text(report: dict[str, Any]) -> str:
    rows = []
    for phase in ("prefill", "decode"):
        for side in SIDES:
            numbers = report[phase][side]
            if numbers is not None:
                ratio = report[phase]["ratio"] if side == "replaced" else None
                times = [f"{numbers[f'p{p}_ms']:.2f}" for p in PERCENTILES]
                speed = f"{numbers['tokens_per_s']:.1f}"
                rows.append([f"{phase} {side}", speed, *times, f"{ratio:.2f}x" if ratio else ""])
    header = ["", "tokens/s", *(f"ms p{p}" for p in PERCENTILES), "ratio"]
    facts = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    if report["stock_error"]:
        note = f"stock cannot run this model here: {report['stock_error']}"
    else:
        note = f"same most likely token at {report['same_top_token']:.1%} of the prompt"
    energy = f"\n{energy_text(report['energy'])}" if "energy" in report else ""
    return f"{facts}\n{table(header, rows)}\n{note}{energy}"
