"""Find a model's expert layers, and what their blocks say of them."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from .errors import InvalidArgument
from .layers import PROJECTIONS

# Files of mlx_lm.models whose block does `(y * scores[..., None]).sum(axis=-2)` on the output
# and nothing else: these may be given a `Deferred`.
DEFERRED_FAMILIES = frozenset(
    {
        "Klear",
        "afmoe",
        "bailing_hybrid",
        "bailing_moe_linear",
        "bailing_moe_v3",
        "deepseek",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "ernie4_5_moe",
        "exaone_moe",
        "glm4_moe",
        "glm4_moe_lite",
        "granitemoe",
        "granitemoehybrid",
        "hunyuan",
        "jamba",
        "kimi_k3",
        "kimi_linear",
        "laguna",
        "lfm2_moe",
        "mellum",
        "mimo_v2_flash",
        "minimax",
        "minimax_m3_vl",
        "mistral4",
        "mixtral",
        "nemotron_h",
        "olmoe",
        "phimoe",
        "phixtral",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "step3p5",
    }
)


def named_modules(model: Any) -> dict[str, Any]:
    """Every module of `model` by its path; raises InvalidArgument if it is none itself."""
    if not isinstance(model, nn.Module):
        raise InvalidArgument(
            f"expected a model (an mlx.nn.Module), found {type(model).__name__}; "
            "mlx_moe.load(path) loads one"
        )
    return dict(model.named_modules())


def find_modules(model: nn.Module, wanted: Any) -> list[tuple[str, Any, Any]]:
    """(name, module, parent module) of every wanted module, once each, in reading order."""
    modules = named_modules(model)
    found, seen = [], set()
    for name in sorted(modules, key=_reading_order):
        module = modules[name]
        if id(module) in seen or not wanted(module):
            continue
        seen.add(id(module))
        parent = name
        while parent:
            parent = parent.rpartition(".")[0]
            if parent in modules:
                break
        found.append((name, module, modules[parent]))
    return found


def _reading_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def switch_kind(module: Any) -> str | None:
    """ "glu" or "mlp" for an expert layer, by mlx-lm's classes or by shape; else None."""
    if isinstance(module, SwitchGLU):
        return "glu"
    if isinstance(module, SwitchMLP):
        return "mlp"
    if not hasattr(module, "activation"):
        return None
    for kind, names in PROJECTIONS.items():
        if all(_is_stacked(module.get(name)) for name in names):
            return kind
    return None


def _is_stacked(child: Any) -> bool:
    if not isinstance(child, nn.Module):
        return False
    weight = child.get("weight")
    return isinstance(weight, mx.array) and weight.ndim == 3


def family_of(parent: Any) -> tuple[str, bool]:
    """The family of the block that calls the layer, and whether it takes a `Deferred`."""
    package, _, family = type(parent).__module__.rpartition(".")
    return family, package == "mlx_lm.models" and family in DEFERRED_FAMILIES
