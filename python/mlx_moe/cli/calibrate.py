"""`mlx_moe calibrate`: run a model over text and write where its tokens went."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .. import hub
from ..calibration import Calibration
from ..calibration_state import state_path
from ..defaults import CHUNK, DOCUMENT, SAVE_EVERY
from ..skew import cold, gini, top_share
from ..tables import table
from ..text import TextFiles, text_files
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
from .streaming import add_memory_options, load_replaced

HEADER = (
    "layer",
    "experts",
    "top-k",
    "assignments",
    "gini",
    "top quarter",
    "cold",
    "p95 load",
    "scores",
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_moe calibrate",
        description="Prefill text in chunks and count, for each MoE layer and expert, the tokens "
        "that reach it in a chunk, which experts go together, router scores and input norms. "
        "Interrupted, the same command goes on where it stopped.",
    )
    parser.add_argument("--model", required=True, help="Model directory or Hugging Face repo")
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="FILE|DIR",
        help="JSON Lines (.jsonl, .json) of prompts, texts or chat messages, or plain text (.txt, "
        ".md); a directory means all of these in it",
    )
    parser.add_argument(
        "--output", "-o", required=True, metavar="FILE", help="The .npz to write, or hf://..."
    )
    parser.add_argument(
        "--upload", metavar="HF_URI", help="Also put the calibration on the hub, at hf://..."
    )
    for flag, default, text in (
        ("--chunk-size", CHUNK, "Prompt tokens per prefill step, which loads are counted over"),
        ("--max-document", DOCUMENT, "Tokens after which a longer document is cut in parts"),
        ("--max-tokens", None, "Stop after so many tokens"),
    ):
        note = "all of the data" if default is None else default
        parser.add_argument(flag, type=positive, default=default, help=f"{text} (default: {note})")
    parser.add_argument(
        "--save-every",
        type=float,
        default=SAVE_EVERY,
        metavar="SECONDS",
        help=f"How often to keep what is counted beside the output (default: {SAVE_EVERY:.0f})",
    )
    parser.add_argument(
        "--no-resume", action="store_true", help="Start over, whatever an earlier run left"
    )
    parser.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help="Use prompts as they are, without the tokenizer's chat template",
    )
    add_json_option(parser)
    add_trust_option(parser)
    add_backend_option(parser)
    add_memory_options(parser)
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    from ..calibration_run import calibrate
    from ..replace import resolve_backend

    check_targets(output=None if hub.is_uri(args.output) else args.output, json=args.json)
    resolve_backend(args.backend)
    text_files(args.data)  # says what is missing before a model is loaded
    model, tokenizer, directory = load_replaced(args)
    corpus = TextFiles(args.data, tokenizer, args.max_document, args.ignore_chat_template)
    with hub.output(args.output, args.upload) as out, saying_what_is_kept(out):
        calibration = calibrate(
            model,
            corpus,
            chunk=args.chunk_size,
            out=out,
            resume=not args.no_resume,
            max_tokens=args.max_tokens,
            max_document=args.max_document,
            files=directory,
            backend=args.backend,
            save_every=args.save_every,
            progress=True,
        )
    report = summary(calibration, args.output)
    say(as_text(report), args.json)
    write_json(report, args.json)
    return 0


@contextmanager
def saying_what_is_kept(out: Path) -> Iterator[None]:
    """On Ctrl-C, where the counts are and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if state_path(out).exists():
            print(f"{state_path(out)} has the counts: the same command goes on", file=sys.stderr)
        raise


def summary(calibration: Calibration, output: str) -> dict[str, Any]:
    """What the table shows, as JSON."""
    layers = []
    for i, facts in enumerate(calibration.layers):
        loads = calibration.loads(i)
        totals = loads.sum(axis=0, dtype=np.float64)
        full = loads[np.array(calibration.chunk_tokens) == max(calibration.chunk_tokens)]
        layers.append(
            {
                "layer": facts.name,
                "experts": facts.experts,
                "top_k": facts.top_k,
                "assignments": int(totals.sum()),
                "gini": gini(totals),
                "top_quarter": top_share(totals),
                "cold": cold(totals),
                "p95_load": float(np.percentile(full.max(axis=1), 95)),
                "scores": not bool(np.isnan(calibration.score_quantiles(i)).all()),
            }
        )
    return {
        "output": output,
        "model": calibration.identity.name,
        "tokens": calibration.tokens,
        "chunks": len(calibration.chunk_tokens),
        "chunk": calibration.chunk,
        "layers": layers,
    }


def as_text(report: dict[str, Any]) -> str:
    rows = [
        [
            row["layer"],
            row["experts"],
            row["top_k"],
            row["assignments"],
            f"{row['gini']:.2f}",
            f"{row['top_quarter']:.0%}",
            row["cold"],
            f"{row['p95_load']:.0f}",
            "yes" if row["scores"] else "no",
        ]
        for row in report["layers"]
    ]
    lines = [
        f"{report['model']}: {report['tokens']} tokens in {report['chunks']} chunks of up to "
        f"{report['chunk']}",
        table(HEADER, rows),
        "cold: experts with less than a quarter of the mean; p95 load: of the fullest expert of "
        "the largest chunks",
    ]
    if not all(row["scores"] for row in report["layers"]):
        lines.append(
            "scores no: this family's router scores do not reach us; their quantiles are NaN"
        )
    return "\n".join([*lines, f"written to {report['output']}"])
