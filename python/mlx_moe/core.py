"""The C++ core: routing and expert kernels over plain buffers (no MLX, no copies)."""

from . import _core
from ._core import *  # noqa: F403

__all__ = [name for name in dir(_core) if not name.startswith("_")]
