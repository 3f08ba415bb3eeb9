"""Pictures of a plan: where the load is, and which tiers it was given."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidArgument
from .figures import require_matplotlib, save
from .plan import LayerPlan, Plan

Array = NDArray[np.float64]
POPULARITY, LOADS = "popularity.png", "loads.png"
MOST_PANELS = 6  # of layers in the picture of loads
TIER_COLOURS = ("#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#0072b2", "#f0e442")
COLD, PACKED = "#8a8a8a", "#0072b2"


def plot_plan(plan: Plan, loads: list[Array], directory: str | Path) -> list[Path]:
    """Write both pictures into a directory, which is made if need be.

    Args:
        plan: made from these loads.
        loads: [chunks, E] of each layer, in chunks of the plan's size.

    Raises:
        MissingDependency: matplotlib is not installed.
        InvalidArgument: the directory cannot be written to.
    """
    figures = require_matplotlib()
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"cannot write pictures to {folder}: {error}") from error
    drawn = {POPULARITY: popularity(figures, plan, loads), LOADS: against(figures, plan, loads)}
    for name, figure in drawn.items():
        save(figure, folder / name, dpi=150)
    return [folder / name for name in drawn]


def _order(layer: LayerPlan, loads: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Experts by tier and then mean load, largest first, and the rank of each one's tier.

    Rank 1 is the layer's smallest tier (prepacked, for the CPU), 0 is cold.
    """
    rank = np.zeros(layer.facts.experts, np.int64)
    for group in layer.groups:
        rank[list(group.experts)] = layer.tiers.index(group.tier) + 1
    rank[list(layer.packed)] = 1
    order = np.lexsort((-loads.mean(axis=0), -rank))
    return order, rank[order]


def popularity(figures: Any, plan: Plan, loads: list[Array]) -> Any:
    """Layers by experts, coloured by load; the experts of a tier are outlined together."""
    from matplotlib.colors import PowerNorm
    from matplotlib.patches import Rectangle

    widest = max(layer.facts.experts for layer in plan.layers)
    heat = np.full((len(plan.layers), widest), np.nan)
    outlines: list[tuple[int, int, int, int]] = []  # layer, from, to, rank
    for i, (layer, own) in enumerate(zip(plan.layers, loads, strict=True)):
        order, rank = _order(layer, own)
        mean = own.mean(axis=0)[order]
        heat[i, : len(order)] = mean / max(mean.mean(), 1e-12)
        for tier in np.unique(rank[rank > 0]):
            at = np.flatnonzero(rank == tier)
            outlines.append((i, int(at[0]), int(at[-1]) + 1, int(tier)))

    height = min(2.2 + 0.28 * len(plan.layers), 14)
    figure = figures.Figure(figsize=(10, max(height, 3)), layout="constrained")
    axes = figure.subplots()
    most = float(np.nanpercentile(heat, 99.5))
    image = axes.imshow(
        heat,
        aspect="auto",
        cmap="Greys",
        norm=PowerNorm(0.5, 0, max(most, 1.0)),  # that the many small ones can be told apart
        extent=(0, widest, len(plan.layers), 0),
        interpolation="nearest",
    )
    for i, start, end, tier in outlines:
        box = Rectangle(
            (start + 0.04, i + 0.06),
            end - start - 0.08,
            0.88,
            fill=False,
            edgecolor=_colour(plan, tier),
            linewidth=2 if len(plan.layers) <= 32 else 1.2,
        )
        axes.add_patch(box)
    axes.set_xlabel("experts of the layer, by tier, then by load")
    axes.set_ylabel("layer")
    step = -(-len(plan.layers) // 24)
    places = range(0, len(plan.layers), step)
    axes.set_yticks([i + 0.5 for i in places], [_short(plan.layers[i].name) for i in places])
    axes.tick_params(axis="y", labelsize=8)
    axes.set_title(f"Popularity of experts, {plan.identity.name} on {plan.device.name}")
    figure.colorbar(
        image, ax=axes, label="load / mean load", extend="max", extendfrac=0.02, pad=0.01
    )
    if handles := _legend(plan):
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _colour(plan: Plan, rank: int) -> str:
    if rank == 0:
        return COLD
    return PACKED if plan.executor == "cpu" else TIER_COLOURS[(rank - 1) % len(TIER_COLOURS)]


def _legend(plan: Plan) -> list[Any]:
    """What the outlines' colours mean: a layer's first, second, ... tier."""
    from matplotlib.patches import Patch

    if plan.executor == "cpu":
        some = any(layer.packed for layer in plan.layers)
        return [Patch(fill=False, edgecolor=PACKED, linewidth=2, label="prepacked")] if some else []
    handles = []
    for rank in range(1, max((len(layer.tiers) for layer in plan.layers), default=0) + 1):
        sizes = [layer.tiers[rank - 1] for layer in plan.layers if len(layer.tiers) >= rank]
        low, high = min(sizes), max(sizes)
        span = f"{low}" if low == high else f"{low} to {high}"
        label = f"tier {rank}: {span} slots"
        handles.append(Patch(fill=False, edgecolor=_colour(plan, rank), linewidth=2, label=label))
    return handles


def _short(name: str) -> str:
    """The number in a layer's path, or its end."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    return numbers[0] if numbers else name[-16:]


def against(figures: Any, plan: Plan, loads: list[Array]) -> Any:
    """For some layers: each expert's load over the chunks, and the capacity that it was given."""
    count = min(MOST_PANELS, len(plan.layers))
    chosen = np.unique(np.linspace(0, len(plan.layers) - 1, count).round().astype(int))
    columns = min(2, len(chosen))
    rows = -(-len(chosen) // columns)
    figure = figures.Figure(figsize=(6 * columns, 2.9 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for axes, i in zip(panels, chosen, strict=False):
        _panel(axes, plan, plan.layers[i], loads[i])
    for axes in panels[len(chosen) :]:
        axes.set_axis_off()
    figure.suptitle(
        f"Load of each expert over {len(loads[0])} chunks of {plan.chunk} tokens "
        "(bars: 5 to 95 %, dots: median), and its tier (lines)"
    )
    return figure


def _panel(axes: Any, plan: Plan, layer: LayerPlan, loads: Array) -> None:
    order, rank = _order(layer, loads)
    low, middle, high = np.quantile(loads[:, order], [0.05, 0.5, 0.95], axis=0)
    at = np.arange(len(order))
    colours = [_colour(plan, int(tier)) for tier in rank]
    width = min(3.0, 260 / len(order))
    axes.vlines(at, low, high, color=colours, linewidth=width, alpha=0.75)
    axes.scatter(at, middle, s=min(9, 500 / len(order)), color="black", zorder=3)
    for tier in np.unique(rank[rank > 0]):
        if not layer.tiers:
            continue  # prepacked experts have no capacity
        members = np.flatnonzero(rank == tier)
        capacity = layer.tiers[tier - 1]
        axes.hlines(
            capacity,
            members[0] - 0.5,
            members[-1] + 0.5,
            color=_colour(plan, int(tier)),
            linewidth=2,
        )
        axes.annotate(
            str(capacity),
            (members.mean(), capacity),
            textcoords="offset points",
            xytext=(0, 3),
            ha="center",
            fontsize=8,
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.3},
        )
    expected = layer.expected
    facts = f"Gini {expected.gini:.2f}, {len(layer.hot or layer.packed)} hot"
    if layer.groups:
        facts += f", padding {expected.padding:.0%}, overflow {expected.overflow:.1%}"
    axes.set_title(f"layer {_short(layer.name)}: {facts}", fontsize=10)
    axes.set_ylim(0, max(float(high.max()), *layer.tiers, 1) * 1.12)
    axes.set_xlim(-1, len(order))
    axes.set_xlabel("expert, by tier, then by load", fontsize=8)
    axes.set_ylabel("tokens", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
