"""What a model directory written by `mlx_moe attach` runs when stock mlx-lm loads it.

mlx-lm's `load_model` imports the file that config.json names as `model_file`, calls its
`ModelArgs.from_dict(config)`, then `Model(args)`, quantises the model and gives it its weights.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.nn as nn
import mlx_lm.utils

from .identity import ATTACHED as KEY
from .loading import replace_layers


@dataclass
class AttachedArgs:
    """The class and the arguments of the model that is to be built and replaced."""

    model_class: Any
    args: Any
    backend: str

    @classmethod
    def from_dict(cls, config: dict[str, Any], directory: Path) -> "AttachedArgs":
        ours = config[KEY]
        if ours["model_file"] is None:
            model_class, args_class = mlx_lm.utils._get_classes(config)
        else:
            module = import_file(directory / ours["model_file"])
            model_class, args_class = module.Model, module.ModelArgs
        return cls(model_class, args_class.from_dict(config), ours["backend"])


def import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("custom_model", path)
    assert spec is not None and spec.loader is not None  # only None for unknown suffixes
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(attached: AttachedArgs) -> nn.Module:
    """The stock model, which replaces its layers once it has been given its weights."""
    model = attached.model_class(attached.args)
    stock_class: Any = type(model)

    class AwaitsWeights(stock_class):
        def load_weights(self, *args: Any, **kwargs: Any) -> nn.Module:
            super().load_weights(*args, **kwargs)
            self.__class__ = stock_class
            replace_layers(self, attached.backend)
            return self

    model.__class__ = AwaitsWeights
    return model
