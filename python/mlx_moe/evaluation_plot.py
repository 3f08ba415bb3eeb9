"""Accuracy and drop rate over the capacity factor, as a picture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import InvalidArgument
from .evaluation import Evaluation, SideResult
from .figures import require_matplotlib, save
from .intervals import Interval

Metric = tuple[str, Callable[[SideResult], Interval], float]  # label, value, the reference's


def plot(evaluation: Evaluation, path: str | Path) -> None:
    """Write a picture; the name's ending says of which kind.

    Above, accuracy of each questions task (KL divergence where there is none) with its intervals
    and the reference's as a line; below, the drop rate as it was counted, and the spill rate.

    Raises:
        InvalidArgument: fewer than two capacity factors, or a kind that matplotlib cannot write.
        MissingDependency: no matplotlib.
    """
    module = require_matplotlib()
    sides = sorted(
        (s for s in evaluation.sides if s.side.factor is not None), key=lambda s: s.side.factor or 0
    )
    if len({s.side.factor for s in sides}) < 2:
        raise InvalidArgument("a plot over capacity factors needs two or more of them")
    figure = module.Figure(figsize=(6.4, 6.4), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    for label, value, reference in _metrics(evaluation):
        for random in (False, True):
            _curve(above, [s for s in sides if s.side.random == random], value, label, random)
        above.axhline(reference, color="grey", linewidth=0.8, linestyle=":")
    above.set_ylabel(f"dotted: {evaluation.reference}")
    above.legend()
    for label, rate in (("dropped", "drop_rate"), ("spilled", "spill_rate")):
        for random in (False, True):
            points = [
                (s.side.factor, 100 * getattr(s, rate)) for s in sides if s.side.random == random
            ]
            if points and any(y for _, y in points):
                below.plot(*zip(*points, strict=True), _style(random), label=_label(label, random))
    below.set_ylabel("% of assignments of hot experts")
    below.set_xlabel("capacity factor")
    if below.lines:
        below.legend()
    save(figure, Path(path))


def _metrics(evaluation: Evaluation) -> list[Metric]:
    first = evaluation.sides[0].metrics
    found: list[Metric] = []
    for task in ("choice", "retrieval"):
        if task in first:
            found.append(
                (
                    f"{task} accuracy, %",
                    lambda side, task=task: side.metrics[task]["accuracy"].scaled(100),  # type: ignore[misc]
                    100 * first[task]["reference"].value,
                )
            )
    return found or [("KL, nats/token", lambda side: side.metrics["text"]["kl"], 0.0)]


def _curve(
    axes: Any,
    sides: list[SideResult],
    value: Callable[[SideResult], Interval],
    label: str,
    random: bool,
) -> None:
    if not sides:
        return
    found = [value(side) for side in sides]
    errors = [[i.value - i.low for i in found], [i.high - i.value for i in found]]
    axes.errorbar(
        [side.side.factor for side in sides],
        [i.value for i in found],
        errors,
        fmt=_style(random),
        capsize=3,
        label=_label(label, random),
    )


def _label(label: str, random: bool) -> str:
    return f"{label}, dropped at random" if random else label


def _style(random: bool) -> str:
    return "s--" if random else "o-"
