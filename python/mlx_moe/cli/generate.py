"""`mlx_moe generate`: mlx_lm.generate with the model's layers replaced."""

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from .. import large_pages
from ..distributed import Ranks
from ..loading import Replaced, missing_model_is_an_error
from ..patch import attribute, replaced_models
from . import report
from .common import add_plan_options, add_stats_option, call_stock, command, plan_arguments
from .compare import Comparison
from .ranks import add_rank_options, launched_ranks
from .streaming import add_memory_options, longer_steps, memory_arguments


def build_parser(stock_parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The stock parser with our options added to it."""
    stock_parser.prog = "mlx_moe generate"
    stock_parser.description = (
        "Generate text as mlx_lm.generate does, with the model's layers replaced."
    )
    ours = stock_parser.add_argument_group("mlx_moe")
    add_plan_options(ours)
    add_memory_options(ours)
    add_stats_option(ours)
    add_rank_options(ours)
    ours.add_argument(
        "--compare",
        action="store_true",
        help="Run the same text through the stock layers too, and print both speeds to stderr",
    )
    return stock_parser


def reporting(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def wrapped(name: str, *args: Any, **kwargs: Any) -> Any:
        with missing_model_is_an_error(name):
            return load(name, *args, **kwargs)

    return wrapped


def _agreed(ranks: Ranks, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The stock sampler, with rank 0's choices."""
    return ranks.sampler(make(*args, **kwargs))


@command
def main(argv: list[str] | None = None) -> int:
    if argv is None:
        large_pages.restart_command()
    # The attribute `mlx_lm.generate` is a function that hides the module.
    stock = importlib.import_module("mlx_lm.generate")
    arguments = sys.argv[1:] if argv is None else argv
    parser = build_parser(stock.setup_arg_parser())
    args = parser.parse_args(arguments)
    if args.compare and (args.prompt_cache_file or args.draft_model):
        parser.error("--compare does not go with --prompt-cache-file or --draft-model")
    if args.compare and args.backend == "stock":
        parser.error("--compare does not go with --backend stock: both sides would be stock")
    if args.plan and args.draft_model:
        parser.error("--plan does not go with --draft-model: a plan is of one model")
    plan = plan_arguments(args) | memory_arguments(args)
    if args.expert_memory is not None:
        if args.compare:
            parser.error("--compare does not go with --expert-memory: stock needs all experts")
        arguments = longer_steps("generate", arguments)
    alone = {
        "--plan": args.plan,
        "--expert-memory": args.expert_memory,
        "--compare": args.compare,
        "--draft-model": args.draft_model,
    }

    with ExitStack() as stack:
        ranks = stack.enter_context(launched_ranks(args, alone))
        if ranks is not None:
            plan["group"] = ranks
            sampler = functools.partial(_agreed, ranks, stock.make_sampler)
            stack.enter_context(attribute(stock, "make_sampler", sampler))
        models: list[Replaced] = []
        stack.enter_context(replaced_models(args.backend, models.append, plan))
        stack.enter_context(attribute(stock, "setup_arg_parser", lambda: parser))
        stack.enter_context(attribute(stock, "load", reporting(stock.load)))
        comparison = Comparison(stock.stream_generate, models)
        if args.compare:
            stack.enter_context(attribute(stock, "stream_generate", comparison))
        code = call_stock("mlx_moe.generate", stock.main, arguments)
        if ranks is None or ranks.first:
            records = [record for model in models for record in report.records(model)]
            report.write(records, args.stats)
        if args.compare:
            print(comparison.against_stock(), file=sys.stderr)
    return code
