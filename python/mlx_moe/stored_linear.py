"""The projections of an expert layer whose weights are in a store."""

from functools import cache
from typing import Any

from .errors import ExpertsOnDisk
from .placeholders import MARK
from .weights import columns, subclass

INSTEAD = "load the model without expert_memory for that, or restore_moe_layers(model) first"


@cache
def stored_linear(base: type, quantised: bool) -> type:
    """The subclass of a linear class for projections whose weights are placeholders: what would
    compute with these is refused by name."""

    def refuse(what: str) -> Any:
        def method(self: Any, *_: Any, **__: Any) -> Any:
            name = self.__dict__.get(MARK, "a projection")
            raise ExpertsOnDisk(f"{name}: experts that stay on disk cannot be {what}; {INSTEAD}")

        return method

    body = {
        "_moe_on_disk": True,
        "__call__": refuse("called one by one"),
        "to_quantized": refuse("quantised"),
        "to_lora": refuse("given adapters"),
        "input_dims": property(columns),
    }
    if quantised:  # who reads the scales, as mlx-lm's dequantize_model, wants the weights
        body["scales"] = property(refuse("dequantised"))
    return subclass(base, **body)


def refuse_placeholders(linear: Any, name: str) -> None:
    """Raise ExpertsOnDisk if the weights of a projection are not in memory."""
    if getattr(type(linear), "_moe_on_disk", False):
        raise ExpertsOnDisk(f"{name}: its weights stay on disk; {INSTEAD}")
