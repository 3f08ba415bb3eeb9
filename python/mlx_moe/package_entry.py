"""What the manifest says of one package: shapes, functions, files, and where each weight is."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from .errors import CorruptArtifact
from .json_fields import Reader, count, counts, file_name, relative, text

ITEM_BYTES = {"fp16": 2, "int8": 1}
TENSORS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


@dataclass(frozen=True)
class Tensor:
    """Values in a package's blob file.

    Attributes:
        offset: of the first value, bytes from the beginning of the file; row-major.
        dtype: "fp16" or "int8".
        shape: [rows, columns], or [rows] of a bias.
        scale_offset: of the f16 scales [rows] that int8 values are multiplied by; else None.
    """

    offset: int
    dtype: str
    shape: tuple[int, ...]
    scale_offset: int | None = None

    @property
    def end(self) -> int:
        """Where the values and their scales are over."""
        end = self.offset + ITEM_BYTES[self.dtype] * math.prod(self.shape)
        return end if self.scale_offset is None else max(end, self.scale_offset + 2 * self.shape[0])


@dataclass(frozen=True)
class ExpertTensors:
    """One expert in a package; gate is None for two-matrix experts, whose fc1 is `up`."""

    expert: int
    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True)
class File:
    """A file of a package: its size and the SHA-256 (hex) of its bytes."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class PackageEntry:
    """One compiled group.

    Attributes:
        id: the plan's name for the group.
        path: of the .mlpackage in the artifacts directory.
        layer: dotted path of the module that the weights are of.
        kind: "glu" or "mlp".
        experts: in the order of their columns in the tile.
        split: range of the inner features; `inner` of them.
        functions: the name of the function for each capacity.
        tier: the largest capacity.
        input, output: names of the tensors [1, hidden, 1, G * C].
        files: by path in the package.
        blob: the weight file's path in the package.
        recipe: digest of all that the package depends on.
    """

    id: str
    path: str
    layer: str
    kind: str
    experts: tuple[int, ...]
    split: tuple[int, int]
    hidden: int
    inner: int
    activation: str
    activation_parameters: dict[str, float]
    functions: dict[int, str]
    tier: int
    input: str
    output: str
    files: dict[str, File]
    blob: str
    tensors: tuple[ExpertTensors, ...]
    recipe: str

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        value["functions"] = {str(c): name for c, name in self.functions.items()}
        return value

    @classmethod
    def from_json(cls, value: Any, what: str) -> "PackageEntry":
        """The entry that `to_json` wrote; CorruptArtifact, which names `what`, for another."""
        take = Reader(value, what)
        id = take("id", file_name)
        take.what = f"{what}: package {id!r}"
        entry = cls(
            id=id,
            path=take("path", relative),
            layer=take("layer", text),
            kind=take("kind", text),
            experts=take("experts", counts),
            split=take("split", counts),
            hidden=take("hidden", count),
            inner=take("inner", count),
            activation=take("activation", text),
            activation_parameters=take("activation_parameters", _parameters),
            functions=take("functions", _functions),
            tier=take("tier", count),
            input=take("input", text),
            output=take("output", text),
            files=take("files", _files),
            blob=take("blob", relative),
            tensors=tuple(_expert(t, take.what) for t in take("tensors", list)),
            recipe=take("recipe", text),
        )
        entry._check(take.what)
        return entry

    def _check(self, what: str) -> None:
        """What an executor trusts: shapes, capacities, and that every weight is in the file."""
        blob = self.files.get(self.blob)
        begin, end = self.split if len(self.split) == 2 else (0, 0)
        biases = {"gate_bias": self.inner, "up_bias": self.inner, "down_bias": self.hidden}
        shapes = {key: (rows,) for key, rows in biases.items()} | {
            "gate": (self.inner, self.hidden),
            "up": (self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }
        tensors = [(key, getattr(e, key)) for e in self.tensors for key in TENSORS]
        present = [(key, tensor) for key, tensor in tensors if tensor is not None]
        for good, complaint in (
            (self.path == f"{self.id}.mlpackage", f"its path is {self.path!r}"),
            (blob is not None, f"its blob {self.blob!r} is not among its files"),
            (self.experts == tuple(e.expert for e in self.tensors), "tensors are not its experts'"),
            (bool(self.experts) and end - begin == self.inner, "split and inner differ"),
            (bool(self.functions) and max(self.functions) == self.tier, "its tier is no function"),
            (all(e.gate is None for e in self.tensors) == (self.kind == "mlp"), "kind and gates"),
            (all(t.shape == shapes[key] for key, t in present), "a tensor has another shape"),
            (blob and all(t.end <= blob.bytes for _, t in present), "a tensor ends past its blob"),
        ):
            if not good:
                raise CorruptArtifact(f"{what}: {complaint}; compile it again")


def _files(value: Any) -> dict[str, File]:
    return {
        relative(path): File(count(file["bytes"]), text(file["sha256"]))
        for path, file in value.items()
    }


def _functions(value: Any) -> dict[int, str]:
    return {int(capacity): text(name) for capacity, name in value.items()}


def _parameters(value: Any) -> dict[str, float]:
    return {text(name): float(number) for name, number in value.items()}


def _shape(value: Any) -> tuple[int, ...]:
    shape = counts(value)
    if len(shape) not in (1, 2):
        raise ValueError
    return shape


def _expert(value: Any, what: str) -> ExpertTensors:
    if not isinstance(value, dict):
        raise CorruptArtifact(f"{what}: an expert is no object; compile it again")
    take = Reader(value, what)
    tensors = {key: _tensor(value.get(key), what) for key in TENSORS}
    if tensors["up"] is None or tensors["down"] is None:
        raise CorruptArtifact(f"{what}: an expert has no up or down; compile it again")
    return ExpertTensors(expert=take("expert", count), **tensors)  # type: ignore[arg-type]


def _tensor(value: Any, what: str) -> Tensor | None:
    if value is None:
        return None
    take = Reader(value, what)
    dtype, scale = take("dtype", text), take("scale_offset", _optional)
    if dtype not in ITEM_BYTES or (dtype == "int8") != (scale is not None):
        raise CorruptArtifact(f"{what}: a tensor of {dtype!r} with scale_offset {scale!r}")
    return Tensor(take("offset", count), dtype, take("shape", _shape), scale)


def _optional(value: Any) -> int | None:
    return None if value is None else count(value)
