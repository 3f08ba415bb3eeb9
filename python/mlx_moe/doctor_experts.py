"""A model's expert layers as the headers of its weight files show them."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from . import core
from .errors import MoEError
from .safetensors_headers import Tensor
from .sizes import slot_size

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MODES = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}  # (bits, group), scales of a byte
GATED = ("gate_proj", "gate_up_proj", "w1", "input_linear")  # one of them: three matrices

# As mlx-lm saves them: one array for the experts of a layer.
STACKED = re.compile(
    r"(?P<layer>.+)\.(?P<projection>gate_proj|up_proj|down_proj|fc1|fc2)"
    r"\.(?P<part>weight|scales|biases|bias|global_scale)"
)
# As others do, and mlx-lm stacks or splits while it loads: an array for each expert, ...
NUMBERED = re.compile(
    r"(?P<layer>.+\.(?:experts|mlp))\.(?P<expert>\d+)"
    r"\.(?P<projection>gate_proj|up_proj|down_proj|w1|w2|w3|fc1|fc2)\.(?P<part>\w+)"
)
# ... or joined ones.
JOINED = re.compile(
    r"(?P<layer>.+\.(?:experts|block_sparse_moe|moe))"
    r"\.(?P<projection>gate_up_proj|gate_proj|up_proj|down_proj|input_linear|output_linear)"
    r"[._]?(?P<part>\w*)"
)


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        name: of the module, or of what the checkpoint calls it.
        hidden, inner: features outside and inside; 0 where the layout does not tell.
        matrices: 3 with a gate, else 2.
        bytes: of its tensors in the checkpoint.
        slot_bytes: that one expert takes in the expert store, which rounds to whole pages.
        format: "affine 4 bits, groups of 64", "mxfp4", "bfloat16", ...
        stacked: as mlx-lm saves it; else mlx-lm converts it while it loads.
        problem: why the kernels cannot read it, None if they can or will after the conversion.
    """

    name: str
    experts: int
    hidden: int
    inner: int
    matrices: int
    biases: bool
    bytes: int
    slot_bytes: int
    format: str
    stacked: bool
    problem: str | None


def expert_layers(tensors: dict[str, Tensor]) -> list[ExpertLayer]:
    """In the model's order; empty for a model without experts."""
    stacked: dict[str, dict[str, dict[str, Tensor]]] = defaultdict(lambda: defaultdict(dict))
    others: dict[str, list[tuple[re.Match[str], Tensor]]] = defaultdict(list)
    for name, tensor in tensors.items():
        if match := NUMBERED.fullmatch(name):
            others[match["layer"]].append((match, tensor))
        elif match := STACKED.fullmatch(name):
            stacked[match["layer"]][match["projection"]][match["part"]] = tensor
        elif match := JOINED.fullmatch(name):
            others[match["layer"]].append((match, tensor))
    found = [_stacked(name, parts) for name, parts in stacked.items() if _is_stack(parts)]
    converted = (_converted(name, parts) for name, parts in others.items())
    found += [layer for layer in converted if layer is not None]
    return sorted(found, key=lambda layer: _reading_order(layer.name))


def _reading_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _is_stack(parts: dict[str, dict[str, Tensor]]) -> bool:
    whole = {"gate_proj", "up_proj", "down_proj"} <= parts.keys() or {"fc1", "fc2"} <= parts.keys()
    weights = [projection.get("weight") for projection in parts.values()]
    return whole and all(weight is not None and len(weight.shape) == 3 for weight in weights)


def _stacked(name: str, parts: dict[str, dict[str, Tensor]]) -> ExpertLayer:
    glu = "gate_proj" in parts
    first, last = ("gate_proj", "down_proj") if glu else ("fc1", "fc2")
    experts, inner, _ = parts[first]["weight"].shape
    hidden = parts[last]["weight"].shape[1]
    inputs = dict.fromkeys(parts, hidden) | {last: inner}
    formats = {p: _format(parts[p], inputs[p]) for p in parts}
    texts = list(dict.fromkeys(text for text, _ in formats.values()))
    problems = [f"{name}.{p}: {problem}" for p, (_, problem) in formats.items() if problem]
    sizes = [tensor.bytes for projection in parts.values() for tensor in projection.values()]
    return ExpertLayer(
        name,
        experts,
        hidden,
        inner,
        3 if glu else 2,
        any("bias" in projection for projection in parts.values()),
        sum(sizes),
        slot_size(size // max(experts, 1) for size in sizes),
        " + ".join(texts),
        True,
        problems[0] if problems else None,
    )


def _format(parts: dict[str, Tensor], inputs: int) -> tuple[str, str | None]:
    """A projection's format in words, and why the kernels cannot read it."""
    weight, scales = parts["weight"], parts.get("scales")
    if scales is None:
        if weight.dtype not in FLOATS:
            return weight.dtype, f"weights are {weight.dtype} without scales"
        return FLOATS[weight.dtype], None
    if weight.dtype != "U32" or not inputs or not scales.shape[-1] or inputs % scales.shape[-1]:
        return weight.dtype, (
            f"weights {weight.dtype} {list(weight.shape)} with scales {list(scales.shape)} are no "
            f"packed ones of {inputs} columns"
        )
    bits, group = weight.shape[-1] * 32 // inputs, inputs // scales.shape[-1]
    mode = "affine" if "biases" in parts else MODES.get((bits, group), "unknown")
    text = f"affine {bits} bits, groups of {group}" if mode == "affine" else mode
    return text, _refusal(weight, scales, mode, bits, group)


def _refusal(weight: Tensor, scales: Tensor, mode: str, bits: int, group: int) -> str | None:
    """What the kernels say to one such row, None if they take it."""
    dtype = np.uint8 if scales.dtype == "U8" else np.float16
    if scales.dtype not in ("U8", *FLOATS):
        return f"scales are {scales.dtype}, expected one of {', '.join(FLOATS)} or U8"
    row = np.zeros((1, 1, weight.shape[-1]), np.uint32)
    factors = np.zeros((1, 1, scales.shape[-1]), dtype)
    try:
        core.Matrix(
            row,
            factors,
            factors if mode == "affine" else None,
            mode=mode,
            bits=bits,
            group_size=group,
        )
    except (MoEError, TypeError) as error:
        return str(error)
    return None


def _converted(name: str, parts: list[tuple[re.Match[str], Tensor]]) -> ExpertLayer | None:
    """A layer that mlx-lm turns into a stack; None for what is no expert layer after all."""
    groups = [match.groupdict() for match, _ in parts]
    numbers = [int(group["expert"]) for group in groups if group.get("expert")]
    weights = {
        (group["projection"], group.get("expert")): tensor
        for group, (_, tensor) in zip(groups, parts, strict=True)
        if _is_weight(group["part"])
    }
    shapes = [tensor.shape for tensor in weights.values()]
    least = 2 if numbers else 3
    if not shapes or any(len(shape) < least for shape in shapes):
        return None
    experts = max(numbers) + 1 if numbers else shapes[0][0]
    gated = any(projection in GATED for projection, _ in weights)
    transposed = any(group["part"] == "qweight" for group in groups)  # packed along the rows
    hidden, inner = (0, 0) if transposed else _sizes(weights, bool(numbers))
    dtype = _common(tensor.dtype for tensor in weights.values())
    one = [
        tensor.bytes if numbers else tensor.bytes // max(experts, 1)
        for group, (_, tensor) in zip(groups, parts, strict=True)
        if not numbers or group.get("expert") == groups[0].get("expert")
    ]
    return ExpertLayer(
        name,
        experts,
        hidden,
        inner,
        3 if gated else 2,
        any("bias" in group["part"] for group in groups),
        sum(tensor.bytes for _, tensor in parts),
        slot_size(one),
        _foreign_format(dtype, [group["part"] for group in groups]),
        False,
        None,
    )


def _is_weight(part: str) -> bool:
    return part in ("", "weight", "weight_packed", "qweight", "blocks")


def _sizes(weights: dict[tuple[str, str | None], Tensor], numbered: bool) -> tuple[int, int]:
    """(hidden, inner) of the first expert; 0 where the layout does not tell."""
    first = {projection: tensor.shape for (projection, _), tensor in reversed(weights.items())}
    rows = {projection: shape[0 if numbered else 1] for projection, shape in first.items()}
    hidden = next((rows[p] for p in ("down_proj", "w2", "fc2", "output_linear") if p in rows), 0)
    inner = next((rows[p] for p in ("gate_proj", "up_proj", "w1", "fc1") if p in rows), 0)
    joined = next((p for p in ("gate_up_proj", "input_linear") if p in first), None)
    if joined is not None:
        # Some keep [E, 2 ff, d] and [E, d, ff], others the transposed: 2 ff is what is not d.
        shape = first[joined]
        if joined == "gate_up_proj" and len(shape) == 3 and shape[2] == 2 * hidden:
            return shape[1], hidden
        inner = rows[joined] // 2
    return hidden, inner


def _common(dtypes: Iterable[str]) -> str:
    return " + ".join(dict.fromkeys(dtypes))


def _foreign_format(dtype: str, parts: list[str]) -> str:
    if "blocks" in parts:
        return "mxfp4"
    scaled = any("scale" in part for part in parts)
    return f"{FLOATS.get(dtype, dtype)}{' with scales' if scaled else ''}"
