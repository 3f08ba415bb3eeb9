"""Arrays that stand for weights which are elsewhere: a shape and a dtype without memory."""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import core
from .errors import ExpertsOnDisk

# What is repeated where there is no NaN: of packed weights a number that none consist of; of
# mxfp4, mxfp8 and nvfp4 scales their NaN.
VALUES = {mx.uint32: 0xD15CD15C, mx.uint8: 0xFF}
SAVERS = ("save", "savez", "savez_compressed", "save_safetensors", "save_gguf")
MARK = "_moe_elsewhere"  # of a projection whose arrays are placeholders: its path in the model

_values: dict[mx.Dtype, mx.array] = {}
_shapes: set[tuple[int, ...]] = set()  # the first and the last two numbers of all shapes
_lock = threading.Lock()


def placeholder(shape: Iterable[int], dtype: mx.Dtype) -> mx.array:
    """An evaluated array of one repeated value: NaN where there is one, so that whatever is
    computed from it shows. From then on mlx refuses to save such arrays, and `nn.Module.update`
    to put others in place of a marked projection's."""
    with _lock:
        if dtype not in _values:
            floating = mx.issubdtype(dtype, mx.floating)
            value = mx.array(float("nan") if floating else VALUES.get(dtype, 0), dtype)
            mx.eval(value)
            _values[dtype] = value
        _guard_saving()
        _guard_changing()
    array = mx.broadcast_to(_values[dtype], tuple(shape))
    _shapes.update((array.shape[:2], array.shape[-2:]))
    mx.eval(array)
    return array


def mark(linear: Any, name: str | None) -> None:
    """Note that a projection's arrays are placeholders, `name` being its path; None: no more."""
    linear.__dict__.pop(MARK, None)
    if name is not None:
        linear.__dict__[MARK] = name


def is_placeholder(array: mx.array) -> bool:
    """Evaluates the array. Copies and views of a placeholder are placeholders."""
    value = _values.get(array.dtype)
    if value is None or not array.size:
        return False
    mx.eval(array)
    here, there = core.addresses([array, value])
    return here == there


def is_made_of_one(array: mx.array) -> bool:
    """Whether it is a placeholder, or what a cast, a copy, arithmetic or dequantising makes of one
    or of some of its experts: all values are NaN, or the number that packed weights cannot be, and
    the shape is not any: others have arrays of NaN too. Evaluates the array."""
    if is_placeholder(array):
        return True
    if not array.size or _shapes.isdisjoint((array.shape[:2], array.shape[-2:])):
        return False
    floating = mx.issubdtype(array.dtype, mx.floating)
    if not floating and array.dtype not in VALUES:
        return False

    def stands(values: mx.array) -> bool:
        same = mx.isnan(values) if floating else values == VALUES[array.dtype]
        return bool(mx.all(same).item())

    return stands(array[(0,) * (array.ndim - 1)]) and stands(array)


def refuse(name: str) -> None:
    raise ExpertsOnDisk(
        f"{name} stays in the checkpoint's files (expert_memory), or on other ranks (group), and "
        "cannot be saved or changed from here: load the model without expert_memory or group, or "
        "restore_moe_layers(model)"
    )


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
        for name, array in _arrays("an array", (args, kwargs)):
            if is_made_of_one(array):
                refuse(name)
        return stock(*args, **kwargs)

    save._moe_guarded = True  # type: ignore[attr-defined]
    return save


def _arrays(name: str, given: Any) -> Iterator[tuple[str, mx.array]]:
    if isinstance(given, mx.array):
        yield name, given
    elif isinstance(given, dict):
        for key, value in given.items():
            yield from _arrays(key, value)
    elif isinstance(given, list | tuple):
        for value in given:
            yield from _arrays(name, value)


def _guard_changing() -> None:
    """What changes a model's parameters (a cast, loading, mlx-lm's saving, which empties the model
    first) goes through `update`, and is refused there before anything is changed."""
    stock = nn.Module.update
    if hasattr(stock, "_moe_guarded"):
        return

    @functools.wraps(stock)
    def update(self: nn.Module, parameters: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        _check_same(self, parameters)
        return stock(self, parameters, *args, **kwargs)

    update._moe_guarded = True  # type: ignore[attr-defined]
    setattr(nn.Module, "update", update)  # noqa: B010


def _check_same(own: Any, given: Any) -> None:
    """Raise ExpertsOnDisk if `given` has another array for a marked projection."""
    if isinstance(own, dict) and isinstance(given, dict):
        name = getattr(own, "__dict__", {}).get(MARK)
        for key in own.keys() & given.keys():
            if name and isinstance(own[key], mx.array) and given[key] is not own[key]:
                refuse(f"{name}.{key}")
            _check_same(own[key], given[key])
    elif isinstance(own, list | tuple) and isinstance(given, list | tuple):
        for mine, other in zip(own, given, strict=False):
            _check_same(mine, other)
