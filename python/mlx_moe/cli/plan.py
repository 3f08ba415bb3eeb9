"""`mlx_moe plan`: which expert runs where, from a calibration and a device's numbers."""

import argparse

from .. import hub
from ..calibration import Calibration
from ..chunks import chunk_loads
from ..devices import AUTO, load_device, names
from ..plan import WEIGHTS
from ..plan_report import report
from ..plan_text import as_text
from ..planner import make_plan
from ..plots import plot_plan
from .common import (
    add_json_option,
    check_plot,
    check_targets,
    command,
    positive,
    say,
    size,
    write_json,
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_moe plan",
        description="Choose capacity tiers, groups and the experts that are hot, and say what "
        "that is expected to bring on a device, or why it would bring nothing. Paths can be "
        "hf://user/repo/path@revision.",
    )
    parser.add_argument(
        "--calibration", required=True, metavar="FILE", help="What `mlx_moe calibrate` wrote"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="The plan.json to write"
    )
    parser.add_argument(
        "--device",
        default=AUTO,
        metavar="NAME|FILE",
        help=f"A profile: {', '.join(names())}, or a JSON file of one (default: this machine's)",
    )
    parser.add_argument(
        "--memory",
        type=size,
        metavar="SIZE",
        help="What the copies of hot experts may take, such as 4GB or 500MiB (default: half of "
        "what the model's experts leave of the device's memory)",
    )
    parser.add_argument(
        "--weights", choices=WEIGHTS, default="fp16", help="Of static programs (default: fp16)"
    )
    parser.add_argument(
        "--chunk",
        type=positive,
        metavar="TOKENS",
        help="Of a prefill step: a multiple of the calibration's (default: the calibration's)",
    )
    parser.add_argument(
        "--max-tiers", type=positive, default=4, help="Capacities in a layer (default: 4)"
    )
    parser.add_argument(
        "--shared-tiers", action="store_true", help="The same capacities in every layer"
    )
    parser.add_argument(
        "--overflow",
        type=share,
        help="Share of the hot experts' assignments beyond capacity to aim at (default: whatever "
        "is fastest)",
    )
    parser.add_argument(
        "--capacity-factor", type=float, default=1.0, help="Times all capacities (default: 1)"
    )
    parser.add_argument(
        "--force-hot",
        type=share,
        metavar="SHARE",
        help="Make this share of the assignments hot even where that is slower: for trying the "
        "static path out",
    )
    parser.add_argument("--plot", metavar="DIR", help="Write pictures of popularity and loads")
    parser.add_argument(
        "--upload", metavar="HF_URI", help="Also put the plan on the hub, at hf://..."
    )
    add_json_option(parser)
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    check_targets(output=None if hub.is_uri(args.output) else args.output, json=args.json)
    check_plot(args.plot, directory=True)
    device = load_device(args.device)
    calibration = Calibration.load(hub.resolve(args.calibration))
    plan = make_plan(
        calibration,
        device,
        memory=args.memory,
        weights=args.weights,
        chunk=args.chunk,
        max_tiers=args.max_tiers,
        shared_tiers=args.shared_tiers,
        overflow=args.overflow,
        capacity_factor=args.capacity_factor,
        force_hot=args.force_hot,
        progress=True,
    )
    with hub.output(args.output, args.upload) as path:
        plan.save(path)
    found = report(plan)
    lines = [as_text(found), f"written to {args.output}"]
    if args.plot is not None:
        pictures = plot_plan(plan, chunk_loads(calibration, plan.chunk), args.plot)
        lines.append(f"pictures: {', '.join(map(str, pictures))}")
    say("\n".join(lines), args.json)
    write_json(found, args.json)
    return 0


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; expected a number up to 1")
    return value
