"""`mlx_moe tune`: measure this machine and write the profile that `plan` reads."""

import argparse
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from .. import tune_profile
from ..cache import make_cache_dir
from ..defaults import STATICS
from ..devices import Device
from ..errors import InvalidArgument
from ..machine import processors
from ..tables import table
from .common import add_json_option, check_targets, command, say, write_json

BUSY = 0.5  # of the processors, before we start


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_moe tune",
        description="Measure this machine: throughput of experts by their loads, memory "
        "bandwidth, what prepacked copies bring and, on request, a static executor. Takes seconds, "
        "with a static executor up to a minute; run it on an idle machine. `mlx_moe plan` takes "
        "the profile for --device auto.",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="Write the profile here, for `plan --device FILE`, and not into the cache",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="Measure experts as large, and in the format, as this model's (default: "
        "2048 x 768 in 4 bits)",
    )
    parser.add_argument(
        "--static",
        choices=STATICS,
        default="auto",
        help="The static executor to measure too: coreml (auto: where there is a Neural Engine), "
        "or host, which computes static programs on the CPU, a way to try plans; that one needs "
        "--output (default: auto)",
    )
    parser.add_argument("--quick", action="store_true", help="Fewer sizes, fewer repetitions")
    add_json_option(parser)
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    from ..tune import DEFAULT, save, shape_of, tune

    check_targets(json=args.json, output=args.output)
    if args.static == "host" and args.output is None:
        raise InvalidArgument(
            "--static host is for trying plans, and would be this machine's profile: give --output"
        )
    path = Path(args.output) if args.output else own_path()
    shape = DEFAULT
    if args.calibration is not None:
        shape = shape_of(largest_layer(args.calibration))
    if busy := others_at_work():
        print(f"mlx_moe: {busy}: the numbers will be lower than they can be", file=sys.stderr)
    start = perf_counter()
    device = tune(shape, static=args.static, quick=args.quick, progress=True)
    save(device, path)
    lines = f"{as_text(device)}\nwritten to {path} in {perf_counter() - start:.0f} s"
    say(lines, args.json)
    write_json({"path": str(path), "profile": device.as_dict()}, args.json)
    return 0


def others_at_work() -> str | None:
    """That other programs keep the processors busy, None if they do not."""
    load = os.getloadavg()[0]
    if load < BUSY * processors():
        return None
    return f"other programs are running (load {load:.1f} on {processors()} processors)"


def own_path() -> Path:
    """This machine's place in the cache, its directory made."""
    path = tune_profile.profile_path()
    if path is None:
        raise InvalidArgument(
            "the kernels cannot run as MLX_MOE_ISA or MLX_MOE_NUM_THREADS says (`mlx_moe doctor`)"
        )
    make_cache_dir("profiles")
    return path


def largest_layer(path: str) -> Any:
    """The facts of the layer with most weights in a calibration."""
    from .. import hub
    from ..calibration import Calibration

    layers = Calibration.load(hub.resolve(path)).layers
    return max(layers, key=lambda facts: facts.experts * facts.hidden * facts.inner)


def as_text(device: Device) -> str:
    found = device.measurements
    assert found is not None
    rows = [
        [f"{s.path}, {s.experts} experts", s.rows, f"{1e3 * s.seconds:.3f}", f"{speed(s):.1f}"]
        for s in found.samples
    ]
    numbers = [
        [name, f"{number.value:.4g}", number.unit, "yes" if number.measured else "no"]
        for name, number in device.numbers.items()
    ]
    text = table(["path", "rows each", "ms", "GFLOP/s"], rows)
    text += f"\n\n{table(['number', 'value', 'unit', 'measured'], numbers)}"
    if "packed_speedup" in device.numbers:
        text += f"\npacked copies: {device.numbers['packed_speedup'].source.partition('; ')[2]}"
    if found.overlap is not None:
        text += f"\nboth paths at once save {found.overlap:.0%} of the shorter one's time"
    return text


def speed(sample: Any) -> float:
    return 6 * sample.size * sample.experts * sample.rows / sample.seconds / 1e9
