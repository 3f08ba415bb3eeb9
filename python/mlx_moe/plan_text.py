"""What a plan expects, as a table that fits a terminal; the JSON has every number in full."""

import re
from collections.abc import Sequence
from typing import Any

from .tables import table

STATIC_HEADER = (
    *("layer", "Gini", "top", "hot", "tiers", "groups", "fill", "pad", "over", "share"),
    *("MB", "ms", "cold", "from", "wins"),
)
STATIC_LEGEND = """\
top: share of the fullest quarter of experts; fill: of the slots at each expert's own tier;
pad: empty slots of those dispatched; over: overflow of the hot experts; share: of all assignments,
on the static path; ms, cold: of a chunk, as planned and all cold; from: tokens from which the
static path is taken; wins: load from which an expert is better off there"""
CPU_HEADER = ("layer", "Gini", "top", "packed", "share", "MB", "ms", "in place", "from")
CPU_LEGEND = """\
top: share of the fullest quarter of experts; share: of all assignments, on packed copies;
ms, in place: of a chunk, as planned and with nothing packed; from: tokens from which the copies
are used"""


def as_text(found: dict[str, Any]) -> str:
    """The table and what is to be known beside it."""
    rows = found["layers"]
    overall = {
        **found["overall"],
        "layer": "all",
        "tiers": [],
        "static_from": None,
        "break_even": None,
        "experts": sum(row["experts"] for row in rows),
    }
    pattern, names = short_names([row["layer"] for row in rows])
    named = [{**row, "layer": name} for row, name in zip(rows, names, strict=True)]
    cpu = found["executor"] == "cpu"
    cells, header = (_cpu_cells, CPU_HEADER) if cpu else (_static_cells, STATIC_HEADER)
    title = f"{found['model']} on {found['device']}, chunks of {found['chunk']} tokens, {pattern}"
    lines = [
        title,
        table(header, [cells(row) for row in [*named, overall]]),
        CPU_LEGEND if cpu else STATIC_LEGEND,
        _gain(found),
        *_notes(found),
    ]
    return "\n".join(lines)


def short_names(names: Sequence[str]) -> tuple[str, list[str]]:
    """What dotted paths have in common, with * for the rest, and the rest of each.

    A path alone gives up its numbers: "layers.3.mlp" is "layers.*.mlp" and "3".
    """
    split = [name.split(".") for name in names]
    if len({len(parts) for parts in split}) != 1:
        return "*", list(names)
    differ = [len(set(at)) > 1 or at[0].isdecimal() for at in zip(*split, strict=True)]
    if not any(differ):
        return "*", list(names)
    pattern = ["*" if other else part for part, other in zip(split[0], differ, strict=True)]
    rest = [
        ".".join(part for part, other in zip(parts, differ, strict=True) if other)
        for parts in split
    ]
    return ".".join(pattern), rest


def _static_cells(row: dict[str, Any]) -> list[Any]:
    some = row["hot"] > 0
    return [
        row["layer"],
        f"{row['gini']:.2f}",
        f"{row['top_quarter']:.0%}",
        f"{row['hot_experts']}/{row['experts']}",
        _range(row["tiers"]),
        row["groups"],
        f"{row['fill']:.0%}" if some else None,
        f"{row['padding']:.0%}" if some else None,
        f"{row['overflow']:.1%}" if some else None,
        f"{row['hot']:.0%}",
        _short(row["bytes"] / 1e6),
        _short(row["static_ms"]),
        _short(row["cold_ms"]),
        row["static_from"],
        row["break_even"],
    ]


def _cpu_cells(row: dict[str, Any]) -> list[Any]:
    return [
        row["layer"],
        f"{row['gini']:.2f}",
        f"{row['top_quarter']:.0%}",
        f"{row['hot_experts']}/{row['experts']}",
        f"{row['hot']:.0%}",
        _short(row["bytes"] / 1e6),
        _short(row["static_ms"]),
        _short(row["cold_ms"]),
        row["static_from"],
    ]


def _range(tiers: Sequence[int]) -> str | None:
    """The first and the last."""
    return "-".join(map(str, dict.fromkeys([*tiers[:1], *tiers[-1:]]))) or None


def _short(number: float) -> str:
    """Two decimals, fewer of a large number."""
    decimals = 2 if number < 10 else 1 if number < 1000 else 0
    return f"{number:.{decimals}f}"


def _gain(found: dict[str, Any]) -> str:
    overall = found["overall"]
    cold, planned = overall["cold_ms"], overall["static_ms"]
    budget = found["options"].get("memory", 0)
    where = "packed" if found["executor"] == "cpu" else "resident"
    return (
        f"expected: {planned:.2f} ms for the experts of a chunk, {cold:.2f} without "
        f"({cold / planned if planned else 1:.2f}x); {overall['bytes'] / 1e6:.1f} MB {where} of a "
        f"budget of {budget / 1e6:.0f} MB"
    )


def _notes(found: dict[str, Any]) -> list[str]:
    notes = []
    if not found["measured"]:
        notes.append(
            f"the numbers of {found['device']} are others' or assumed, each with its source in the "
            "plan: measure before you rely on times"
        )
    if (share := found["options"].get("force_hot")) is not None:
        notes.append(
            f"forced: {share:.0%} of the assignments were made hot without asking the cost"
        )
    for reasons in _alike(found["layers"]):
        names = [layer for layer, _ in reasons]
        if len(names) > 3:
            names = [names[0], "...", names[-1]]
        example = " (numbers of the first)" if len({reason for _, reason in reasons}) > 1 else ""
        notes.append(f"{', '.join(names)}: {reasons[0][1]}{example}")
    return notes


def _alike(rows: list[dict[str, Any]]) -> list[list[tuple[str, str]]]:
    """Layers and their reasons, those together that differ in numbers only."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        if row["reason"] is not None:
            kind = re.sub(r"[\d.]+", "", row["reason"])
            groups.setdefault(kind, []).append((row["layer"], row["reason"]))
    return list(groups.values())
