"""The picture of a simulated cache: hit rates over memory, one line a policy."""

from pathlib import Path
from typing import Any

from .figures import require_matplotlib, save

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a8a8a")


def plot(report: dict[str, Any], path: str | Path) -> None:
    """Write the hit rates that `mlx_moe simulate-cache` found.

    Raises MissingDependency without matplotlib.
    """
    figure = require_matplotlib().Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    policies = list(dict.fromkeys(row["policy"] for row in report["results"]))
    for i, policy in enumerate(policies):
        rows = sorted(
            (row for row in report["results"] if row["policy"] == policy),
            key=lambda row: row["budget"],
        )
        optimum = policy == "belady"
        axes.plot(
            [row["budget"] / 1e9 for row in rows],
            [100 * row["hit_rate"] for row in rows],
            marker="o",
            markersize=4,
            color="black" if optimum else COLOURS[i % len(COLOURS)],
            linestyle="--" if optimum else "-",
            label="optimum (belady)" if optimum else policy,
        )
    axes.set(xlabel="memory for experts, GB", ylabel="decode hits, %", ylim=(0, 101))
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, Path(path), dpi=150)
