"""What a plan expects, layer by layer and overall, as JSON."""

from typing import Any

from .cost import break_even, expert_of, package_experts
from .plan import LayerPlan, Plan


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
