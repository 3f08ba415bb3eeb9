"""Arrays that stand for weights which are elsewhere: a shape and a dtype without memory."""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx

from . import core
from .errors import ExpertsOnDisk

NOT_A_NUMBER = {mx.uint8: 0xFF}  # as a scale of mxfp4, mxfp8 and nvfp4
SAVERS = ("save", "savez", "savez_compressed", "save_safetensors", "save_gguf")

_values: dict[mx.Dtype, mx.array] = {}
_lock = threading.Lock()


def placeholder(shape: Iterable[int], dtype: mx.Dtype) -> mx.array:
    """An evaluated array of one repeated value: NaN where there is one, so that whatever is
    computed from it shows. From then on mlx refuses to save such arrays."""
    with _lock:
        if dtype not in _values:
            floating = mx.issubdtype(dtype, mx.floating)
            value = mx.array(float("nan") if floating else NOT_A_NUMBER.get(dtype, 0), dtype)
            mx.eval(value)
            _values[dtype] = value
        _guard_saving()
    array = mx.broadcast_to(_values[dtype], tuple(shape))
    mx.eval(array)
    return array


def is_placeholder(array: mx.array) -> bool:
    """Evaluates the array. Copies and views of a placeholder are placeholders."""
    value = _values.get(array.dtype)
    if value is None or not array.size:
        return False
    mx.eval(array)
    here, there = core.addresses([array, value])
    return here == there


def _guard_saving() -> None:
    """Every way to write arrays, mlx.nn's and mlx-lm's too, looks these functions up in mlx.core
    when it is called."""
    for name in SAVERS:
        stock = getattr(mx, name, None)
        if stock is not None and not hasattr(stock, "_moe_guarded"):
            setattr(mx, name, _guarded(stock))


def _guarded(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def save(*args: Any, **kwargs: Any) -> Any:
        for name, array in _arrays([*args, kwargs]):
            if is_placeholder(array):
                raise ExpertsOnDisk(
                    f"{name} stays in the checkpoint's files (expert_memory), or on other ranks "
                    "(group), and cannot be saved from here: load the model without expert_memory "
                    "or group, or restore_moe_layers(model)"
                )
        return stock(*args, **kwargs)

    save._moe_guarded = True  # type: ignore[attr-defined]
    return save


def _arrays(given: Iterable[Any]) -> Iterator[tuple[str, mx.array]]:
    for value in given:
        if isinstance(value, mx.array):
            yield "an array", value
        elif isinstance(value, dict):
            yield from ((k, v) for k, v in value.items() if isinstance(v, mx.array))
