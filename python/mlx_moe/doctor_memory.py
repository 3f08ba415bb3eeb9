"""How much memory and disk each way of running a model takes, from its headers."""

import ast
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .cost import FP16, Expert
from .doctor_experts import ExpertLayer
from .machine import as_size

STREAMED = 0.25  # share of the experts in memory that is shown for streaming


@dataclass(frozen=True)
class Mode:
    """One way of running a model.

    Attributes:
        memory: bytes of weights; the cache of the text and activations come on top.
        disk: bytes of the model's files and of what is written beside them.
        fits: whether the machine has that memory; None if it does not say how much it has.
        missing: why this cannot be had here, None if it can.
        note: what the numbers suppose.
    """

    name: str
    memory: int
    disk: int
    fits: bool | None
    missing: str | None
    note: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def modes(
    size: int,
    layers: list[ExpertLayer],
    top_k: int | None,
    memory: int | None,
    packed: bool,
    coreml: str | None,
) -> list[Mode]:
    """Stock, replaced, and what hot copies and streaming would change.

    Args:
        size: bytes of the model's weight files.
        memory: bytes that the machine has.
        packed: whether the kernels in use have prepacked copies.
        coreml: why there is no Core ML here, None if there is.
    """

    def mode(name: str, memory_: int, disk: int, missing: str | None, note: str) -> Mode:
        fits = None if memory is None else memory_ <= memory
        return Mode(name, memory_, disk, fits, missing, note)

    found = [
        mode("stock", size, size, None, "the weights as they are"),
        mode("replaced", size, size, None, "the same weights, read in place"),
    ]
    if not layers:
        return found
    for weights in ("fp16", "int8"):
        one, all_ = static_bytes(layers, weights)
        if all_:
            found.append(
                mode(
                    f"plan, {weights} programs",
                    size + all_,
                    size + all_,
                    coreml and f"{coreml}; --backend host computes them on the CPU, to try plans",
                    f"every expert hot; {as_size(one)} each, `mlx_moe plan --memory` bounds it",
                )
            )
    if packed and (copies := packed_bytes(layers)):
        note = "every expert also prepacked for the kernels; `mlx_moe plan --memory` bounds it"
        found.append(mode("plan, packed copies", size + copies, size, None, note))
    others = size - sum(layer.bytes for layer in layers)
    slots = sum(layer.slot_bytes * layer.experts for layer in layers)
    # One token's experts of a layer: the store takes no less.
    least = max(layer.slot_bytes * (top_k or 1) for layer in layers)
    bank = max(int(slots * STREAMED), least)
    missing = None if can_stream() else "not part of this version"
    note = (
        f"a quarter of the experts in memory, the others read when needed; at least "
        f"{as_size(others + least)}"
    )
    found.append(mode("expert streaming", others + bank, size, missing, note))
    return found


@cache
def can_stream() -> bool:
    """Whether `replace_moe_layers` takes `expert_memory`; its file is read, since importing it
    would import mlx-lm."""
    module = ast.parse((Path(__file__).parent / "replace.py").read_bytes())
    return any(
        argument.arg == "expert_memory"
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name == "replace_moe_layers"
        for argument in node.args.kwonlyargs
    )


def static_bytes(layers: list[ExpertLayer], weights: str) -> tuple[int, int]:
    """Of the largest expert in a static program, and of all; 0 where sizes are not known."""
    sizes = [
        (_expert(layer).static_bytes(weights), layer.experts)
        for layer in layers
        if layer.hidden and layer.inner
    ]
    return max((one for one, _ in sizes), default=0), sum(one * count for one, count in sizes)


def packed_bytes(layers: list[ExpertLayer]) -> int:
    return sum(
        layer.experts * layer.matrices * layer.hidden * layer.inner * FP16 for layer in layers
    )


def _expert(layer: ExpertLayer) -> Expert:
    return Expert(layer.hidden, layer.inner, layer.matrices, layer.biases, 0.0)
