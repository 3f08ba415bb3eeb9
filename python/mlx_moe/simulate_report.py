"""What a simulation is shown as: a table, JSON, a picture."""

from collections import Counter
from pathlib import Path
from typing import Any

from .cost import bytes_of
from .devices import Device
from .figures import require_matplotlib, save
from .simulate import Outcome
from .simulate_routing import Routing
from .tables import table

WORDS = {
    "cpu": "processor alone",
    "cold": "GPU alone",
    "naive": "a program an expert",
    "plan": "planned",
    "plan-cpu": "planned, without the GPU",
    "forced": "forced hot",
}
ON_CPU = {"cold": "the processor's kernels"}  # of a device without a static executor
COLUMNS = ("strategy", "ms a step", "p95", "J a step", "J idle", "CPU ms", "dispatches", "copies")


def report(routing: Routing, device: Device, outcomes: list[Outcome]) -> dict[str, Any]:
    """Everything that is shown, as JSON; all numbers are simulated."""
    simulated = routing.halves()[1]
    return {
        "simulated": True,
        "model": routing.name,
        "routing": routing.source,
        "layers": len(routing.facts),
        "shapes": _shapes(routing),
        "steps": simulated.steps,
        "tokens": float(simulated.tokens.mean()),
        "device": device.as_dict(),
        "results": [outcome.as_dict() for outcome in outcomes],
    }


def as_text(found: dict[str, Any]) -> str:
    """The table, with what the numbers are worth beneath."""
    results = found["results"]
    words = WORDS | (ON_CPU if found["device"]["executor"] == "cpu" else {})
    first = results[0]
    rows = []
    for r in results:
        rows.append(
            [
                f"{r['strategy']}: {words[r['strategy']]}",
                f"{r['seconds'] * 1e3:.2f}",
                f"{r['p95_seconds'] * 1e3:.2f}",
                _number(r["joules"], 1, ".3g"),
                _number(r["idle_joules"], 1, ".3g"),
                _number(r["cpu_seconds"], 1e3, ".1f"),
                f"{r['dispatches']:.0f}",
                f"{r['hot_bytes'] / 1e9:.2f} GB",
                f"{first['seconds'] / r['seconds']:.2f}x" if r["seconds"] else "-",
            ]
        )
    numbers = found["device"]["numbers"] | found["device"].get("simulation", {})
    guessed = sum(not number["measured"] for number in numbers.values())
    lines = [
        f"SIMULATED, nothing here was run. {found['model']}: {_sizes(found['shapes'])}; "
        f"{found['tokens']:.0f} tokens a step, means of {found['steps']} steps "
        f"({found['routing']})",
        table([*COLUMNS, f"faster than {first['strategy']}"], rows),
        *(f"{r['strategy']}: {r['note']}" for r in results if r["note"]),
        f"device {found['device']['name']}: {guessed} of {len(numbers)} numbers are others' or "
        "assumed, each with its source in --json; J a step is of busy units, J idle what the "
        "machine draws besides",
    ]
    if "host_bandwidth" not in found["device"].get("simulation", {}) and any(
        r["dispatches"] for r in results
    ):
        lines.append("the profile does not know its processor: packing and combining take no time")
    return "\n".join(lines)


def _shapes(routing: Routing) -> list[dict[str, Any]]:
    """The kinds of layers, with how many there are of each."""
    kinds = Counter(
        (f.experts, f.top_k, f.hidden, f.inner, bytes_of(f.weights)) for f in routing.facts
    )
    names = ("experts", "top_k", "hidden", "inner", "weight_bytes")
    return [{"layers": n, **dict(zip(names, kind, strict=True))} for kind, n in kinds.items()]


def _sizes(shapes: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{s['layers']} layers of {s['experts']} experts (top {s['top_k']}) of {s['hidden']} x "
        f"{s['inner']} with {8 * s['weight_bytes']:.3g} bits a weight"
        for s in shapes
    )


def _number(value: float | None, scale: float, form: str) -> str | None:
    return None if value is None else format(value * scale, form)


def plot(found: dict[str, Any], path: str | Path) -> None:
    """Bars of latency, energy and processor time; MissingDependency without matplotlib."""
    figures = require_matplotlib()
    panels = [
        ("seconds", 1e3, "ms a step"),
        ("joules", 1, "J a step (busy units)"),
        ("cpu_seconds", 1e3, "processor ms a step"),
    ]
    results = found["results"]
    figure = figures.Figure(figsize=(11, 1.6 + 0.4 * len(results)), layout="constrained")
    names = [r["strategy"] for r in results]
    for axes, (key, scale, label) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        values = [(r[key] or 0.0) * scale for r in results]
        bars = axes.barh(names, values, color="#0072b2")
        unknown = [r[key] is None for r in results]
        labels = ["not known" if u else f"{v:.3g}" for u, v in zip(unknown, values, strict=True)]
        axes.bar_label(bars, labels, padding=3, fontsize=8)
        axes.set_xlabel(label)
        axes.margins(x=0.25)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Simulated: {found['model']} on {found['device']['name']}")
    save(figure, Path(path), dpi=150)
