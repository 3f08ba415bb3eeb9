"""Reading data: every form of line, plain text in pieces, and errors that name file and line."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from mlx_moe import text
from mlx_moe.errors import BadData
from mlx_moe.text import TextFiles, text_files


class Bytes:
    """A tokenizer whose tokens are the text's UTF-8 bytes, after a token 256 to begin."""

    bos_token = "<s>"
    has_chat_template = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [256] * add_special_tokens + list(text.encode())


class Chatting(Bytes):
    has_chat_template = True

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool, **more: Any) -> Any:
        if messages[0]["role"] == "system":
            raise ValueError("no system role")
        told = "".join(f"[{m['role']}]{m['content']}" for m in messages)
        told += json.dumps(more) if more else ""
        return self.encode(told + "[assistant]" * add_generation_prompt, False)


def said(tokens: list[int]) -> str:
    return bytes(t for t in tokens if t < 256).decode()


def read(path: Path, tokenizer: Any = None, limit: int = 100, **options: Any) -> list[str]:
    files = TextFiles([path], tokenizer or Bytes(), limit, **options)
    return [said(document.tokens) for document in files]


@pytest.mark.parametrize(
    ("record", "plain", "chat"),
    [
        ({"text": "a b"}, "a b", "a b"),
        ({"prompt": "hi"}, "hi", "[user]hi[assistant]"),
        ({"prompt": "hi", "completion": "ho"}, "hiho", "[user]hi[assistant]ho"),
        (
            {"messages": [{"role": "user", "content": "hi"}]},
            None,
            "[user]hi[assistant]",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "ho"},
                ]
            },
            None,
            "[user]hi[assistant]ho",
        ),
        (
            {"messages": [{"role": "user", "content": "hi"}], "tools": [1]},
            None,
            '[user]hi{"tools": [1]}[assistant]',
        ),
        ({"text": "é\u2028\n"}, "é\u2028\n", "é\u2028\n"),
    ],
)
def test_lines(tmp_path: Path, record: dict[str, Any], plain: str | None, chat: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + json.dumps(record, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert read(path, Chatting()) == [chat]
    if plain is not None:
        assert read(path) == [plain]
        assert read(path, Chatting(), ignore_chat_template=True) == [plain]
    else:
        with pytest.raises(BadData, match=r"a\.jsonl:2: chat messages need .* chat template"):
            read(path)


GOOD = b'{"text": "fine"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "the line is not JSON"),
        (b"[" * 100_000, "the line is not JSON"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"txt": "x"}', r"the keys are \['txt'\]; expected one of"),
        (b'{"text": 5}', "'text' is not text but int"),
        (b'{"prompt": null}', "'prompt' is not text but NoneType"),
        (b'{"prompt": "a", "completion": []}', "'completion' is not text but list"),
        (b'{"text": "\xff\xfe"}', "not UTF-8"),
        (b'{"messages": "hi"}', "not a list of objects"),
        (b'{"messages": []}', "not a list of objects"),
        (b'{"messages": [{"content": "hi"}]}', "not a list of objects"),
        (b'{"messages": [{"role": "user"}]}', "not a list of objects"),
        (b'{"messages": [{"role": "system", "content": ""}]}', "refuses the messages: no system"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD + line + b"\n" + GOOD)
    documents = iter(TextFiles([path], Chatting(), 100))
    assert said(next(documents).tokens) == said(next(documents).tokens) == "fine"
    with pytest.raises(BadData, match=rf"data\.jsonl:4: .*{message}"):
        next(documents)


def test_an_endless_line_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "LONGEST_LINE", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b'{"text": "' + b"x" * 5000)
    with pytest.raises(BadData, match=r"a\.jsonl:2: the line is longer"):
        read(path)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 5000])
@pytest.mark.parametrize("piece", [1, 7, 4096])
@pytest.mark.parametrize("letters", ["word éé\n", "無空白", "x"])
def test_plain_text_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, piece: int, letters: str
) -> None:
    monkeypatch.setattr(text, "PIECE", piece)
    monkeypatch.setattr(text, "LONGEST_WORD", 50)
    whole = (letters * size)[:size]
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + whole.encode())  # a byte order mark is not text
    files = TextFiles([path], Bytes(), 100)
    tokens = [document.tokens for document in files]
    assert all(len(part) == 100 for part in tokens[:-1])
    flat = [t for part in tokens for t in part]
    assert said(flat) == whole
    assert flat.count(256) == (size > 0) and flat[:1] == [256] * (size > 0)  # begins once
    assert files.bytes_read == files.size == path.stat().st_size
    assert files.digests == [hashlib.sha256(path.read_bytes()).hexdigest()]


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xe2\x82"])
@pytest.mark.parametrize("piece", [1, 4096])
def test_plain_text_that_is_not_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: bytes, piece: int
) -> None:
    monkeypatch.setattr(text, "PIECE", piece)
    path = tmp_path / "a.md"
    path.write_bytes(b"one\ntwo\nthree " + bad)
    with pytest.raises(BadData, match=r"a\.md:3: the text is not UTF-8"):
        read(path)


def test_large_text_is_streamed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"some words in a line\n" * 100_000)
    files = TextFiles([path], Bytes(), 1000)
    documents = iter(files)
    next(documents)
    assert files.bytes_read < 10_000 < files.size


def test_directories_are_read_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.txt", "deep/er/c.md", "deep/d.json", "skipped.py", "skipped.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(GOOD)
    found = [str(path.relative_to(tmp_path)) for path in text_files([tmp_path])]
    assert found == ["a.txt", "b.jsonl", "deep/d.json", "deep/er/c.md"]
    assert len(text_files([tmp_path, tmp_path / "a.txt"])) == 4  # once each
    files = TextFiles([tmp_path], Bytes(), 100)
    for _ in range(2):  # and again
        assert [document.source for document in files] == [0, 1, 2, 3]
    assert len(set(files.digests)) == 1  # all four have the same bytes


@pytest.mark.parametrize(
    ("name", "message"),
    [("no.txt", "no such file"), ("a.csv", "unknown kind"), ("empty", "the directory has no")],
)
def test_paths_that_cannot_be_read(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadData, match=f"{name}: .*{message}"):
        text_files([tmp_path / name])
