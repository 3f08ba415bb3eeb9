"""`mlx_moe doctor`: what this machine can do, whether a model is supported, what to do next."""

import argparse

from ..doctor import doctor
from ..doctor_report import as_text
from .common import add_json_option, check_targets, command, say, write_json


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_moe doctor",
        description="Say what this machine can do and, for a model, whether it is supported, what "
        "memory and disk each way of running it takes, and what to do next. Reads config.json and "
        "the headers of the weight files, no weights; of a model on the hub nothing else is "
        "fetched. Exits with 1 if something is in the way.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="Model directory or Hugging Face repo"
    )
    add_json_option(parser)
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    check_targets(json=args.json)
    report = doctor(args.model)
    say(as_text(report), args.json)
    write_json(report, args.json)
    return 0 if report["ok"] else 1
