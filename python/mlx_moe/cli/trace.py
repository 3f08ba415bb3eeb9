"""`mlx_moe trace`: generate text and record which experts each token asks for."""

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from ..cache_trace import Trace
from ..errors import BadData
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

PROMPT, TOKENS = 128, 128


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_moe trace",
        description="Generate text and record which experts each forward of each MoE layer asks "
        "for. `mlx_moe simulate-cache` replays the trace over memory limits and policies.",
    )
    parser.add_argument("--model", required=True, help="Model directory or Hugging Face repo")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="Text to continue, '-' for stdin")
    source.add_argument(
        "--data",
        nargs="+",
        metavar="FILE|DIR",
        help="Files whose documents are continued, as for `mlx_moe calibrate`",
    )
    parser.add_argument(
        "--output", "-o", required=True, metavar="FILE", help="The trace (.npz) to write"
    )
    for flag, default, text in (
        ("--max-tokens", TOKENS, "Tokens to generate for each prompt"),
        ("--prompt-tokens", PROMPT, "Tokens of each document that make its prompt"),
        ("--max-documents", 16, "Stop after so many documents"),
    ):
        parser.add_argument(flag, type=positive, default=default, help=f"{text} ({default})")
    parser.add_argument("--temp", type=float, default=0.0, help="Sampling temperature (0)")
    parser.add_argument("--seed", type=int, default=0, help="Of the sampling (0)")
    parser.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help="Use prompts as they are, without the tokenizer's chat template",
    )
    add_trust_option(parser)
    add_json_option(parser)
    add_backend_option(parser)
    add_memory_options(parser)
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    from ..replace import resolve_backend
    from ..trace_run import record

    check_targets(json=args.json, output=args.output)
    resolve_backend(args.backend)
    if args.data is not None:
        text_files(args.data)  # says what is missing before a model is loaded
    model, tokenizer, directory = load_replaced(args)
    trace = record(
        model,
        tokenizer,
        prompts(args, tokenizer),
        max_tokens=args.max_tokens,
        temperature=args.temp,
        seed=args.seed,
        files=directory,
        backend=args.backend,
        progress=True,
    )
    trace.save(args.output)
    report = summary(trace, args.output)
    say(as_text(report), args.json)
    write_json(report, args.json)
    return 0


def prompts(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Tokens of each prompt."""
    if args.prompt is not None:
        text = sys.stdin.read() if args.prompt == "-" else args.prompt
        found = [list(tokenizer.encode(text))]
    else:
        corpus = TextFiles(args.data, tokenizer, args.prompt_tokens, args.ignore_chat_template)
        documents: Iterator[Any] = itertools.islice(iter(corpus), args.max_documents)
        found = [document.tokens[: args.prompt_tokens] for document in documents]
    if not any(found):
        raise BadData("there is no token to begin with")
    return [tokens for tokens in found if tokens]


def summary(trace: Trace, output: str) -> dict[str, Any]:
    """What the table shows, as JSON."""
    lengths = trace.offsets[1:] - trace.offsets[:-1]
    layers = []
    for i, layer in enumerate(trace.layers):
        mine = trace.layer == i
        decode = mine & (trace.tokens == 1)
        layers.append(
            {
                "layer": layer.name,
                "experts": layer.experts,
                "top_k": layer.top_k,
                "expert_bytes": layer.bytes,
                "forwards": int(mine.sum()),
                "decoded": int(decode.sum()),
                "asked_for": int(lengths[mine].sum()),
            }
        )
    return {
        "output": output,
        "model": None if trace.identity is None else trace.identity.name,
        "expert_bytes": int(trace.sizes.sum()),
        "layers": layers,
    }


def as_text(report: dict[str, Any]) -> str:
    header = ("layer", "experts", "top-k", "MB an expert", "forwards", "decoded", "asked for")
    rows = [
        [
            row["layer"],
            row["experts"],
            row["top_k"],
            f"{row['expert_bytes'] / 1e6:.2f}",
            row["forwards"],
            row["decoded"],
            row["asked_for"],
        ]
        for row in report["layers"]
    ]
    total = f"all experts: {report['expert_bytes'] / 1e9:.3g} GB"
    return "\n".join([table(header, rows), total, f"written to {report['output']}"])
