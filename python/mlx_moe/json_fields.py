"""Take checked values from a JSON file that others may have changed."""

import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from .errors import CorruptArtifact

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class Reader:
    """Takes checked fields from a JSON object."""

    def __init__(self, value: Any, what: str):
        self.value, self.what = value, what

    def __call__(self, key: str, kind: Callable[[Any], Any]) -> Any:
        try:
            value = self.value[key]
            if kind in (dict, list) and not isinstance(value, kind):
                raise TypeError
            return value if kind in (dict, list) else kind(value)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise CorruptArtifact(
                f"{self.what}: {key!r} is missing or cannot be; compile it again"
            ) from None


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError
    return value


def counts(value: Any) -> tuple[int, ...]:
    return tuple(count(item) for item in value)


def file_name(value: Any) -> str:
    """What names a file on any system, and no other directory."""
    if not FILE_NAME.fullmatch(text(value)):
        raise ValueError
    return str(value)


def relative(value: Any) -> str:
    """A path that stays inside."""
    path = PurePosixPath(text(value))
    if path.is_absolute() or ".." in path.parts or not str(path).isprintable():
        raise ValueError
    return str(path)
