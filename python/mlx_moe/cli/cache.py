"""`mlx_moe cache`: what is kept on this machine between runs, and deleting it."""

import argparse
import sys
import time
from collections.abc import Iterable
from typing import Any

from .. import cache
from ..cache import KINDS, Entry
from ..errors import MoEError
from ..machine import as_size
from ..tables import table
from .common import add_json_option, check_targets, command, say, write_json


def build_parser() -> argparse.ArgumentParser:
    kinds = "\n".join(f"  {kind:<10} {text}" for kind, text in KINDS.items())
    parser = argparse.ArgumentParser(
        prog="mlx_moe cache",
        description="List or delete what mlx_moe keeps on this machine between runs. All of it "
        "can be made again.",
        epilog=f"kinds:\n{kinds}\n\nIt lies in {cache.cache_dir()}; {cache.VARIABLE} moves it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="list|clear", required=True)
    for action, text in (("list", "show what is there"), ("clear", "delete it")):
        sub = actions.add_parser(action, help=text, description=f"{text.capitalize()}.")
        sub.add_argument(
            "kinds",
            nargs="*",
            metavar="KIND",
            help=f"Any of {', '.join(KINDS)} (default: all)",
        )
        add_json_option(sub)
        if action == "clear":
            sub.add_argument("--yes", "-y", action="store_true", help="Delete without asking")
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    check_targets(json=args.json)
    found = cache.entries(args.kinds or KINDS)
    if args.action == "list":
        return show({"directory": str(cache.cache_dir())}, "entries", found, args.json)
    if found and not args.yes and not agreed(found):
        print("nothing was deleted", file=sys.stderr)
        return 1
    deleted = cache.clear(found)
    kept = len(found) - len(deleted)
    if kept:
        print(f"{kept} kept: being written just now", file=sys.stderr)
    return show({"directory": str(cache.cache_dir()), "kept": kept}, "deleted", deleted, args.json)


def agreed(found: list[Entry]) -> bool:
    """Whether the user says yes; an error where there is nobody to ask."""
    print(as_text(found), file=sys.stderr)
    if not sys.stdin.isatty():
        raise MoEError("clear asks before it deletes, and there is no terminal: add --yes")
    print(f"delete {summary(found)}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def show(report: dict[str, Any], key: str, shown: list[Entry], target: str | None) -> int:
    text = f"{as_text(shown)}\n" if shown else ""
    what = "deleted " if key == "deleted" else ""
    say(f"{text}{what}{summary(shown)} in {report['directory']}", target)
    report["bytes"] = sum(entry.bytes for entry in shown)
    write_json(report | {key: [entry.as_dict() for entry in shown]}, target)
    return 0


def summary(shown: list[Entry]) -> str:
    if not shown:
        return "nothing"
    count = "1 entry" if len(shown) == 1 else f"{len(shown)} entries"
    return f"{count}, {as_size(sum(entry.bytes for entry in shown))}"


def as_text(shown: Iterable[Entry]) -> str:
    rows = [
        [
            entry.name if entry.finished else f"{entry.name} (unfinished)",
            entry.kind,
            as_size(entry.bytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.modified)),
        ]
        for entry in shown
    ]
    return table(["name", "kind", "size", "written"], rows)
