"""Which tensors of a checkpoint a model's parameters are, through its family's `sanitize`."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .store_files import Checkpoint, Names

_patching = threading.Lock()  # of mlx.core.stack


def tensor_names(model: nn.Module, checkpoint: Checkpoint) -> dict[str, Names]:
    """For each parameter by its path: one tensor that is it, or those that it is a stack of.

    Parameters that the loader computes in any other way are left out. No data is read: the
    family's own `sanitize` runs once more on arrays that are not evaluated.
    """
    arrays = checkpoint.load()
    traced: dict[int, Names] = {id(array): (name,) for name, array in arrays.items()}
    kept: list[Any] = list(arrays.values())  # an id is an array's for as long as it lives
    sanitize = getattr(model, "sanitize", None)
    if sanitize is None:
        return {name: traced[id(array)] for name, array in arrays.items()}
    with _patching, _recorded_stacks(traced, kept):
        weights = sanitize(dict(arrays))
    return {name: traced[id(array)] for name, array in weights.items() if id(array) in traced}


def loaded(model: nn.Module, checkpoint: Checkpoint) -> dict[str, mx.array]:
    """The parameters by their paths as the loader makes them of the files, not evaluated."""
    arrays = checkpoint.load()
    sanitize = getattr(model, "sanitize", None)
    return arrays if sanitize is None else dict(sanitize(arrays))


@contextmanager
def _recorded_stacks(traced: dict[int, Names], kept: list[Any]) -> Iterator[None]:
    """While open, what `mx.stack` makes of whole tensors along the first axis is noted."""
    stock = mx.stack

    def stack(arrays: list[mx.array], axis: int | None = 0, **kwargs: Any) -> mx.array:
        made = stock(arrays, axis, **kwargs)
        parts = [traced.get(id(array), ()) for array in arrays]
        if axis == 0 and all(len(part) == 1 for part in parts):
            traced[id(made)] = tuple(part[0] for part in parts)
            kept.append(made)
        return made

    setattr(mx, "stack", stack)  # noqa: B010
    try:
        yield
    finally:
        setattr(mx, "stack", stock)  # noqa: B010


def convert_command(path: Path) -> str:
    """What writes a copy of a checkpoint that can be read expert by expert."""
    return f"mlx_lm.convert --hf-path {path} --mlx-path {path}-mlx"
