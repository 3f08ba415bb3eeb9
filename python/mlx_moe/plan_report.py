"""What a plan expects, layer by layer and overall: as JSON and as a table."""

import re
from typing import Any

from .cost import break_even, expert_of, package_experts
from .plan import LayerPlan, Plan
from .tables import table

STATIC_HEADER = (
    *("layer", "Gini", "top quarter", "hot", "tiers", "groups", "fill", "padding", "overflow"),
    *("hot share", "MB", "planned ms", "all cold ms", "from tokens", "wins from load"),
)
CPU_HEADER = (
    *("layer", "Gini", "top quarter", "packed", "packed share", "MB", "planned ms"),
    *("all in place ms", "from tokens"),
)


def report(plan: Plan) -> dict[str, Any]:
    """All numbers of the table, and why layers have no static path."""
    layers = [_layer(plan, layer) for layer in plan.layers]
    return {
        "model": plan.identity.name,
        "device": plan.device.name,
        "measured": plan.device.measured,
        "executor": plan.executor,
        "chunk": plan.chunk,
        "weights": plan.weights,
        "options": plan.options,
        "overall": _overall(plan, layers),
        "layers": layers,
    }


def _layer(plan: Plan, layer: LayerPlan) -> dict[str, Any]:
    expected = dict(vars(layer.expected))
    return {
        "layer": layer.name,
        "experts": layer.facts.experts,
        "hot_experts": len(layer.hot or layer.packed),
        "tiers": list(layer.tiers),
        "groups": len(layer.all_groups),
        "shared_hot": bool(layer.shared and layer.shared.groups),
        **expected,
        "static_from": layer.static_from,
        "break_even": _break_even(plan, layer),
        "reason": layer.reason,
    }


def _break_even(plan: Plan, layer: LayerPlan) -> int | None:
    """The load from which the static executor wins for an expert of a full group."""
    if plan.executor == "cpu":
        return None
    expert = expert_of(layer.facts)
    most, _ = package_experts(plan.device, expert, plan.weights)
    return break_even(plan.device, expert, plan.weights, min(most, layer.facts.experts))


def _overall(plan: Plan, layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums of bytes and milliseconds; shares of all the layers' slots and assignments."""
    hot = [row for row in layers if row["hot"] > 0]
    assignments = {
        layer.name: plan.chunk * layer.facts.top_k for layer in plan.layers
    }  # in a full chunk

    def mean(key: str, rows: list[dict[str, Any]]) -> float:
        return sum(row[key] for row in rows) / len(rows) if rows else 0.0

    served = {row["layer"]: row["hot"] * assignments[row["layer"]] for row in hot}
    slots = sum(served[row["layer"]] / (1 - row["padding"]) for row in hot if row["padding"] < 1)
    own = sum(served[row["layer"]] / row["fill"] for row in hot if row["fill"])
    routed = sum(served[r["layer"]] / (1 - r["overflow"]) for r in hot if r["overflow"] < 1)
    total = sum(served.values())
    return {
        "layers": len(layers),
        "layers_with_hot": sum(row["hot_experts"] > 0 or row["shared_hot"] for row in layers),
        "gini": mean("gini", layers),
        "top_quarter": mean("top_quarter", layers),
        "hot_experts": sum(row["hot_experts"] for row in layers),
        "groups": sum(row["groups"] for row in layers),
        "fill": total / own if own else 0.0,
        "padding": 1 - total / slots if slots else 0.0,
        "overflow": 1 - total / routed if routed else 0.0,
        "hot": total / sum(assignments.values()) if assignments else 0.0,
        "bytes": sum(row["bytes"] for row in layers),
        "static_ms": sum(row["static_ms"] for row in layers),
        "cold_ms": sum(row["cold_ms"] for row in layers),
    }


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
    cells = _cpu_cells if found["executor"] == "cpu" else _static_cells
    header = CPU_HEADER if found["executor"] == "cpu" else STATIC_HEADER
    lines = [
        f"{found['model']} on {found['device']}, chunks of {found['chunk']} tokens",
        table(header, [cells(row) for row in [*rows, overall]]),
        _gain(found),
        *_notes(found),
    ]
    return "\n".join(lines)


def _static_cells(row: dict[str, Any]) -> list[Any]:
    some = row["hot"] > 0
    return [
        row["layer"],
        f"{row['gini']:.2f}",
        f"{row['top_quarter']:.0%}",
        f"{row['hot_experts']} of {row['experts']}",
        " ".join(map(str, row["tiers"])) or None,
        row["groups"],
        f"{row['fill']:.0%}" if some else None,
        f"{row['padding']:.0%}" if some else None,
        f"{row['overflow']:.1%}" if some else None,
        f"{row['hot']:.0%}",
        f"{row['bytes'] / 1e6:.1f}",
        f"{row['static_ms']:.2f}",
        f"{row['cold_ms']:.2f}",
        row["static_from"],
        row["break_even"],
    ]


def _cpu_cells(row: dict[str, Any]) -> list[Any]:
    return [
        row["layer"],
        f"{row['gini']:.2f}",
        f"{row['top_quarter']:.0%}",
        f"{row['hot_experts']} of {row['experts']}",
        f"{row['hot']:.0%}",
        f"{row['bytes'] / 1e6:.1f}",
        f"{row['static_ms']:.2f}",
        f"{row['cold_ms']:.2f}",
        row["static_from"],
    ]


def _gain(found: dict[str, Any]) -> str:
    overall = found["overall"]
    cold, planned = overall["cold_ms"], overall["static_ms"]
    budget = found["options"].get("memory", 0)
    where = "packed" if found["executor"] == "cpu" else "resident"
    return (
        f"expected: {planned:.2f} ms for the experts of a chunk, {cold:.2f} without "
        f"({cold / planned if planned else 1:.2f}x); {overall['bytes'] / 1e6:.1f} MB {where} of a "
        f"budget of {budget / 1e6:.0f}"
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
