"""Replace the layers of every model that stock mlx-lm loads."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx_lm.utils

from .loading import Replaced, replace_layers


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give `owner.name` another value while open."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def replaced_models(backend: str = "auto") -> Iterator[list[Replaced]]:
    """While open, each model that mlx-lm loads comes back with its layers replaced.

    Every mlx-lm command reaches `load_model` through the globals of `mlx_lm.utils`
    (`load` and `sharded_load` both do), so that this one name covers draft models too.

    Args:
        backend: "auto", "stock" or "cpu", as for `replace_moe_layers`.

    Yields:
        The list of models replaced so far, in the order of loading.
    """
    stock = mlx_lm.utils.load_model
    models: list[Replaced] = []

    @functools.wraps(stock)
    def load_model(*args, **kwargs):
        model, config = stock(*args, **kwargs)
        models.append(replace_layers(model, backend))
        return model, config

    with attribute(mlx_lm.utils, "load_model", load_model):
        yield models
