"""Log-probabilities of given text: forwards near a plan's chunk of tokens each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache


@dataclass(frozen=True)
class Question:
    """A context and its possible continuations, in tokens.

    Attributes:
        divisors: what each continuation's log-probability is divided by before they are
            compared; 1, or its length where a benchmark compares by length.
    """

    context: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    answer: int
    divisors: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """One continuation of one question: numbers of both."""

    question: int
    choice: int


@dataclass
class Scores:
    """[rows] log-probability of each row's continuation; whether it is the greedy one."""

    rows: list[Row]
    total: np.ndarray
    greedy: np.ndarray


def log_probabilities(model: Any, tokens: np.ndarray, cache: Any = None) -> mx.array:
    """[R, T, vocabulary] f32 of the token after each of `tokens` [R, T]; not yet evaluated."""
    logits = model(mx.array(tokens), cache=cache).astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """[R, longest]; a short row is followed by its own tokens again.

    Padding comes after what is scored and cannot change it; being text, it is routed as text.
    """
    width = max(map(len, rows))
    return np.stack([np.resize(np.asarray(row, np.int32), width) for row in rows])


class SharedContexts:
    """Questions whose contexts have one length: read once, then continued from the cache."""

    def __init__(self, questions: Sequence[Question], numbers: Sequence[int], chunk: int):
        self.questions, self.chunk = [questions[i] for i in numbers], chunk
        self.rows = [
            Row(number, choice)
            for number, question in zip(numbers, self.questions, strict=True)
            for choice in range(len(question.choices))
        ]
        self.owners = np.repeat(
            np.arange(len(self.questions)), [len(q.choices) for q in self.questions]
        )
        self.continuations = [choice for q in self.questions for choice in q.choices]

    def run(self, model: Any) -> Scores:
        cache = make_prompt_cache(model)
        contexts = np.array([q.context for q in self.questions], np.int32)
        first = _read(model, contexts, cache, contexts.shape[1] - 1, self.chunk)[:, 0]
        firsts = mx.take(first, mx.array(self.owners), axis=0)[:, None]
        scores = Scores(self.rows, *_follow(firsts, [c[:1] for c in self.continuations], 0))
        long = [row for row, tokens in enumerate(self.continuations) if len(tokens) > 1]
        for rows in _filling(long, [len(c) - 1 for c in self.continuations], self.chunk):
            tokens = padded([self.continuations[row][:-1] for row in rows])
            mine = _taken(cache, self.owners[rows])
            logs = log_probabilities(model, tokens, mine)
            total, greedy = _follow(logs, [self.continuations[row][1:] for row in rows], 0)
            scores.total[rows] += total
            scores.greedy[rows] &= greedy
        return scores


class WholeRows:
    """Rows of contexts with a continuation, read as they are; of any lengths."""

    def __init__(self, questions: Sequence[Question], rows: list[Row], chunk: int):
        self.rows, self.chunk = rows, chunk
        self.contexts = [questions[row.question].context for row in rows]
        self.continuations = [questions[row.question].choices[row.choice] for row in rows]

    def run(self, model: Any) -> Scores:
        pairs = zip(self.contexts, self.continuations, strict=True)
        tokens = padded([context + continuation[:-1] for context, continuation in pairs])
        starts = [len(context) - 1 for context in self.contexts]
        logs = _read(model, tokens, make_prompt_cache(model), min(starts), self.chunk)
        offsets = np.array(starts) - min(starts)
        return Scores(self.rows, *_follow(logs, self.continuations, offsets))


def batches(
    questions: Sequence[Question], numbers: Sequence[int], chunk: int, shareable: bool
) -> list[SharedContexts | WholeRows]:
    """Batches of the questions `numbers` whose forwards have about `chunk` tokens each."""
    made: list[SharedContexts | WholeRows] = []
    loose = []
    by_length: dict[int, list[int]] = {}
    for number in numbers:
        by_length.setdefault(len(questions[number].context), []).append(number)
    for length, alike in by_length.items():
        size = max(1, chunk // length)
        for start in range(0, len(alike), size):
            part = alike[start : start + size]
            if shareable and 2 * len(part) * length >= chunk:
                made.append(SharedContexts(questions, part, chunk))
            else:
                loose += part
    rows = [Row(n, c) for n in loose for c in range(len(questions[n].choices))]
    lengths = [len(_whole(questions, row)) for row in rows]
    for part in _filling(list(np.argsort(lengths, kind="stable")), lengths, chunk):
        made.append(WholeRows(questions, [rows[i] for i in part], chunk))
    return made


def caches_repeat(model: Any) -> bool:
    """Whether the model's cache is of the plain kind, whose rows can be repeated."""
    return all(type(layer) is KVCache for layer in make_prompt_cache(model))


def _whole(questions: Sequence[Question], row: Row) -> tuple[int, ...]:
    question = questions[row.question]
    return question.context + question.choices[row.choice]


def _filling(rows: Sequence[int], lengths: Sequence[int], chunk: int) -> Iterator[list[int]]:
    """Runs of `rows` that have at most `chunk` tokens, padded to the longest; one at least."""
    part: list[int] = []
    longest = 0
    for row in map(int, rows):
        if part and (len(part) + 1) * max(longest, lengths[row]) > chunk:
            yield part
            part, longest = [], 0
        part.append(row)
        longest = max(longest, lengths[row])
    if part:
        yield part


def _read(model: Any, tokens: np.ndarray, cache: Any, start: int, chunk: int) -> mx.array:
    """Log-probabilities after the tokens from `start` on; long rows are read chunk by chunk."""
    kept = []
    step = max(1, chunk // len(tokens))
    for at in range(0, tokens.shape[1], step):
        logs = log_probabilities(model, tokens[:, at : at + step], cache)
        if at + step > start:
            kept.append(logs[:, max(0, start - at) :])
        mx.eval(kept[-1] if kept else logs[:, -1])
    return mx.concatenate(kept, axis=1)


def _taken(cache: list[Any], owners: np.ndarray) -> list[Any]:
    """The cache's rows `owners`, as a cache of their own."""
    rows = mx.array(owners)
    made = []
    for layer in cache:
        copy = KVCache()
        copy.keys = mx.take(layer.keys[..., : layer.offset, :], rows, axis=0)
        copy.values = mx.take(layer.values[..., : layer.offset, :], rows, axis=0)
        copy.offset = layer.offset
        made.append(copy)
    return made


def _follow(
    logs: mx.array, targets: Sequence[Sequence[int]], starts: np.ndarray | int
) -> tuple[np.ndarray, np.ndarray]:
    """Per row, the sum of `logs` [R, T, V] along its targets from position `starts` on, and
    whether each target is the most likely token there."""
    lengths = np.array([len(row) for row in targets])
    steps = np.arange(lengths.max())
    positions = np.minimum(np.asarray(starts).reshape(-1, 1) + steps, logs.shape[1] - 1)
    positions = np.broadcast_to(positions, (len(targets), len(steps)))
    logs = mx.take_along_axis(logs, mx.array(positions)[..., None], axis=1)
    wanted = mx.array(padded(targets))[..., None]
    found = mx.take_along_axis(logs, wanted, axis=-1)[..., 0]
    best = mx.argmax(logs, axis=-1) == wanted[..., 0]
    mx.eval(found, best)
    valid = steps < lengths[:, None]
    total = np.where(valid, np.array(found, np.float64), 0).sum(axis=1)
    return total, np.all(np.array(best) | ~valid, axis=1)
