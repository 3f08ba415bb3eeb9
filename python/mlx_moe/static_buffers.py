"""Memory for tiles, kept by each thread from forward to forward."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT = 64
LARGE = 8 << 20  # bytes that a thread lets go of when it needs less than a quarter of them


class _Kept(threading.local):
    memory: Any = np.empty(0, np.uint8)


_kept = _Kept()


def arrays(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any]) -> list[Any]:
    """Uninitialised arrays; they last until the same thread asks again."""
    sizes = [
        -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    needed = sum(sizes) + ALIGNMENT
    if not needed <= _kept.memory.size <= max(4 * needed, LARGE):
        _kept.memory = np.empty(0, np.uint8)  # the old goes before the new comes
        _kept.memory = np.empty(needed, np.uint8)
    at = -_kept.memory.ctypes.data % ALIGNMENT
    views = []
    for shape, dtype, size in zip(shapes, dtypes, sizes, strict=True):
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        views.append(_kept.memory[at : at + count].view(dtype).reshape(shape))
        at += size
    return views
