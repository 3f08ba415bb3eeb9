"""The headers of safetensors files: names, dtypes and shapes without the weights."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CorruptFile

SHARDS = "model*.safetensors"  # what mlx-lm loads
LARGEST_HEADER = 100 << 20  # bytes, as the safetensors format allows
BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}


@dataclass(frozen=True)
class Tensor:
    """A tensor's dtype as safetensors names it ("BF16"), and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BITS.get(self.dtype, 8) // 8


def read_header(shard: Path) -> dict[str, Any]:
    """The header of a file as it is there, without `__metadata__`; reads nothing else of it.

    Raises CorruptFile for what is no safetensors file.
    """
    with shard.open("rb") as file:
        header = file.read(8)
        size = int.from_bytes(header, "little")
        if len(header) < 8 or not 2 <= size <= LARGEST_HEADER:
            raise CorruptFile(f"{shard} does not begin with a safetensors header")
        try:
            tensors = json.loads(file.read(size))
        except ValueError as error:
            raise CorruptFile(f"{shard}: the safetensors header is not JSON") from error
    if not isinstance(tensors, dict):
        raise CorruptFile(f"{shard}: the safetensors header is no JSON object")
    tensors.pop("__metadata__", None)
    return tensors


def tensors_of(header: dict[str, Any], what: object) -> dict[str, Tensor]:
    """The tensors of a header; CorruptFile, which names `what`, for one that cannot be."""
    found = {}
    for name, value in header.items():
        try:
            dtype, shape = value["dtype"], value["shape"]
            if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in shape):
                raise TypeError
        except (TypeError, KeyError):
            raise CorruptFile(f"{what}: the header's {name!r} has no dtype and shape") from None
        found[name] = Tensor(dtype, tuple(shape))
    return found
