"""Read what a model is evaluated on: text, and questions with several continuations."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from .errors import BadData
from .scoring import Question
from .text import LINES, TextFiles, text_files
from .text import _record as json_object

QUESTIONS = {"choices", "endings", "passage"}  # keys of which every question has one
PIECE = 1 << 16  # tokens of plain text at a time
FORMS = (
    '{"text"} or {"prompt"}; {"context", "choices", "answer"}; HellaSwag\'s {"ctx", "endings", '
    '"label"}; BoolQ\'s {"passage", "question", "answer"}'
)


@dataclass
class Source:
    """One file: its text and its questions, in tokens.

    Attributes:
        text: tokens of all passages, one after the other.
        questions: in the order of the lines.
    """

    name: str
    text: list[int] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)


def read_sources(paths: Iterable[str | Path], tokenizer: Any) -> list[Source]:
    """Read files of questions and, as `calibrate` does, of text; directories stand for theirs.

    A JSON Lines file whose first line has choices is one of questions.

    Raises:
        BadData: a file is missing or a line has none of the forms of docs/evaluate.md; names
            the file and the line.
    """
    return [_read(path, tokenizer) for path in text_files(paths)]


def _read(path: Path, tokenizer: Any) -> Source:
    source = Source(str(path))
    if path.suffix in LINES:
        objects = _objects(path)
        first = next(objects, None)
        if first is not None and QUESTIONS & first[1].keys():
            source.questions = [
                _question(record, tokenizer, where) for where, record in chain([first], objects)
            ]
            return source
    for document in TextFiles([path], tokenizer, PIECE):
        source.text += document.tokens
    if not source.text:
        raise BadData(f"{path}: there is nothing in it; expected text, or lines of {FORMS}")
    return source


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file's lines, each with the words for where it is."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}:{number}"
                    yield where, json_object(line, where)
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error}") from error


def _question(record: dict[str, Any], tokenizer: Any, where: str) -> Question:
    if "choices" in record:
        context, choices = _string(record, "context", where), _strings(record, "choices", where)
        answer = _index(record, "answer", len(choices), where)
    elif "endings" in record:
        context = _string(record, "ctx", where)
        choices = [" " + ending for ending in _strings(record, "endings", where)]
        answer = _index(record, "label", len(choices), where)
    elif "passage" in record:
        context = f"{_string(record, 'passage', where)}\nQuestion: "
        context += f"{_string(record, 'question', where).rstrip('?')}?\nAnswer:"
        choices = [" no", " yes"]
        if not isinstance(record.get("answer"), bool):
            raise BadData(f'{where}: "answer" is {record.get("answer")!r}, expected a bool')
        answer = int(record["answer"])
    else:
        keys = ", ".join(map(repr, record)) or "none"
        raise BadData(f"{where}: found the keys {keys}; expected {FORMS}")
    by_length = "endings" in record
    divisors = [len(choice.encode()) if by_length else 1 for choice in choices]
    return tokenized(context, choices, answer, divisors, tokenizer, where)


def tokenized(
    context: str,
    choices: Sequence[str],
    answer: int,
    divisors: Sequence[float],
    tokenizer: Any,
    where: str,
) -> Question:
    """Tokens of context and continuation together, cut where the context's own end."""
    head = tuple(tokenizer.encode(context))
    whole = [tuple(tokenizer.encode(context + choice)) for choice in choices]
    # Where a continuation changes the context's last tokens, they become part of every choice.
    shared = min(_common(head, tokens) for tokens in whole)
    if shared == 0:
        raise BadData(f"{where}: the context has no token of its own; expected some text")
    ends = tuple(tokens[shared:] for tokens in whole)
    if not all(ends):
        raise BadData(f"{where}: a choice has no token; expected some text in each")
    return Question(head[:shared], ends, answer, tuple(map(float, divisors)))


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    for at, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return at
    return min(len(first), len(second))


def _string(record: dict[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise BadData(f'{where}: "{key}" is {value!r}, expected a string')
    return value


def _strings(record: dict[str, Any], key: str, where: str) -> list[str]:
    value = record.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadData(f'{where}: "{key}" is {value!r}, expected a list of strings')
    if len(value) < 2:
        raise BadData(f'{where}: "{key}" has {len(value)} entries, expected two or more')
    return value


def _index(record: dict[str, Any], key: str, count: int, where: str) -> int:
    """HellaSwag's labels are strings of digits, and empty in its test split."""
    value = record.get(key)
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise BadData(
            f'{where}: "{key}" is {value!r}, expected the number of the true choice, 0 to '
            f"{count - 1}"
        )
    return value
