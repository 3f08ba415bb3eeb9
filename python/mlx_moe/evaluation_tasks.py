"""The tasks of an evaluation: what is run, and what its outputs say beside the reference's."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from .evaluation_data import Source
from .intervals import Interval, bootstrap_mean, mcnemar, paired_difference, proportion
from .scoring import Question, Scores, batches, caches_repeat, log_probabilities

ROWS = 64  # of log-probabilities that are float64 at a time


class Unit(Protocol):
    """One piece of a task, some forwards of about a chunk of tokens."""

    def run(self, model: Any) -> Any: ...


class Task(Protocol):
    """Units, each run by every side, the reference first."""

    name: str  # key of its metrics

    @property
    def units(self) -> Sequence[Unit]: ...
    def add(self, side: str, unit: Any, found: Any, reference: Any) -> None: ...
    def metrics(self, side: str, reference: str) -> dict[str, Any]: ...


class Window:
    """Tokens of text and what follows each: [T], [T]."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens = np.array(tokens[:-1], np.int32)[None]
        self.targets = np.array(tokens[1:], np.int32)

    def run(self, model: Any) -> np.ndarray:
        """Log-probabilities [T, vocabulary], f32."""
        logs = log_probabilities(model, self.tokens)
        mx.eval(logs)
        return np.array(logs[0])


class TextTask:
    """Log-probabilities of running text: divergence, agreement and perplexity.

    Windows are whole chunks, taken from the files in turns; their intervals resample windows.
    """

    name = "text"

    def __init__(self, sources: Sequence[Source], chunk: int, tokens: int):
        """`tokens`: as many windows as have so many tokens at most, one at least."""
        cut = [
            [Window(s.text[at : at + chunk + 1]) for at in range(0, len(s.text) - chunk, chunk)]
            for s in sources
        ]
        turns = [w[i] for i in range(max(map(len, cut), default=0)) for w in cut if i < len(w)]
        self.units: list[Window] = turns[: max(1, tokens // chunk)]
        self._sums: dict[str, list[tuple[float, ...]]] = {}

    def add(self, side: str, unit: Window, found: np.ndarray, reference: np.ndarray) -> None:
        sums = (
            divergence(reference, found),
            float((found.argmax(axis=1) == reference.argmax(axis=1)).sum()),
            -float(np.take_along_axis(found, unit.targets[:, None], 1).sum(dtype=np.float64)),
            float(len(unit.targets)),
        )
        self._sums.setdefault(side, []).append(sums)

    def metrics(self, side: str, reference: str) -> dict[str, Any]:
        kl, same, loss, counts = np.array(self._sums[side]).T
        stock = np.array(self._sums[reference]).T[2]
        return {
            "tokens": int(counts.sum()),
            "windows": len(counts),
            "kl": bootstrap_mean(kl, counts),
            "top1": bootstrap_mean(same, counts),
            "perplexity": _exp(bootstrap_mean(loss, counts)),
            "perplexity_ratio": _exp(bootstrap_mean(loss - stock, counts)),
        }


def divergence(reference: np.ndarray, found: np.ndarray) -> float:
    """Sum over tokens of KL(reference || found) in nats, in float64; both are [T, vocabulary]."""
    total = 0.0
    for at in range(0, len(reference), ROWS):
        p = reference[at : at + ROWS].astype(np.float64)
        total += float((np.exp(p) * (p - found[at : at + ROWS])).sum())
    return total


class QuestionTask:
    """Questions with several continuations: how often the true one is the most likely."""

    name = "choice"

    def __init__(self, model: Any, groups: Sequence[Sequence[Question]], chunk: int):
        """`groups`: batches are made within each, so that a chunk has text of one kind."""
        self.questions = [question for group in groups for question in group]
        shareable, first = caches_repeat(model), 0
        self.units: list[Unit] = []
        for group in groups:
            numbers = range(first, first + len(group))
            self.units += batches(self.questions, numbers, chunk, shareable)
            first += len(group)
        self.scores: dict[str, list[np.ndarray]] = {}
        self.greedy: dict[str, list[np.ndarray]] = {}

    def add(self, side: str, unit: Unit, found: Scores, reference: Scores) -> None:
        if side not in self.scores:
            shapes = [len(q.choices) for q in self.questions]
            self.scores[side] = [np.full(n, np.nan) for n in shapes]
            self.greedy[side] = [np.zeros(n, bool) for n in shapes]
        for row, total, greedy in zip(found.rows, found.total, found.greedy, strict=True):
            self.scores[side][row.question][row.choice] = total
            self.greedy[side][row.question][row.choice] = greedy

    def right(self, side: str) -> np.ndarray:
        """[questions] whether the true continuation is the most likely."""
        pairs = zip(self.scores[side], self.questions, strict=True)
        return np.array([int(np.argmax(s / q.divisors)) == q.answer for s, q in pairs])

    def metrics(self, side: str, reference: str) -> dict[str, Any]:
        return {
            "items": len(self.questions),
            "choices": float(np.mean([len(q.choices) for q in self.questions])),
            **paired(self.right(reference), self.right(side)),
        }


class RetrievalTask(QuestionTask):
    """Needles: as questions, and whether greedy decoding would write the answer."""

    name = "retrieval"

    def exact(self, side: str) -> np.ndarray:
        pairs = zip(self.greedy[side], self.questions, strict=True)
        return np.array([bool(greedy[q.answer]) for greedy, q in pairs])

    def metrics(self, side: str, reference: str) -> dict[str, Any]:
        return {
            **super().metrics(side, reference),
            "length": len(self.questions[0].context),
            "exact": paired(self.exact(reference), self.exact(side)),
        }


def paired(reference: np.ndarray, found: np.ndarray) -> dict[str, Any]:
    """Accuracies of two sides on the same items, and of their difference."""
    count = len(found)
    gained, lost = int((found & ~reference).sum()), int((reference & ~found).sum())
    return {
        "accuracy": proportion(int(found.sum()), count),
        "reference": proportion(int(reference.sum()), count),
        "difference": paired_difference(gained, lost, count),
        "gained": gained,
        "lost": lost,
        "p_value": mcnemar(gained, lost),
    }


def _exp(interval: Interval) -> Interval:
    return Interval(*(math.exp(v) for v in (interval.value, interval.low, interval.high)))
