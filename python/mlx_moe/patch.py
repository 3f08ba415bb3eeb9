"""Replace the layers of every model that stock mlx-lm loads."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn
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
def replaced_models(backend: str, loaded: Callable[[Replaced], object]) -> Iterator[None]:
    """While open, each model that mlx-lm loads comes back with its layers replaced.

    Every mlx-lm command reaches `load_model` through the globals of `mlx_lm.utils`
    (`load` and `sharded_load` both do), so that this one name covers draft models too.

    Args:
        backend: "auto", "stock" or "cpu", as for `replace_moe_layers`.
        loaded: is called with each model. A server lets go of a model to load another:
            do not keep what is passed where that may happen.
    """
    stock = mlx_lm.utils.load_model

    @functools.wraps(stock)
    def load_model(*args: Any, **kwargs: Any) -> tuple[nn.Module, dict[str, Any]]:
        model, config = stock(*args, **kwargs)
        loaded(replace_layers(model, backend))
        return model, config

    with attribute(mlx_lm.utils, "load_model", load_model):
        yield
