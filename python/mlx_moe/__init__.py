"""Fast, exact Mixture-of-Experts layers for mlx-lm."""

from importlib.metadata import PackageNotFoundError, version

from . import core
from .dense import replace_linear_layers, restore_linear_layers
from .errors import InvalidArgument, MoEError, NoMoELayers, UnsupportedLayer
from .loading import load
from .replace import Replacement, replace_moe_layers, restore_moe_layers

try:
    __version__ = version("mlx-npumoe")
except PackageNotFoundError:  # run from the source tree
    __version__ = "0+unknown"

__all__ = [
    "InvalidArgument",
    "MoEError",
    "NoMoELayers",
    "Replacement",
    "UnsupportedLayer",
    "__version__",
    "core",
    "load",
    "replace_linear_layers",
    "replace_moe_layers",
    "restore_linear_layers",
    "restore_moe_layers",
]
