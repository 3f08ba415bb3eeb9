"""How many experts a token goes to, by whichever name a family has for it."""

from collections.abc import Mapping
from typing import Any, TypeGuard

# In a config, and on a block or its gate.
NAMES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "top_k",
)


def of_config(config: Mapping[str, Any]) -> int | None:
    """What a model's config says; None if it does not."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for name in NAMES:
            if _is_number(value := part.get(name)):
                return value
    return None


def of_layer(modules: Mapping[str, Any], name: str) -> int | None:
    """What the blocks around a layer say, the nearest first: each itself, its gate, or the
    arguments that they keep; None if no one does.

    Args:
        modules: of the model, by path; "" is the model.
        name: path of the layer.
    """
    parents = name.split(".")
    while parents:
        parents.pop()
        block = modules.get(".".join(parents))
        gates = [getattr(block, gate, None) for gate in ("gate", "router")]
        for owner in (block, *gates):
            for told in (owner, getattr(owner, "args", None), getattr(owner, "config", None)):
                for called in (*NAMES, "k"):
                    if _is_number(value := getattr(told, called, None)):
                        return value
    return None


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
