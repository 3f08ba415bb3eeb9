"""Take checked values from JSON that others may have changed."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, TypeVar

from .errors import CorruptFile

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
MOST = 1 << 53  # counts above it are none in the JSON of others
LARGEST = 1e30  # any number may be
T = TypeVar("T")


class Fields:
    """Takes checked fields from a JSON object; CorruptFile names the path and what was found."""

    def __init__(self, value: Any, where: str = "", names: set[str] | None = None):
        """`where`: before the keys in errors, with a dot, or as it is if it ends with ": ".
        `names`: the keys that there must be and no others; None for any."""
        at = where.removesuffix(": ") or "it"
        self.prefix = where if where[-2:] in ("", ": ") else f"{where}."
        if not isinstance(value, dict):
            raise CorruptFile(f"{at}: expected an object, found {value!r:.99}")
        self.value = value
        if names is not None and value.keys() != names:
            missing, unknown = sorted(names - value.keys()), sorted(value.keys() - names)
            found = f"{missing} missing" if missing else f"unknown {unknown}"
            raise CorruptFile(f"{at}: {found}")

    def __call__(self, key: str) -> Any:
        if key not in self.value:
            raise CorruptFile(f"{self.prefix}{key} is missing")
        return self.value[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.value)

    def wrong(self, key: str, expected: str) -> CorruptFile:
        return CorruptFile(f"{self.prefix}{key}: expected {expected}, found {self(key)!r:.99}")

    def optional(self, key: str, take: Callable[[str], T]) -> T | None:
        """What `take` finds; None for null."""
        return None if self(key) is None else take(key)

    def text(self, key: str) -> str:
        value = self(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text")
        return value

    def one_of(self, key: str, known: Sequence[str]) -> str:
        value = self.text(key)
        if value not in known:
            raise self.wrong(key, " or ".join(map(repr, known)))
        return value

    def file_name(self, key: str) -> str:
        """What names a file on any system, and no other directory."""
        value = self.text(key)
        if not FILE_NAME.fullmatch(value):
            raise self.wrong(key, "a file's name")
        return value

    def path(self, key: str) -> str:
        """A path that stays inside."""
        if (value := inside(self.text(key))) is None:
            raise self.wrong(key, "a path that stays inside")
        return value

    def flag(self, key: str) -> bool:
        value = self(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def count(self, key: str, least: int = 0, most: int = MOST) -> int:
        value = self(key)
        if not is_count(value) or not least <= value <= most:
            limit = "" if most == MOST else f", at most {most}"
            raise self.wrong(key, f"a whole number, at least {least}{limit}")
        return int(value)

    def number(self, key: str, least: float = 0.0, most: float = LARGEST) -> float:
        value = self(key)
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not least <= value <= most:
            raise self.wrong(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def items(self, key: str) -> list[Any]:
        value = self(key)
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
        return value

    def counts(self, key: str, length: int | None = None) -> tuple[int, ...]:
        value = self.items(key)
        if not all(map(is_count, value)) or (length is not None and len(value) != length):
            raise self.wrong(key, f"{'' if length is None else f'{length} '}whole numbers")
        return tuple(value)

    def fields(self, key: str, names: set[str] | None = None) -> "Fields":
        """Those of the object there."""
        return Fields(self(key), f"{self.prefix}{key}", names)

    def each(self, key: str, names: set[str] | None = None) -> "list[Fields]":
        """Those of every object in the list there."""
        where = f"{self.prefix}{key}"
        return [Fields(value, f"{where}[{i}]", names) for i, value in enumerate(self.items(key))]


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def inside(text: str) -> str | None:
    """A relative path in its usual form, None for one that leads elsewhere."""
    path = PurePosixPath(text)
    good = not path.is_absolute() and ".." not in path.parts and str(path).isprintable()
    return str(path) if good else None
