"""`mlx_moe compile`: the groups of a plan as Core ML packages."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .. import hub
from ..manifest import Manifest
from ..package_entry import PackageEntry
from ..package_form import MACOS, system_macos
from ..plan import WEIGHTS, read_plan
from ..tables import table
from .common import add_json_option, add_trust_option, command, positive, write_json

if TYPE_CHECKING:
    from ..compile_estimate import Estimate


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_moe compile",
        description="Write Core ML packages for each group of a plan, and a manifest. Runs on "
        "any machine that has coremltools; goes on where it was stopped, and keeps what is "
        "current. Paths can be hf://user/repo/path@revision.",
    )
    parser.add_argument("--model", help="Model directory or Hugging Face repo")
    parser.add_argument("--plan", required=True, metavar="FILE", help="What `mlx_moe plan` wrote")
    parser.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="Directory of the artifacts"
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="fp16: exact; int8: half the size, each channel in 255 levels (default: the plan's)",
    )
    parser.add_argument(
        "--macos",
        type=int,
        choices=MACOS,
        default=MACOS[0],
        help="The oldest macOS that is to run it. 15: a package for each group, whose capacities "
        "share the weights; 14: a package for each capacity, which takes more space "
        f"(default: {MACOS[0]})",
    )
    parser.add_argument(
        "--workers", type=positive, default=2, help="Processes that write (default: 2)"
    )
    parser.add_argument(
        "--estimate", action="store_true", help="Say what it would take, and write nothing"
    )
    parser.add_argument(
        "--verify", action="store_true", help="Check the artifacts that are there, byte for byte"
    )
    parser.add_argument(
        "--upload", metavar="HF_URI", help="Also put the artifacts on the hub, at hf://..."
    )
    add_json_option(parser)
    add_trust_option(parser)
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.model is None and not args.verify:
        parser.error("the following arguments are required: --model")
    plan = read_plan(args.plan)
    if args.verify:
        manifest = Manifest.load(hub.resolve(args.output))
        manifest.check_plan(plan)
        manifest.verify(deep=True)
        return report(args.json, as_json(manifest), as_text(manifest))
    options: dict[str, Any] = {
        "weights": args.weights,
        "macos": args.macos,
        "workers": args.workers,
        "trust_remote_code": args.trust_remote_code,
    }
    if args.macos > 14 and system_macos() == 14:
        print("note: this macOS 14 runs what --macos 14 writes, and no other", file=sys.stderr)
    from ..compile import compile_plan, estimate_plan

    if args.estimate:
        estimate = estimate_plan(args.model, plan, hub.local_output(args.output), **options)
        return report(args.json, estimate.to_json(), estimate_text(estimate))
    with hub.output(args.output, args.upload) as directory:
        manifest = compile_plan(args.model, plan, directory, **options)
    return report(args.json, as_json(manifest), as_text(manifest))


def report(target: str | None, value: dict[str, Any], text: str) -> int:
    if target != "-":
        print(text)
    write_json(value, target)
    return 0


def as_json(manifest: Manifest) -> dict[str, Any]:
    entries = [
        {"id": p.id, "layer": p.layer, "experts": len(p.experts), "tier": p.tier, "bytes": p.bytes}
        for p in manifest.packages
    ]
    return {
        "directory": str(manifest.directory),
        "plan_sha256": manifest.plan_sha256,
        "identity": asdict(manifest.identity),
        "weights": manifest.weights,
        "macos": manifest.macos,
        "bytes": manifest.bytes,
        "packages": entries,
    }


def as_text(manifest: Manifest) -> str:
    layers = dict.fromkeys(p.layer for p in manifest.packages)
    rows = []
    for layer in layers:
        mine = [p for p in manifest.packages if p.layer == layer]
        experts = len({expert for p in mine for expert in p.experts})
        tiers = sorted({p.tier for p in mine})
        size = sum(p.bytes for p in mine)
        count = packages(mine)
        rows.append([layer, count, experts, " ".join(map(str, tiers)), f"{size / 1e6:.1f}"])
    total = (
        f"{packages(manifest.packages)} packages, {manifest.bytes / 1e6:.1f} MB, "
        f"{manifest.weights}, macOS {manifest.macos} or newer"
    )
    heading = ("layer", "packages", "experts", "tiers", "MB")
    return f"{table(heading, rows)}\n{total}: {manifest.directory}"


def packages(entries: Sequence[PackageEntry]) -> int:
    return sum(len(entry.packages) for entry in entries)


def estimate_text(e: "Estimate") -> str:
    shared = ""
    if e.bytes > e.shared_bytes:
        shared = (
            f"a package for each capacity: with --macos 15 it would be "
            f"{e.shared_bytes / 1e6:.1f} MB\n"
        )
    return (
        f"{e.missing} of {e.packages} groups to write, about {e.seconds:.0f} s\n"
        f"artifacts {e.bytes / 1e6:.1f} MB, the largest package {e.largest / 1e6:.1f} MB\n{shared}"
        f"needs {e.space / 1e6:.1f} MB of space while it writes; {e.free / 1e6:.0f} MB are free"
    )
