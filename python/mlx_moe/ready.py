"""Which files have something to read."""

import selectors
from collections.abc import Iterable
from typing import Any


def readable(files: Iterable[Any], seconds: float) -> list[Any]:
    """Those of the files (or what has a `fileno`) that can be read, or were closed at the other
    end, after at most so many seconds. `select` would refuse descriptors from 1024 on."""
    with selectors.PollSelector() as selector:  # needs no descriptor of its own
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]
