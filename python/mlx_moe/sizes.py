"""Sizes in bytes as people write them."""

import re
import resource
from collections.abc import Iterable
from math import inf

from .errors import InvalidArgument

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
LINE = 64  # bytes; arrays in a slot begin at multiples of it


def size_bytes(text: str, or_else: str = "") -> int:
    """Bytes of "16GB", "500MiB" or "1000000"; InvalidArgument for anything else.

    or_else: what the caller takes beside sizes, for the message.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidArgument(f"{text!r} is no size; expected one such as 16GB or 500MiB{or_else}")
    number, prefix, binary = match.groups()
    size = float(number) * (1024 if binary else 1000) ** POWERS[prefix.lower()]
    if size == inf:
        raise InvalidArgument(f"{text[:20]}... is more than any size")
    return int(size)


def share(text: str) -> float | None:
    """0.25 of "25%"; None for what is no share above 0 and up to 1."""
    match = SHARE.fullmatch(text.strip())
    value = float(match.group(1)) / 100 if match else 0.0
    return value if 0 < value <= 1 else None


def slot_size(arrays: Iterable[int]) -> int:
    """Bytes of the store's slot for an expert whose arrays have these sizes: whole pages."""
    return _whole(sum(_whole(size, LINE) for size in arrays), resource.getpagesize())


def _whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit
