"""`mlx_moe simulate-cache`: replay a trace over memory limits and policies."""

import argparse
from typing import Any

from ..cache_replay import CHOICES, Replay, replay, smallest_budget
from ..cache_trace import Trace
from ..errors import InvalidArgument
from ..machine import as_size
from ..progress import progress_bar
from ..sizes import share
from ..tables import table
from .common import add_json_option, check_plot, check_targets, command, say, size, write_json

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_moe simulate-cache",
        description="How often the experts that `mlx_moe trace` saw asked for would have been in "
        "memory, for each limit and policy. belady knows the future: no policy reads less.",
    )
    parser.add_argument("--trace", required=True, metavar="FILE", help="What `mlx_moe trace` wrote")
    parser.add_argument(
        "--budget",
        nargs="+",
        type=budget,
        metavar="SIZE|SHARE%",
        help="Memory for experts, such as 8GB or 25%% of all (default: 10%% to 100%%)",
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        metavar="NAME",
        help=f"lru, lfu, lfu:TOKENS, pinned, belady (default: {' '.join(CHOICES)} pinned belady)",
    )
    parser.add_argument(
        "--bandwidth",
        type=size,
        metavar="SIZE",
        help="What the disk reads in a second, such as 3GB: adds the seconds of reading a token",
    )
    parser.add_argument("--plot", metavar="FILE", help="Write a picture of the hit rates")
    add_json_option(parser)
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    check_targets(json=args.json)
    check_plot(args.plot)
    trace = Trace.load(args.trace)
    if not len(trace):
        raise InvalidArgument(f"{args.trace} has no forwards")
    report = run(trace, budgets(trace, args.budget), args.policy, args.bandwidth)
    say(as_text(report), args.json)
    if args.plot is not None:
        from ..cache_plot import plot

        plot(report, args.plot)
        say(f"picture: {args.plot}", args.json)
    write_json(report, args.json)
    return 0


def budget(text: str) -> int | float:
    """Bytes, or a share of all experts as a float."""
    if text.strip().endswith("%"):
        if (found := share(text)) is None:
            raise argparse.ArgumentTypeError(f"{text!r} is no share of the experts")
        return found
    return size(text)


def budgets(trace: Trace, given: list[int | float] | None) -> list[int]:
    """Bytes, at most all; of the default ones, those that hold a token's experts of any layer."""
    total, least = int(trace.sizes.sum()), smallest_budget(trace)
    if given is None:
        return sorted({max(least, round(share * total)) for share in SHARES})
    wanted = [round(b * total) if isinstance(b, float) else b for b in given]
    return list(dict.fromkeys(min(b, total) for b in wanted))


def run(
    trace: Trace, limits: list[int], policies: list[str] | None, bandwidth: int | None
) -> dict[str, Any]:
    """Everything that is shown, as JSON."""
    names = policies or [*CHOICES, "pinned", "belady"]
    steps = len(limits) * len(names) * len(trace)
    with progress_bar(total=steps, unit="forward", unit_scale=True) as bar:
        done = [replay(trace, limit, name, bar.update) for limit in limits for name in names]
    tokens = decoded(trace)
    total = int(trace.sizes.sum())
    rows = [row(found, total, tokens, bandwidth) for found in done]
    tried = [name for name in CHOICES if name in names]
    best = {
        str(limit): min(
            (r for r in rows if r["budget"] == limit and r["policy"] in tried),
            key=lambda r: r["bytes_read"],
        )["policy"]
        for limit in limits
        if tried
    }
    return {
        "model": None if trace.identity is None else trace.identity.name,
        "forwards": len(trace),
        "decoded_tokens": tokens,
        "expert_bytes": total,
        "best": best,
        "results": rows,
    }


def decoded(trace: Trace) -> int:
    """Tokens that went through the first layer alone."""
    return int(((trace.layer == 0) & (trace.tokens == 1)).sum())


def row(found: Replay, total: int, tokens: int, bandwidth: int | None) -> dict[str, Any]:
    facts = found.as_dict() | {"share": found.budget / total}
    if bandwidth:
        facts["read_seconds_per_token"] = found.decode.bytes_read / bandwidth / max(1, tokens)
    return facts


def as_text(report: dict[str, Any]) -> str:
    timed = "read_seconds_per_token" in report["results"][0]
    header = ["limit", "share", "policy", "decode hits", "prefill hits", "read"]
    rows = []
    for r in report["results"]:
        cells = [
            as_size(r["budget"]),
            f"{r['share']:.0%}",
            r["policy"],
            f"{r['hit_rate']:.1%}",
            f"{r['prefill_hit_rate']:.1%}",
            as_size(r["bytes_read"]),
        ]
        rows.append([*cells, f"{1e3 * r['read_seconds_per_token']:.2f}"] if timed else cells)
    facts = (
        f"{report['model'] or 'a trace of no model'}: {report['decoded_tokens']} decoded tokens, "
        f"all experts {as_size(report['expert_bytes'])}"
    )
    best = [f"{as_size(int(limit))}: {name}" for limit, name in report["best"].items()]
    lines = [facts, table([*header, "ms a token"] if timed else header, rows)]
    return "\n".join([*lines, f"reads least: {', '.join(best)}"] if best else lines)
