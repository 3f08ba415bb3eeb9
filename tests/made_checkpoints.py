"""Model directories with headers and no weights."""

import json
import struct
from pathlib import Path
from typing import Any

from mlx_moe.safetensors_headers import Tensor

E, D, F = 4, 128, 64  # experts, outside and inside
CONFIG = {"model_type": "qwen3_moe", "num_experts_per_tok": 2}
Shapes = dict[str, tuple[str, list[int]]]


def stacked(bits: int | None, group: int = 64, scales: str = "BF16", biases: bool = True) -> Shapes:
    """The experts of a layer as mlx-lm saves them."""
    found: Shapes = {}
    for name, rows, cols in (("gate_proj", F, D), ("up_proj", F, D), ("down_proj", D, F)):
        path = f"model.layers.0.mlp.switch_mlp.{name}"
        if bits is None:
            found[f"{path}.weight"] = (scales, [E, rows, cols])
            continue
        found[f"{path}.weight"] = ("U32", [E, rows, cols * bits // 32])
        found[f"{path}.scales"] = (scales, [E, rows, cols // group])
        if biases:
            found[f"{path}.biases"] = (scales, [E, rows, cols // group])
    return found


def write_model(directory: Path, shapes: Shapes, config: Any = CONFIG, grow: int = 0) -> Path:
    """A model directory whose weights are a hole in a file; `grow` makes it longer or shorter."""
    directory.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (directory / "config.json").write_text(text)
    header, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        size = Tensor(dtype, tuple(shape)).bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps({"__metadata__": {"format": "mlx"}, **header}).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end + grow)
    return directory


def tensors(shapes: Shapes) -> dict[str, Tensor]:
    return {name: Tensor(dtype, tuple(shape)) for name, (dtype, shape) in shapes.items()}


def numbered(parent: str, names: tuple[str, ...], suffix: str = "weight") -> Shapes:
    """Two-dimensional weights of each expert; the last name is of the way back."""
    return {
        f"{parent}.{expert}.{name}.{suffix}": ("BF16", [D, F] if name == names[-1] else [F, D])
        for expert in range(E)
        for name in names
    }
