"""What the commands share: our options, error reports, running a stock command."""

import argparse
import functools
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, distribution
from pathlib import Path
from typing import Any

from ..durable import whole
from ..errors import InvalidArgument, MoEError
from ..figures import require_matplotlib
from ..sizes import size_bytes
from ..static import EXECUTORS, IMPORTANCES, OVERFLOWS

PLAN_BACKENDS = ("auto", "stock", "cpu", *EXECUTORS)
INTERRUPTED = 130  # what a shell reports for a process that SIGINT ended


def add_backend_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--backend",
        choices=("auto", "stock", "cpu"),
        default="auto",
        help="Where the replaced layers run; auto: the CPU kernels where MLX itself computes "
        "on the CPU, else stock (default: auto)",
    )


def add_plan_options(parser: argparse._ActionsContainer) -> None:
    """--plan and what goes with it, and --backend with "host" and "coreml" as choices."""
    parser.add_argument(
        "--backend",
        choices=PLAN_BACKENDS,
        default="auto",
        help="Where the replaced layers run; auto: the CPU kernels where MLX itself computes "
        "on the CPU, else stock; coreml: the plan's hot experts on its static programs in Core ML "
        "(macOS); host: these computed by the CPU too (default: auto)",
    )
    parser.add_argument(
        "--plan", metavar="FILE", help="Which expert runs where: a plan.json, or hf://..."
    )
    parser.add_argument(
        "--artifacts", metavar="DIR", help="What `mlx_moe compile` wrote for the plan, or hf://..."
    )
    parser.add_argument(
        "--rebalance",
        action="store_true",
        help="Keep the plan up with routing: groups or packed copies change when it shifts",
    )
    add_overflow_options(parser)


def add_overflow_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--overflow",
        choices=OVERFLOWS,
        default="spill",
        help="Assignments that the static programs have no room for: spill computes them like "
        "those of other experts, prune leaves the least important out (default: spill)",
    )
    parser.add_argument(
        "--importance",
        choices=IMPORTANCES,
        default="router",
        help="What pruning goes by: the router's scores, or the norm of a token's input "
        "(default: router)",
    )


def plan_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What `replace_moe_layers` takes beside the backend; empty without a plan."""
    if args.plan is None and args.artifacts is None:
        if args.backend in EXECUTORS:
            raise InvalidArgument(
                f"--backend {args.backend} runs a plan's programs: give --plan, --artifacts"
            )
        if args.rebalance:
            raise InvalidArgument("--rebalance keeps a plan up with routing: give --plan")
        return {}
    names = ("plan", "artifacts", "overflow", "importance", "rebalance")
    return {name: getattr(args, name) for name in names}


def add_stats_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--stats",
        choices=("summary", "layers", "json", "none"),
        default="summary",
        help="What to print to stderr at the end about the layers that ran (default: summary)",
    )


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def size(text: str) -> int:
    """Bytes of "16GB", "500MiB" or "1000000"."""
    try:
        return size_bytes(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_json_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", metavar="FILE", help="Write JSON to FILE, or to stdout for '-'")


def add_trust_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="Allow a model that brings its own code"
    )


def check_targets(**paths: str | None) -> None:
    """Before the work: raise MoEError where an option names a file that cannot be written."""
    for option, path in paths.items():
        if path in (None, "-"):
            continue
        if not Path(str(path)).absolute().parent.is_dir():
            raise MoEError(f"--{option} {path}: there is no such directory to write it in")
        if Path(str(path)).is_dir():
            raise MoEError(f"--{option} {path}: that is a directory; name a file")


def check_plot(path: str | None, *, directory: bool = False) -> None:
    """Before the work: raise MoEError where --plot, a file or directory, could not be written."""
    if path is None:
        return
    require_matplotlib()
    if not directory:
        check_targets(plot=path)
        return
    there = next(p for p in (Path(path).absolute(), *Path(path).absolute().parents) if p.exists())
    if not there.is_dir():
        raise MoEError(f"--plot {path}: {there} is a file; name a directory")


def say(text: object, json_target: str | None) -> None:
    """Print to stdout, or to stderr where the JSON goes to stdout."""
    print(text, file=sys.stderr if json_target == "-" else sys.stdout)


def write_json(report: Any, target: str | None) -> None:
    """To a file, whole or not at all, to stdout for "-", nowhere for None."""
    text = json.dumps(report, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    elif target is not None:
        with whole(Path(target)) as scratch:
            scratch.write_text(text)


def command(main: Callable[[list[str] | None], int]) -> Callable[[list[str] | None], int]:
    """Give a command's main one log format, short error messages and exit codes."""

    @functools.wraps(main)
    def wrapped(argv: list[str] | None = None) -> int:
        try:
            with log_to_stderr():
                return main(argv)
        except MoEError as error:
            print(f"mlx_moe: error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("mlx_moe: interrupted", file=sys.stderr)
            return INTERRUPTED

    return wrapped


@contextmanager
def log_to_stderr() -> Iterator[None]:
    log = logging.getLogger("mlx_moe")
    before = log.level, log.propagate
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[mlx_moe] %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False  # the stock server gives the root logger a handler too
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def stock_commands() -> dict[str, EntryPoint]:
    """The console scripts of the installed mlx-lm, by name."""
    entry_points = distribution("mlx-lm").entry_points
    return {e.name: e for e in entry_points if e.group == "console_scripts"}


def call_stock(name: str, main: Callable[[], object], arguments: list[str]) -> int:
    """Call a stock command's `main` with its own command line; returns its exit code."""
    argv, sys.argv = sys.argv, [name, *arguments]
    try:
        code = main()
    finally:
        sys.argv = argv
    return code if isinstance(code, int) else 0
