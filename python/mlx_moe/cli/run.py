"""`mlx_moe run`: a stock mlx-lm command with every model it loads replaced."""

import argparse

from ..errors import MoEError
from .common import (
    add_plan_options,
    add_stats_option,
    call_stock,
    command,
    plan_arguments,
    stock_commands,
)
from .streaming import add_memory_options, memory_arguments, stock_arguments


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_moe run",
        usage="mlx_moe run [-h] [--backend {auto,stock,cpu,host,coreml}] "
        "[--stats {summary,layers,json,none}] [--plan FILE --artifacts DIR] "
        "[--expert-memory SIZE] COMMAND ...",
        description="Run a stock mlx-lm command, such as `mlx_lm.server --model M` or "
        "`mlx_lm generate --model M`, with the layers of every model that it loads replaced. "
        "Options of mlx_moe come before the command, the command's own after it.",
    )
    add_plan_options(parser)
    add_memory_options(parser)
    add_stats_option(parser)
    parser.add_argument("stock", metavar="COMMAND", help="mlx_lm.NAME, or mlx_lm NAME")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    from ..patch import replaced_models
    from . import report

    known = stock_commands()
    if args.stock not in known:
        parser.error(f"unknown command {args.stock!r}; mlx-lm has {', '.join(sorted(known))}")
    try:
        stock_main = known[args.stock].load()
    except ImportError as error:
        raise MoEError(f"{args.stock} does not start: {error}. Install what it needs.") from error

    ran: list[report.Record | report.StoreRecord] = []
    plan = plan_arguments(args) | memory_arguments(args)
    arguments = args.arguments
    if args.expert_memory is not None:
        arguments = stock_arguments(args.stock, arguments)
    with replaced_models(args.backend, lambda model: ran.extend(report.records(model)), plan):
        try:
            return call_stock(args.stock, stock_main, arguments)
        except ModuleNotFoundError as error:
            raise MoEError(f"{args.stock} stopped: {error}. Install what it needs.") from error
        finally:
            report.write(ran, args.stats)
