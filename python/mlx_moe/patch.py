"""Replace the layers of every model that stock mlx-lm loads."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn
import mlx_lm.utils

from .expert_memory import ExpertMemory
from .loading import Replaced, missing_model_is_an_error, replace_layers
from .replace import resolve_backend


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
def replaced_models(
    backend: str, loaded: Callable[[Replaced], object], plan: dict[str, Any] | None = None
) -> Iterator[None]:
    """While open, each model that mlx-lm loads comes back with its layers replaced.

    Every mlx-lm command reaches `load_model` through the globals of `mlx_lm.utils`
    (`load` and `sharded_load` both do), so that this one name covers draft models too.

    Args:
        backend: as for `replace_moe_layers`.
        loaded: is called with each model. A server lets go of a model to load another:
            do not keep what is passed where that may happen.
        plan: further arguments of `replace_moe_layers`: plan, artifacts, expert_memory, ... With
            expert_memory or group, models are loaded lazily, and read once their experts are
            elsewhere.

    Raises:
        InvalidArgument: the CPU kernels cannot run here, or expert_memory cannot be; before a
            model is loaded.
        ModelNotFound: while open, for a model that is not there.
    """
    resolve_backend(backend)
    if (memory := (plan or {}).get("expert_memory")) is not None:
        ExpertMemory.of(memory).check()
    stock, stock_download = mlx_lm.utils.load_model, mlx_lm.utils._download

    @functools.wraps(stock_download)
    def download(path_or_hf_repo: str, *args: Any, **kwargs: Any) -> Any:
        with missing_model_is_an_error(path_or_hf_repo):
            return stock_download(path_or_hf_repo, *args, **kwargs)

    @functools.wraps(stock)
    def load_model(model_path: Any, *args: Any, **kwargs: Any) -> tuple[nn.Module, dict[str, Any]]:
        bound = inspect.signature(stock).bind(model_path, *args, **kwargs)
        elsewhere = {"expert_memory", "group"} & (plan or {}).keys()
        read_now = bool(elsewhere) and not bound.arguments.get("lazy", False)
        if read_now:
            bound.arguments["lazy"] = True
        with missing_model_is_an_error(model_path):
            model, config = stock(*bound.args, **bound.kwargs)
        files = {"checkpoint": model_path} if plan else {}
        replaced = replace_layers(model, backend, {**(plan or {}), **files})
        if read_now:
            replaced.read()
        loaded(replaced)
        return model, config

    with (
        attribute(mlx_lm.utils, "_download", download),
        attribute(mlx_lm.utils, "load_model", load_model),
    ):
        yield
