"""Tables of what was replaced and of what ran."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ..loading import Replaced
from ..replace import Replacement

HEADER = ("layers", "family", "experts", "top-k", "weights", "backend", "tokens", "kernel", "stock")


def write(models: Sequence[Replaced], form: str) -> None:
    """Print what ran in `models` to stderr; `form` is the value of --stats."""
    if form == "none" or not models:
        return
    if form == "json":
        text = json.dumps([as_dict(model) for model in models], indent=1)
    elif form == "layers":
        text = "\n".join(str(part) for model in models for part in parts(model))
    else:
        text = table(HEADER, [row for model in models for row in summary(model)])
    print(text, file=sys.stderr)


def parts(model: Replaced) -> list[Replacement]:
    return [part for part in (model.moe, model.dense) if part is not None]


def as_dict(model: Replaced) -> dict[str, Any]:
    """The statistics of each replaced layer, by kind and name."""
    kinds = {"moe": model.moe, "dense": model.dense}
    return {kind: part.stats() if part is not None else {} for kind, part in kinds.items()}


def summary(model: Replaced) -> list[list[str]]:
    """One row for each group of layers that differ in name only."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for part in parts(model):
        stats = part.stats()
        for layer in part.layers:
            groups.setdefault(describe(layer), []).append(stats[layer.name])
    return [[str(len(ran)), *key, *totals(ran)] for key, ran in groups.items()]


def describe(layer: Any) -> tuple[str, ...]:
    weights = f"{layer.bits}-bit" if layer.bits else str(layer.dtype)
    return (layer.family, str(layer.experts), str(layer.top_k), weights, layer.backend)


def totals(ran: Iterable[dict[str, Any]]) -> list[str]:
    """Tokens through the layers, kernel calls, and calls that fell back to stock code."""
    ran = list(ran)
    fallbacks = sum(sum(stats["fallbacks"].values()) for stats in ran)
    return [
        str(max(stats["tokens"] for stats in ran)),
        str(sum(stats["kernel_calls"] for stats in ran)),
        str(fallbacks),
    ]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain text table: the first column to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
