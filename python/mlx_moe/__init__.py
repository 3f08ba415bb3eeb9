"""Fast, exact Mixture-of-Experts layers for mlx-lm."""

from . import core
from .errors import InvalidArgument, MoEError, NoMoELayers, UnsupportedLayer

__all__ = ["InvalidArgument", "MoEError", "NoMoELayers", "UnsupportedLayer", "core"]
