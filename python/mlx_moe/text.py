"""Read prompts, chats and plain text from files, as tokens, a document at a time."""

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .corpus import Document
from .errors import BadData

LINES, PLAIN = (".jsonl", ".json"), (".txt", ".md")
LONGEST_LINE = 64 << 20  # bytes
PIECE = 1 << 12  # bytes of plain text that are tokenised at a time
LONGEST_WORD = 1 << 14  # characters without white space, as some scripts are written
FORMS = 'one of {"text"}, {"prompt"}, {"prompt", "completion"} and {"messages"}'


def text_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files to read: those named, and in directories all that can be read, in order.

    Raises:
        BadData: a path is not there, of an unknown kind, or a directory has nothing to read.
    """
    known = (*LINES, *PLAIN)
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(f for f in path.rglob("*") if f.suffix in known and f.is_file())
            if not inside:
                raise BadData(f"{path}: the directory has no {', '.join(known)} file")
            files += inside
        elif not path.is_file():
            raise BadData(f"{path}: there is no such file or directory")
        elif path.suffix not in known:
            raise BadData(f"{path}: unknown kind of file; expected one of {', '.join(known)}")
        else:
            files.append(path)
    return list(dict.fromkeys(files))


class TextFiles:
    """The documents of files, read as they are asked for; can be iterated again.

    A line of JSON Lines is a document: {"text"} as it is; {"prompt"}, {"prompt", "completion"}
    and {"messages"} through the tokenizer's chat template, the first two as text if it has
    none. Plain text is cut into documents of `limit` tokens.

    Attributes:
        paths: the files.
        size, bytes_read: bytes of all files, and of those read so far.
    """

    def __init__(
        self,
        paths: Iterable[str | Path],
        tokenizer: Any,
        limit: int,
        ignore_chat_template: bool = False,
    ):
        self.paths = text_files(paths)
        self.size = sum(path.stat().st_size for path in self.paths)
        self.bytes_read = 0
        self._tokenizer, self._limit = tokenizer, limit
        self._chats = not ignore_chat_template and bool(
            getattr(tokenizer, "has_chat_template", False)
        )
        self._hashes: list[Any] = []

    @property
    def digests(self) -> list[str]:
        """SHA-256 (hex) of the bytes read of each file."""
        unread = [hashlib.sha256()] * (len(self.paths) - len(self._hashes))
        return [found.hexdigest() for found in self._hashes + unread]

    def __iter__(self) -> Iterator[Document]:
        """Raises BadData, which names file and line, for what cannot be read."""
        self.bytes_read, self._hashes = 0, []
        for source, path in enumerate(self.paths):
            self._hashes.append(hashlib.sha256())
            read = self._json_lines if path.suffix in LINES else self._plain_text
            try:
                with path.open("rb") as file:
                    for tokens in read(file, path):
                        if tokens:
                            yield Document(tokens, source)
            except OSError as error:
                raise BadData(f"{path}: cannot be read: {error}") from error

    def _count(self, data: bytes) -> None:
        self.bytes_read += len(data)
        self._hashes[-1].update(data)

    def _json_lines(self, file: BinaryIO, path: Path) -> Iterator[list[int]]:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            self._count(line)
            where = f"{path}:{number}"
            if len(line) > LONGEST_LINE:
                raise BadData(f"{where}: the line is longer than {LONGEST_LINE >> 20} MiB")
            if line.strip():
                yield self._tokens(_record(line, where), where)

    def _tokens(self, record: dict[str, Any], where: str) -> list[int]:
        """Tokens of one line's object, by the keys that it has."""
        if "messages" in record:
            return self._chat(record["messages"], record.get("tools"), where)
        if "text" in record:
            return self._encode(_text(record, "text", where))
        if "prompt" not in record:
            raise BadData(f"{where}: the keys are {sorted(record)}; expected {FORMS}")
        prompt = _text(record, "prompt", where)
        answer = _text(record, "completion", where) if "completion" in record else None
        if not self._chats:
            return self._encode(prompt + (answer or ""))
        messages = [{"role": "user", "content": prompt}]
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
        return self._chat(messages, None, where)

    def _chat(self, messages: Any, tools: Any, where: str) -> list[int]:
        if not _are_messages(messages):
            raise BadData(
                f'{where}: "messages" is not a list of objects, each with a "role" and a "content"'
            )
        if not self._chats:
            raise BadData(
                f"{where}: chat messages need a tokenizer with a chat template, and this one has "
                'none; give the text as {"text": ...}'
            )
        answered = messages[-1]["role"] == "assistant"
        options = {} if tools is None else {"tools": tools}
        try:
            return list(
                self._tokenizer.apply_chat_template(
                    messages, add_generation_prompt=not answered, **options
                )
            )
        except Exception as error:  # whatever the model's template raises
            raise BadData(f"{where}: the chat template refuses the messages: {error}") from error

    def _encode(self, text: str) -> list[int]:
        """As mlx-lm encodes a prompt: special tokens unless the text has them."""
        bos = self._tokenizer.bos_token
        special = bos is None or not text.startswith(bos)
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def _plain_text(self, file: BinaryIO, path: Path) -> Iterator[list[int]]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        tokens: list[int] = []
        line, rest, first = 1, "", True
        while True:
            data = file.read(PIECE)
            self._count(data)
            try:
                rest += decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                bad = error.object[: error.start]
                number = line + rest.count("\n") + bad.count(b"\n")
                raise BadData(f"{path}:{number}: the text is not UTF-8: {error.reason}") from None
            # Cut where a word ends: tokens seldom span white space to its left.
            cut = max(rest.rfind("\n"), rest.rfind(" "))
            if not data or len(rest) > LONGEST_WORD:
                cut = len(rest)
            if cut > 0 or not data:
                piece, rest = rest[:cut], rest[cut:]
                line += piece.count("\n")
                if piece:
                    tokens += (
                        self._encode(piece)
                        if first
                        else self._tokenizer.encode(piece, add_special_tokens=False)
                    )
                    first = False
            while len(tokens) >= self._limit:
                yield tokens[: self._limit]
                tokens = tokens[self._limit :]
            if not data:
                break
        yield tokens


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadData(f"{where}: the line is not UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise BadData(f"{where}: the line is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BadData(f"{where}: the line is not a JSON object; expected {FORMS}")
    return record


def _text(record: dict[str, Any], key: str, where: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise BadData(f"{where}: {key!r} is not text but {type(value).__name__}")
    return value


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
        and all("content" in m or "tool_calls" in m for m in value)
    )
