"""MLX arrays as the CPU sees them where MLX has Metal.

There `mx.array.__dlpack__` gives a Metal buffer unless it is asked for the CPU's address
(MLX 0.32), and nanobind does not ask. Apple's memory is one: nothing is copied.
"""

import functools
from collections.abc import Callable
from typing import Any

CPU, METAL = 1, 8  # DLPack's device types


class HostView:
    """Stands for an array and exports it for the CPU."""

    def __init__(self, array: Any):
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(dl_device=(CPU, 0), **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0


def host_view(argument: Any) -> Any:
    """A `HostView` of an array on Metal, also in a list; anything else as it is."""
    if isinstance(argument, list):
        return [host_view(item) for item in argument]
    device = getattr(type(argument), "__dlpack_device__", None)
    return HostView(argument) if device and device(argument)[0] == METAL else argument


def takes_host_views(function: Callable[..., Any]) -> Callable[..., Any]:
    """The core's function, which then takes arrays on Metal too."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        views = {name: host_view(value) for name, value in kwargs.items()}
        return function(*map(host_view, args), **views)

    return wrapped


def matrix_of_host_views(base: Any) -> Any:
    """The core's Matrix, which then takes arrays on Metal too."""
    return type("Matrix", (base,), {"__init__": takes_host_views(base.__init__)})
