"""What the manifest says of one group: shapes, functions, files, and where each weight is."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from .errors import CorruptArtifact, CorruptFile
from .json_fields import LARGEST, Fields, inside
from .package_form import ITSELF, Function, container, functions

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
        path: of the .mlpackage in the artifacts directory, or for macOS 14 of the directory that
            has one for each capacity.
        layer: dotted path of the module that the weights are of.
        kind: "glu" or "mlp".
        experts: in the order of their columns in the tile.
        split: range of the inner features; `inner` of them.
        functions: where the program of each capacity is.
        tier: the largest capacity.
        input, output: names of the tensors [1, hidden, 1, G * C].
        files: by path in `path`.
        blob: the path in `path` of a weight file; where there are several, all are the same.
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
    functions: dict[int, Function]
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

    @property
    def macos(self) -> int:
        """The oldest system that runs it."""
        return 15 if self.path == container(self.id, 15) else 14

    @property
    def packages(self) -> list[str]:
        """The .mlpackages in `path`; "." where it is one itself."""
        return list(dict.fromkeys(function.package for function in self.functions.values()))

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        value["functions"] = {str(c): asdict(place) for c, place in self.functions.items()}
        return value

    @classmethod
    def from_json(cls, value: Any, what: str) -> "PackageEntry":
        """The entry that `to_json` wrote; CorruptArtifact, which names `what`, for another."""
        try:
            take = Fields(value, f"{what}: ")
            id = take.file_name("id")
            return cls._from_fields(Fields(value, f"{what}: package {id!r}: "))
        except CorruptArtifact:
            raise
        except CorruptFile as error:
            raise CorruptArtifact(f"{error}; compile it again") from None

    @classmethod
    def _from_fields(cls, take: Fields) -> "PackageEntry":
        parameters = take.fields("activation_parameters")
        begin, end = take.counts("split", 2)
        entry = cls(
            id=take.text("id"),
            path=take.path("path"),
            layer=take.text("layer"),
            kind=take.text("kind"),
            experts=take.counts("experts"),
            split=(begin, end),
            hidden=take.count("hidden"),
            inner=take.count("inner"),
            activation=take.text("activation"),
            activation_parameters={name: parameters.number(name, -LARGEST) for name in parameters},
            functions=_functions(take.fields("functions")),
            tier=take.count("tier"),
            input=take.text("input"),
            output=take.text("output"),
            files=_files(take.fields("files")),
            blob=take.path("blob"),
            tensors=tuple(map(_expert, take.each("tensors"))),
            recipe=take.text("recipe"),
        )
        entry._check(take.prefix)
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
            (self.path == container(self.id, self.macos), f"its path is {self.path!r}"),
            (self._has_packages(), "its functions are not in its packages"),
            (blob is not None, f"its blob {self.blob!r} is not among its files"),
            (self.experts == tuple(e.expert for e in self.tensors), "tensors are not its experts'"),
            (bool(self.experts) and end - begin == self.inner, "split and inner differ"),
            (bool(self.functions) and max(self.functions) == self.tier, "its tier is no function"),
            (all(e.gate is None for e in self.tensors) == (self.kind == "mlp"), "kind and gates"),
            (all(t.shape == shapes[key] for key, t in present), "a tensor has another shape"),
            (blob and all(t.end <= blob.bytes for _, t in present), "a tensor ends past its blob"),
        ):
            if not good:
                raise CorruptFile(f"{what}{complaint}")

    def _has_packages(self) -> bool:
        if self.macos == 15:
            return all(f.package == ITSELF and f.name for f in self.functions.values())
        there = {path.partition("/")[0] for path in self.files}
        return self.functions == functions(tuple(self.functions), 14) and there == set(
            self.packages
        )


def _files(take: Fields) -> dict[str, File]:
    for path in take:
        if inside(path) != path:
            raise take.wrong(path, "a path that stays inside")
    files = {path: take.fields(path) for path in take}
    return {path: File(file.count("bytes"), file.text("sha256")) for path, file in files.items()}


def _functions(take: Fields) -> dict[int, Function]:
    for capacity in take:
        if not capacity.isdecimal():
            raise take.wrong(capacity, "a number of slots before it")
    places = {int(capacity): take.fields(capacity, {"package", "name"}) for capacity in take}
    return {
        capacity: Function(place.path("package"), place.optional("name", place.text))
        for capacity, place in places.items()
    }


def _expert(take: Fields) -> ExpertTensors:
    tensors = {key: take.optional(key, take.fields) for key in TENSORS}
    found = {key: tensor and _tensor(tensor) for key, tensor in tensors.items()}
    if found["up"] is None or found["down"] is None:
        raise CorruptFile(f"{take.prefix[:-1]}: no up or down")
    return ExpertTensors(expert=take.count("expert"), **found)  # type: ignore[arg-type]


def _tensor(take: Fields) -> Tensor:
    dtype, scale = (
        take.one_of("dtype", tuple(ITEM_BYTES)),
        take.optional("scale_offset", take.count),
    )
    if (dtype == "int8") != (scale is not None):
        raise CorruptFile(f"{take.prefix[:-1]}: a tensor of {dtype!r} with scale_offset {scale!r}")
    shape = take.counts("shape")
    if len(shape) not in (1, 2):
        raise take.wrong("shape", "one or two sizes")
    return Tensor(take.count("offset"), dtype, shape, scale)
