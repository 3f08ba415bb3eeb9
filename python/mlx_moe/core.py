"""The C++ core: routing and expert kernels over plain buffers (no MLX, no copies)."""

import sys

from . import _core
from ._core import *  # noqa: F403

__all__ = [name for name in dir(_core) if not name.startswith("_")]

if sys.platform == "darwin":
    from .host_view import matrix_of_host_views, takes_host_views

    globals().update(
        {
            name: takes_host_views(function)
            for name in __all__
            if not isinstance(function := getattr(_core, name), type)
        },
        Matrix=matrix_of_host_views(_core.Matrix),
    )
