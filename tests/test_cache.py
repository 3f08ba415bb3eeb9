"""`mlx_moe cache`: where it is, what is listed, what is deleted and what is not."""

import io
import json
import os
import sys
import time
from pathlib import Path

import pytest

from mlx_moe import cache
from mlx_moe.cli import main
from mlx_moe.errors import InvalidArgument, MoEError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_MOE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def filled(root: Path) -> Path:
    """A compiled model of 30 bytes in two files, a profile of 5, something unfinished of 7."""
    model = root / "compiled" / "abc" / "g.mlmodelc"
    model.mkdir(parents=True)
    (model / "weights").write_bytes(b"w" * 20)
    (model.parent / "note").write_bytes(b"n" * 10)
    (root / "compiled" / ".abc.tmp").write_bytes(b"u" * 7)
    (root / "profiles").mkdir()
    (root / "profiles" / "mine.json").write_bytes(b"12345")
    return root


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {}, "~/.cache/mlx_moe"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/mlx_moe"),
        ("linux", {"XDG_CACHE_HOME": "not/absolute"}, "~/.cache/mlx_moe"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "~/Library/Caches/mlx_moe"),
        ("darwin", {"MLX_MOE_CACHE": "/mine"}, "/mine"),
        ("linux", {"MLX_MOE_CACHE": "~/mine", "XDG_CACHE_HOME": "/x"}, "~/mine"),
    ],
)
def test_where_it_is(monkeypatch, platform: str, environment: dict, expected: str) -> None:
    for name in ("MLX_MOE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache.cache_dir() == Path(expected).expanduser()
    assert cache.cache_dir("counts") == Path(expected).expanduser() / "counts"


def test_nothing_is_made_by_looking(root: Path) -> None:
    assert cache.entries() == [] and not root.exists()
    assert cache.make_cache_dir("counts") == root / "counts" and (root / "counts").is_dir()


def test_refusals(root: Path) -> None:
    with pytest.raises(InvalidArgument, match="'models'; expected one of compiled, counts"):
        cache.cache_dir("models")
    root.write_text("a file")
    with pytest.raises(MoEError, match="MLX_MOE_CACHE"):
        cache.make_cache_dir("counts")


def test_entries(filled: Path) -> None:
    found = {(e.kind, e.name): (e.bytes, e.finished) for e in cache.entries()}
    assert found == {
        ("compiled", "abc"): (30, True),
        ("compiled", ".abc.tmp"): (7, False),
        ("profiles", "mine.json"): (5, True),
    }
    assert [e.name for e in cache.entries(["profiles"])] == ["mine.json"]


def test_links_are_neither_counted_nor_followed(filled: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "large").write_bytes(b"x" * 1000)
    (filled / "compiled" / "link").symlink_to(outside)
    (entry,) = [e for e in cache.entries() if e.name == "link"]
    assert entry.bytes < 1000
    assert cache.clear([entry]) == [entry]
    assert (outside / "large").exists() and not (filled / "compiled" / "link").is_symlink()


def test_what_is_being_written_stays(filled: Path) -> None:
    unfinished = filled / "compiled" / ".abc.tmp"
    assert {e.name for e in cache.clear(cache.entries())} == {"abc", "mine.json"}
    assert [e.name for e in cache.entries()] == [".abc.tmp"]
    old = time.time() - 2 * cache.SETTLED
    os.utime(unfinished, (old, old))
    cache.clear(cache.entries())
    assert cache.entries() == []


def test_locks_are_neither_listed_nor_deleted(filled: Path) -> None:
    """Whoever holds one would go on, and the next one would hold another."""
    lock = filled / "profiles" / ".mine.json.lock"
    lock.touch()
    old = time.time() - 2 * cache.SETTLED
    os.utime(lock, (old, old))
    assert len(cache.entries()) == 3
    cache.clear(cache.entries())
    assert lock.exists()


def test_an_entry_that_another_process_deleted(filled: Path) -> None:
    found = cache.entries(["profiles"])
    found[0].path.unlink()
    assert cache.clear(found) == []


def test_list(filled: Path, capsys) -> None:
    assert main(["cache", "list", "--json", "-"]) == 0
    printed, table = capsys.readouterr()
    report = json.loads(printed)
    assert report["bytes"] == 42 and report["directory"] == str(filled)
    assert {entry["name"] for entry in report["entries"]} == {"abc", ".abc.tmp", "mine.json"}
    assert "3 entries, 42 B" in table and "unfinished" in table


def test_clear_by_kind(filled: Path, capsys) -> None:
    assert main(["cache", "clear", "profiles", "--yes", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in report["deleted"]] == ["mine.json"]
    assert (filled / "compiled" / "abc").is_dir()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "left"), [("y\n", 1), ("YES\n", 1), ("\n", 3), ("n\n", 3)])
def test_clear_asks(filled: Path, monkeypatch, capsys, answer: str, left: int) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert main(["cache", "clear"]) == (0 if left == 1 else 1)
    assert len(cache.entries()) == left
    assert "delete 3 entries, 42 B?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("clear",), "--yes"),
        (("list", "models"), "no kind of cache 'models'"),
        (("list", "--json", "none/of/it.json"), "--json"),
    ],
)
def test_refused_commands(filled: Path, monkeypatch, capsys, arguments, named: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # no terminal
    assert main(["cache", *arguments]) == 1
    assert named in capsys.readouterr().err
    assert len(cache.entries()) == 3


def test_an_empty_cache(root: Path, capsys) -> None:
    assert main(["cache", "clear"]) == 0 and main(["cache", "list"]) == 0
    assert "nothing" in capsys.readouterr().out
