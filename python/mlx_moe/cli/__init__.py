"""The `mlx_moe` command: one module per subcommand."""

import argparse
import importlib
import sys

from .. import __version__, large_pages

COMMANDS = {
    "generate": "generate text, as mlx_lm.generate does",
    "run": "run any stock mlx-lm command with the models it loads replaced",
    "attach": "write a model directory that stock mlx-lm commands run replaced",
    "calibrate": "count, over a text, which tokens go to which experts",
    "plan": "choose tiers, groups and the experts that are hot, for a device",
    "compile": "write the groups of a plan as Core ML packages",
    "evaluate": "compare what a plan's layers say with stock: accuracy, perplexity, divergence",
    "benchmark": "measure prefill and decode, stock against replaced",
    "doctor": "what this machine can do, whether a model is supported, what to do next",
    "tune": "measure this machine, for `plan`",
    "trace": "generate text and record which experts each token asks for",
    "simulate": "latency, energy and processor time of a model's routing on a device, simulated",
    "simulate-cache": "replay a trace over memory limits and policies",
    "cache": "list or delete what is kept between runs",
}
# They read weights for as long as it pays to start anew.
RUN_MODELS = ("generate", "run", "calibrate", "evaluate", "benchmark", "tune", "trace")


def build_parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<14} {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="mlx_moe",
        usage="mlx_moe [-h] [--version] COMMAND ...",
        description="Fast, exact Mixture-of-Experts layers for mlx-lm.",
        epilog=f"commands:\n{listing}\n\nmlx_moe COMMAND --help tells more about each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mlx_moe {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns its exit code (2: wrong usage)."""
    parser = build_parser()
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(arguments)
    if argv is None and args.command in RUN_MODELS:
        large_pages.restart_command()
    command = importlib.import_module(f".{args.command.replace('-', '_')}", __name__)
    return command.main(args.arguments)
