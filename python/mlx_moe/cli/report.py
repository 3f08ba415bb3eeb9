"""Tables of what was replaced and of what ran."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..loading import Replaced
from ..machine import as_size
from ..replacement import FACTS, ReplacedLayer
from ..stats import Counters, RankCounters
from ..store_report import StoreReport
from ..tables import table

COUNTS = ("tokens", "calls", "kernel calls", "small", "fallbacks")
UNUSUAL = (
    *("extra_tiles", "recomputed_tiles", "failed_tiles", "stale", "without_scores"),
    *("cold_groups", "nan_importance"),
)
Cell = str | int | None


@dataclass(frozen=True)
class Record:
    """One replaced layer and its counters; keeps no weights alive."""

    name: str
    facts: tuple[Cell, ...]  # as FACTS
    counters: Counters | None  # None for a layer that was left to stock code

    def counts(self) -> tuple[Cell, ...]:
        """As COUNTS; the attention product of all layers is one row, whose tokens say nothing."""
        if self.counters is None:
            return (0,) * len(COUNTS)
        stats = self.counters.as_dict()
        fallbacks = sum(stats["fallbacks"].values())
        tokens = None if self.facts[0] == "attention" else stats["tokens"]
        return tokens, stats["calls"], stats["kernel_calls"], stats["small"], fallbacks

    def as_dict(self) -> dict[str, Any]:
        stats = {} if self.counters is None else self.counters.as_dict()
        return {"name": self.name, **dict(zip(FACTS, self.facts, strict=True)), **stats}


@dataclass(frozen=True)
class StoreRecord:
    """The figures of a store; keeps none of its memory."""

    report: StoreReport

    def as_dict(self) -> dict[str, Any]:
        facts = dict.fromkeys(FACTS) | {"kind": "store"}
        return {"name": "expert store", **facts, **self.report.stats()}


def records(replaced: Replaced) -> list[Record | StoreRecord]:
    parts = [part for part in (replaced.moe, replaced.dense) if part is not None]
    found: list[Record | StoreRecord] = [record(layer) for part in parts for layer in part.layers]
    stores = [part.store for part in parts if part.store is not None]
    return found + [StoreRecord(store) for store in stores]


def record(layer: ReplacedLayer) -> Record:
    return Record(layer.name, layer.facts, layer.counters)


def write(all_: Sequence[Record | StoreRecord], form: str) -> None:
    """Print what ran to stderr; `form` is the value of --stats."""
    if form == "none" or not all_:
        return
    ran = [record for record in all_ if isinstance(record, Record)]
    if form == "json":
        text = json.dumps([record.as_dict() for record in all_], indent=1)
    elif form == "layers":
        rows = [[record.name, *record.facts, *record.counts()] for record in ran]
        text = table(["layer", *FACTS, *COUNTS], rows)
    else:
        text = table([FACTS[0], "layers", *FACTS[1:], *COUNTS], summary(ran))
    if form != "json":
        lines = static_summary(ran), schedule_summary(ran), ranks_summary(ran)
        text += "".join(f"\n{line}" for line in lines if line)
        stores = [record for record in all_ if isinstance(record, StoreRecord)]
        text += "".join(f"\n{store_summary(record.report.stats())}" for record in stores)
    sys.stdout.flush()
    print(text, file=sys.stderr)


def summary(ran: Iterable[Record]) -> list[list[Cell]]:
    """One row for all layers with the same facts: kind, how many, the tokens that each one saw
    (the most, where they differ) and the calls of all."""
    groups: dict[tuple[Cell, ...], list[tuple[Any, ...]]] = {}
    for record in ran:
        groups.setdefault(record.facts, []).append(record.counts())
    rows: list[list[Cell]] = []
    for (kind, *facts), counts in groups.items():
        tokens, *calls = zip(*counts, strict=True)
        layers, most = (None, None) if None in tokens else (len(counts), max(tokens))
        rows.append([kind, layers, *facts, most, *map(sum, calls)])
    return rows


def schedule_summary(ran: Iterable[Record]) -> str:
    """What following the plan did, in a line; empty where none was followed."""
    followed = [r.counters.schedule() for r in ran if r.counters and r.counters.schedule]
    if not followed:
        return ""
    total = {key: sum(counts[key] for counts in followed) for key in followed[0]}
    return (
        f"rebalance: {total['replans']} re-plans in {len(followed)} layers, "
        f"{as_size(int(total['bytes_moved']))} moved; {total['declined']} shifts that did not pay"
        + (f"; {total['failed']} changes failed" if total["failed"] else "")
    )


def ranks_summary(ran: Iterable[Record]) -> str:
    """What the sums over ranks took, in a line, and whether single tokens paid for them; empty
    where there were none."""
    shared = [r.counters.ranks.as_dict() for r in ran if r.counters and r.counters.ranks]
    total = {key: sum(counts[key] for counts in shared) for key in RankCounters.COUNTS}
    if not total["sums"]:
        return ""
    text = (
        f"ranks: {total['sums']} sums took {total['sum_seconds']:.2f} s of the "
        f"{total['seconds']:.2f} s of the experts' layers"
    )
    seconds = sum(counts["token_seconds"] for counts in shared)
    if seconds:
        share = sum(counts["token_sum_seconds"] for counts in shared) / seconds
        size = int(shared[0]["size"])
        text += f", {share:.0%} of it at one token"
        if share > (size - 1) / size:  # the rest would take one process `size` times as long
            text += (
                f": more than {size} ranks save there; one process with room for all experts "
                "is probably faster"
            )
    return text


def store_summary(stats: dict[str, Any]) -> str:
    """What a store did, in a line."""
    asked = stats["hits"] + stats["misses"] + stats["prefetch_useful"]
    if not asked and stats["resident_bytes"] == stats["total_bytes"]:  # on a GPU; not counted then
        return f"expert store: all {as_size(stats['total_bytes'])} in memory since the start"
    if not asked:
        return "expert store: no expert was asked for"
    ahead = f"{stats['prefetch_useful']} of {stats['prefetch_issued']} read ahead were used"
    if stats["prefetch"] is False:
        ahead += " (off: it did not help)"
    return (
        f"expert store: {as_size(stats['resident_bytes'])} in memory, limit "
        f"{as_size(stats['limit_bytes'])} of {as_size(stats['total_bytes'])} ({stats['policy']}); "
        f"{asked} experts asked for, {stats['hits'] / asked:.1%} in memory; {ahead}, "
        f"{stats['prefetch_wasted']} wasted; {as_size(stats['bytes_read'])} read, "
        f"{stats['stall_seconds']:.2f} s of waiting, {stats['evictions']} evictions"
    )


def static_summary(ran: Iterable[Record]) -> str | None:
    """What the static paths did, in a line; None if no layer has one."""
    stats = [record.counters.as_dict().get("static") for record in ran if record.counters]
    static = [counts for counts in stats if counts is not None]
    if not static:
        return None
    total = {key: sum(s[key] for s in static) for key in static[0] if key != "seconds"}
    if not total["forwards"]:
        if cold := total["cold_groups"]:
            return f"static path: not taken, {cold} groups of the plan are computed cold"
        return "static path: not taken, every forward had fewer tokens than the plan starts at"
    hot, waits = total["hot"], total["waits"]
    routed = sum(total[key] for key in ("hot", "cold", "spilled", "pruned"))
    others = ", ".join(f"{total[key]} {key}" for key in ("cold", "spilled", "pruned"))
    unusual = "".join(f", {total[key]} {key.replace('_', ' ')}" for key in UNUSUAL if total[key])
    seconds = {stage: sum(s["seconds"][stage] for s in static) for stage in static[0]["seconds"]}
    times = ", ".join(f"{stage} {1e3 * t:.1f}" for stage, t in seconds.items())
    return (
        f"static path: {hot} of {routed} assignments hot ({hot / routed:.0%}), {others}; "
        f"{total['padding'] / max(hot + total['padding'], 1):.0%} padding; {total['dispatches']} "
        f"dispatches, {waits} waits{unusual}; ms: {times}"
    )
