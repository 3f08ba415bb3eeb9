"""`mlx_moe evaluate`: what a plan changes in what a model says."""

import argparse
import math
from typing import Any

from .. import hub
from ..defaults import REFERENCES, RETRIEVAL_ITEMS, RETRIEVAL_LENGTH, TASKS, TEXT_TOKENS
from ..text import text_files
from .common import (
    PLAN_BACKENDS,
    add_json_option,
    add_overflow_options,
    add_trust_option,
    check_plot,
    check_targets,
    command,
    positive,
    say,
    write_json,
)

FACTORS = (0.5, 0.75, 1.0)


def factor(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_moe evaluate",
        description="Compare a model on a plan's static executor with the same model in stock "
        "mlx-lm, on the same batches: KL divergence and agreement per token, perplexity, "
        "multiple-choice accuracy, retrieval from long text. Without a plan, the replaced layers.",
    )
    parser.add_argument("--model", required=True, help="Model directory or Hugging Face repo")
    parser.add_argument("--plan", metavar="FILE", help="What `mlx_moe plan` wrote")
    parser.add_argument("--artifacts", metavar="DIR", help="What `mlx_moe compile` wrote")
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="FILE|DIR",
        help="Text (.txt, .md, JSON Lines of texts) and JSON Lines of questions; see "
        "docs/evaluate.md",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=TASKS,
        help="kl and ppl: on the text; choice: the questions; retrieval: needles hidden in the "
        "text (default: what the data has, without retrieval)",
    )
    parser.add_argument(
        "--capacity-factor",
        nargs="+",
        type=factor,
        metavar="F",
        help="Shares of each tier's capacity to try beside the plan as it is (default: "
        f"{' '.join(f'{f:g}' for f in FACTORS)} with --overflow prune, else none)",
    )
    add_overflow_options(parser)
    parser.add_argument(
        "--random-control",
        action="store_true",
        help="Beside each, the same capacities with overflow dropped at random",
    )
    parser.add_argument(
        "--reference",
        choices=REFERENCES,
        default="stock",
        help="stock mlx-lm, or cpu: the same replaced model all on the cold path, much faster "
        "where MLX computes on the CPU (default: stock)",
    )
    for flag, default, text in (
        ("--text-tokens", TEXT_TOKENS, "Tokens of text for kl and ppl"),
        ("--retrieval-length", RETRIEVAL_LENGTH, "Tokens of each text with needles"),
        ("--retrieval-items", RETRIEVAL_ITEMS, "How many such texts"),
    ):
        parser.add_argument(
            flag, type=positive, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--allow-cold",
        action="store_true",
        help="Report even where nothing ran on the static executor",
    )
    add_json_option(parser)
    parser.add_argument(
        "--plot", metavar="FILE", help="Accuracy and drop rate over the capacity factor"
    )
    add_trust_option(parser)
    parser.add_argument(
        "--backend",
        choices=PLAN_BACKENDS,
        default="auto",
        help="Where the replaced layers run; auto: host for a plan, else as for generate "
        "(default: auto)",
    )
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    factors = factors_of(parser, args)
    from ..evaluation_data import read_sources
    from ..evaluation_plot import plot
    from ..evaluator import evaluate
    from ..loading import load_stock
    from ..replace import resolve_backend
    from .benchmark import machine

    check_targets(json=args.json)
    check_plot(args.plot)
    resolve_backend(args.backend)
    text_files(args.data)  # says what is missing before a model is loaded
    plan = args.plan and hub.resolve(args.plan)
    artifacts = args.artifacts and hub.resolve(args.artifacts)
    model, tokenizer, _, directory = load_stock(args.model, args.trust_remote_code)
    evaluation = evaluate(
        model,
        tokenizer,
        read_sources(args.data, tokenizer),
        plan=plan,
        artifacts=artifacts,
        backend=args.backend,
        capacity_factors=factors,
        overflow=args.overflow,
        importance=args.importance,
        random_control=args.random_control,
        reference=args.reference,
        tasks=args.tasks,
        text_tokens=args.text_tokens,
        retrieval_length=args.retrieval_length,
        retrieval_items=args.retrieval_items,
        allow_cold=args.allow_cold,
        checkpoint=directory,
        progress=True,
    )
    report: dict[str, Any] = {
        "model": args.model,
        "plan": args.plan,
        "data": args.data,
        "machine": machine(),
        **evaluation.as_dict(),
    }
    say(evaluation, args.json)
    write_json(report, args.json)
    if args.plot:
        plot(evaluation, args.plot)
    return 0


def factors_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[float, ...]:
    """The capacity factors to try; what does not go together is wrong usage."""
    if args.plan is None:
        for option in ("artifacts", "capacity_factor", "random_control", "plot"):
            if getattr(args, option):
                parser.error(f"--{option.replace('_', '-')} needs --plan")
    if args.random_control and args.overflow != "prune":
        parser.error("--random-control needs --overflow prune")
    default = FACTORS if args.overflow == "prune" and args.plan else ()
    factors = tuple(dict.fromkeys(args.capacity_factor or default))
    if args.plot and len(factors) < 2:
        parser.error("--plot needs two or more capacity factors: --capacity-factor 0.5 0.75 1")
    return factors
