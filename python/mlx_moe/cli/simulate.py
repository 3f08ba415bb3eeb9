"""`mlx_moe simulate`: latency, energy and processor time of a model's routing on a device."""

import argparse
from dataclasses import replace
from typing import Any

from ..cache_trace import Trace
from ..calibration import Calibration
from ..devices import AUTO, load_device, names
from ..errors import InvalidArgument
from ..layer_facts import LayerFacts, WeightFacts
from ..plan import WEIGHTS
from ..simulate import FORCED, STRATEGIES, simulate
from ..simulate_report import as_text, plot, report
from ..simulate_routing import Routing, of_calibration, of_histograms, of_trace, read_histograms
from ..simulate_shapes import SHAPES
from ..simulate_units import Machine
from .common import add_json_option, check_plot, check_targets, command, positive, say, write_json
from .plan import share, size

TOKENS, STEPS = 512, 16  # drawn from histograms
GPT_OSS = "gpt-oss-20b"
SIZES = {
    "layers": "Expert layers",
    "experts": "Experts of a layer",
    "top-k": "Experts of a token",
    "hidden": "Features outside the experts",
    "inner": "Features inside an expert",
}
BITS = (2, 3, 4, 5, 6, 8)
LARGEST = 1 << 20  # of a size
# Options that a source has its own word on, or no use for.
UNUSED = {
    "calibration": ("steps", "seed", "shape", *SIZES, "bits"),
    "trace": ("chunk", "steps", "seed", "layers", "experts", "top-k"),
    "histograms": (),
}


def extent(text: str) -> int:
    value = positive(text)
    if value > LARGEST:
        raise argparse.ArgumentTypeError(f"{value} is too large; expected at most {LARGEST}")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_moe simulate",
        description="How long a model's expert layers would take on a device, with which energy "
        "and processor time, strategy by strategy. Nothing is run: the numbers are those of the "
        "device's profile, and the routing is real.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", help="What `mlx_moe trace` wrote")
    source.add_argument("--calibration", metavar="FILE", help="What `mlx_moe calibrate` wrote")
    source.add_argument(
        "--histograms",
        metavar="FILE",
        help="JSON, gzipped or not, of how often each expert was chosen: "
        '{"domains": {NAME: [layer][expert]}}',
    )
    parser.add_argument(
        "--device",
        default=AUTO,
        metavar="NAME|FILE",
        help=f"A profile: {', '.join(names())}, or a JSON file of one (default: this machine's)",
    )
    parser.add_argument(
        "--strategy",
        nargs="+",
        choices=STRATEGIES,
        help="cpu: all on the processor; cold: all on the cold path (an Apple device's GPU); "
        "naive: one static program an expert, one capacity; plan: what `mlx_moe plan` chooses; "
        "plan-cpu: the same without the GPU; forced: --force-hot of the assignments hot (default: "
        "all that the device has numbers for)",
    )
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="For hot experts, as `mlx_moe plan` takes it"
    )
    parser.add_argument(
        "--weights", choices=WEIGHTS, default="fp16", help="Of static programs (default: fp16)"
    )
    parser.add_argument(
        "--force-hot",
        type=share,
        default=FORCED,
        metavar="SHARE",
        help=f"Of the assignments, in strategy forced (default: {FORCED})",
    )
    shape = parser.add_argument_group("steps and layers", "where the file does not say")
    shape.add_argument(
        "--chunk",
        type=positive,
        metavar="TOKENS",
        help=f"Of a step (default: the calibration's; of histograms {TOKENS})",
    )
    shape.add_argument(
        "--steps",
        type=positive,
        help=f"Drawn from histograms; every other one is planned by (default: {STEPS})",
    )
    shape.add_argument("--seed", type=int, help="Of drawing (default: 0)")
    shape.add_argument(
        "--shape",
        choices=sorted(SHAPES),
        help=f"The layers of a published model, for histograms and traces (histograms of "
        f"openai/{GPT_OSS}: that)",
    )
    for name, what in SIZES.items():
        shape.add_argument(f"--{name}", type=extent, metavar="N", help=f"{what}, instead")
    shape.add_argument(
        "--bits", type=int, choices=BITS, help="Of a weight, in groups of 64 (default: the shape's)"
    )
    parser.add_argument("--plot", metavar="FILE", help="Write a picture of the results")
    add_json_option(parser)
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    check_targets(json=args.json)
    check_plot(args.plot)
    if args.seed is not None and args.seed < 0:
        raise InvalidArgument(f"--seed is {args.seed}, expected a number from 0 on")
    device = load_device(args.device)
    routing = read(args)
    strategies = tuple(args.strategy) if args.strategy else possible(device)
    outcomes = simulate(
        routing,
        device,
        strategies,
        memory=args.memory,
        weights=args.weights,
        force_hot=args.force_hot,
        progress=True,
    )
    found = report(routing, device, outcomes)
    say(as_text(found), args.json)
    if args.plot is not None:
        plot(found, args.plot)
        say(f"picture: {args.plot}", args.json)
    write_json(found, args.json)
    return 0


def possible(device: Any) -> tuple[str, ...]:
    """The strategies that the profile has the numbers for."""
    wanted = STRATEGIES if device.executor == "static" else ("cold",)
    return tuple(s for s in wanted if "cpu" not in s or Machine(device).has_host)


def check_used(args: argparse.Namespace) -> None:
    """Raise InvalidArgument for an option that the source leaves no use for."""
    source = next(name for name in UNUSED if getattr(args, name) is not None)
    for option in UNUSED[source]:
        if getattr(args, option.replace("-", "_")) is not None:
            raise InvalidArgument(f"--{option} means nothing with --{source}: leave it away")


def read(args: argparse.Namespace) -> Routing:
    check_used(args)
    if args.calibration is not None:
        return of_calibration(Calibration.load(args.calibration), args.chunk, args.calibration)
    if args.trace is not None:
        trace = Trace.load(args.trace)
        facts = shape_of(args, None, len(trace.layers))
        facts = [
            replace(fact, name=layer.name, experts=layer.experts, top_k=layer.top_k)
            for fact, layer in zip(facts, trace.layers, strict=True)
        ]
        return of_trace(trace, facts, args.trace)
    histograms = read_histograms(args.histograms)
    preset = GPT_OSS if histograms.name.endswith(GPT_OSS) else None
    facts = shape_of(args, preset, histograms.layers, histograms.experts, histograms.top_k)
    chunk = TOKENS if args.chunk is None else args.chunk
    steps = STEPS if args.steps is None else args.steps
    return of_histograms(histograms, facts, chunk, steps, args.seed or 0)


def shape_of(
    args: argparse.Namespace,
    preset: str | None,
    layers: int,
    experts: int | None = None,
    top_k: int | None = None,
) -> list[LayerFacts]:
    """The layers that --shape and the single sizes say, else those of a preset."""
    named = args.shape or preset
    if named is not None:
        shape = SHAPES[named]
    elif args.hidden is None or args.inner is None:
        raise InvalidArgument(
            "the file does not say how large the experts are: give --shape, or --hidden and "
            f"--inner (shapes: {', '.join(sorted(SHAPES))})"
        )
    else:
        shape = replace(SHAPES["mixtral-8x7b"], family="unknown", layers=layers)
        shape = replace(shape, experts=experts or 1, top_k=top_k or 1)
        if top_k is None and args.top_k is None and args.trace is None:
            raise InvalidArgument(
                "the file does not say how many experts a token goes to: give --top-k"
            )
    names = [name.replace("-", "_") for name in SIZES]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.trace is not None:  # knows these
        given |= {"layers": layers, "experts": 1, "top_k": 1}
    shape = replace(shape, **given)
    if args.bits is not None:
        shape = replace(shape, weights=WeightFacts("affine", args.bits, 64, "bfloat16"))
    if shape.top_k > shape.experts:
        raise InvalidArgument(f"top_k is {shape.top_k}, more than its {shape.experts} experts")
    return shape.facts()
