"""Fast, exact Mixture-of-Experts layers for mlx-lm."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from . import core
from .errors import InvalidArgument, ModelNotFound, MoEError, NoMoELayers, UnsupportedLayer

if TYPE_CHECKING:
    from .calibration import Calibration
    from .calibration_run import calibrate
    from .compile import compile_plan
    from .dense import replace_linear_layers, restore_linear_layers
    from .evaluation import Evaluation
    from .evaluator import evaluate
    from .expert_memory import ExpertMemory
    from .following import follow
    from .loading import load
    from .plan import Plan
    from .planner import make_plan
    from .replace import replace_moe_layers, restore_moe_layers
    from .replacement import Replacement

try:
    __version__ = version("mlx-npumoe")
except PackageNotFoundError:  # run from the source tree
    __version__ = "0+unknown"

__all__ = [
    "Calibration",
    "Evaluation",
    "ExpertMemory",
    "InvalidArgument",
    "MoEError",
    "ModelNotFound",
    "NoMoELayers",
    "Plan",
    "Replacement",
    "UnsupportedLayer",
    "__version__",
    "calibrate",
    "compile_plan",
    "core",
    "evaluate",
    "follow",
    "load",
    "make_plan",
    "replace_linear_layers",
    "replace_moe_layers",
    "restore_linear_layers",
    "restore_moe_layers",
]

# Imported at first use: mlx-lm brings transformers, which takes over a second.
_MODULES = {
    "Calibration": "calibration",
    "Evaluation": "evaluation",
    "ExpertMemory": "expert_memory",
    "Plan": "plan",
    "Replacement": "replacement",
    "calibrate": "calibration_run",
    "compile_plan": "compile",
    "evaluate": "evaluator",
    "follow": "following",
    "load": "loading",
    "make_plan": "planner",
    "replace_linear_layers": "dense",
    "replace_moe_layers": "replace",
    "restore_linear_layers": "dense",
    "restore_moe_layers": "replace",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return __all__
