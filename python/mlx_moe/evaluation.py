"""The result of an evaluation: as a table, as JSON."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .evaluation_sides import Side
from .intervals import Interval
from .tables import table


@dataclass
class SideResult:
    """One side's metrics by task (docs/evaluate.md), with `Interval`s."""

    side: Side
    metrics: dict[str, dict[str, Any]]

    @property
    def hot_share(self) -> float:
        """Of all assignments, those that the static executor computed."""
        return _share(self.side.counts["hot"], self.side.counts["assignments"])

    @property
    def drop_rate(self) -> float:
        """Of the assignments of hot experts in static forwards, those that were left out."""
        return _share(self.side.counts["pruned"], self._of_hot_experts)

    @property
    def spill_rate(self) -> float:
        """Of the assignments of hot experts in static forwards, those computed cold."""
        return _share(self.side.counts["spilled"], self._of_hot_experts)

    @property
    def _of_hot_experts(self) -> int:
        return sum(self.side.counts[name] for name in ("hot", "spilled", "pruned"))

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.side.name,
            "capacity_factor": self.side.factor,
            "random": self.side.random,
            "assignments": self.side.counts,
            "hot_share": self.hot_share,
            "drop_rate": self.drop_rate,
            "spill_rate": self.spill_rate,
            **_plain(self.metrics),
        }


@dataclass
class Evaluation:
    """Every side against the reference. `str()` is a table.

    Attributes:
        reference: "stock" or "cpu".
        chunk: tokens of a forward, about.
        rules: overflow and importance, empty without a plan.
        sides: the plan as it is (without one, the replaced layers), then by capacity factor.
    """

    reference: str
    chunk: int
    rules: dict[str, str]
    sides: list[SideResult]

    def as_dict(self) -> dict[str, Any]:
        """JSON: intervals are {"value", "low", "high"}, null where there is none."""
        return {
            "reference": self.reference,
            "chunk": self.chunk,
            **self.rules,
            "sides": [side.as_dict() for side in self.sides],
        }

    def __str__(self) -> str:
        texts = [_assignments(self.sides)] if self.rules else []
        for task, rows in (("text", _text), ("choice", _questions), ("retrieval", _questions)):
            if task in self.sides[0].metrics:
                texts.append(rows(task, self.reference, self.sides))
        return "\n\n".join([*texts, "In brackets: 95 % confidence intervals."])


def _assignments(sides: Sequence[SideResult]) -> str:
    header = ("capacity factor", "assignments", "hot", "spilled", "dropped")
    rows = [
        (
            side.side.name,
            side.side.counts["assignments"],
            f"{side.hot_share:.1%}",
            f"{side.spill_rate:.1%}",
            f"{side.drop_rate:.1%}",
        )
        for side in sides
    ]
    note = "hot: of all assignments; spilled and dropped: of those of hot experts"
    return f"{table(header, rows)}\n{note}"


def _text(task: str, reference: str, sides: Sequence[SideResult]) -> str:
    first = sides[0].metrics[task]
    header = (
        f"text, {first['tokens']} tokens",
        "KL nats/token",
        "same top token",
        "perplexity",
        f"over {reference}'s",
    )
    rows = []
    for side in sides:
        found = side.metrics[task]
        rows.append(
            (
                side.side.name,
                _cell(found["kl"], "{:.3g}"),
                _cell(found["top1"].scaled(100), "{:.2f}", " %"),
                f"{found['perplexity'].value:.4g}",
                _cell(found["perplexity_ratio"], "{:.4f}"),
            )
        )
    return table(header, rows)


def _questions(task: str, reference: str, sides: Sequence[SideResult]) -> str:
    first = sides[0].metrics[task]
    kinds = [(f"{task}, {first['items']} items of {first['choices']:g}", lambda found: found)]
    if "exact" in first:
        title = f"retrieval from {first['length']} tokens, greedy answer"
        kinds.append((title, lambda found: found["exact"]))
    texts = []
    for title, pick in kinds:
        header = (title, reference, "accuracy", "difference, points", "gained", "lost", "p")
        rows = []
        for side in sides:
            found = pick(side.metrics[task])
            rows.append(
                (
                    side.side.name,
                    f"{found['reference'].value:.1%}",
                    _cell(found["accuracy"].scaled(100), "{:.1f}", " %"),
                    _cell(found["difference"].scaled(100), "{:+.2f}"),
                    found["gained"],
                    found["lost"],
                    f"{found['p_value']:.2g}",
                )
            )
        texts.append(table(header, rows))
    return "\n\n".join(texts)


def _cell(interval: Interval, form: str, unit: str = "") -> str:
    text = form.format(interval.value) + unit
    if math.isnan(interval.low):
        return text
    return f"{text} [{form.format(interval.low)}, {form.format(interval.high)}]"


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return value.as_dict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
