"""Which tensors of a checkpoint's safetensors files are the experts of a layer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import core
from .errors import CorruptFile, ModelNotFound, ReadFailed, UnsupportedLayer
from .sizes import slot_size
from .weights import FLOATS, KEYS, columns, quantisation

INDEX = "model.safetensors.index.json"
SHARDS = "model*.safetensors"  # what mlx-lm loads
PARTS = ("weight", "scales", "biases", "bias", "global_scale")  # in the order of core.Store
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32", "uint8": "U8"}
Names = tuple[str, ...]


@dataclass(frozen=True)
class TensorFacts:
    """dtype as safetensors names it ("BF16"), shape, bytes, the file's place in `paths`, and where
    in it the values begin."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: int
    begin: int


@dataclass(frozen=True)
class Checkpoint:
    """The safetensors files of a model and their tensors by name."""

    paths: list[Path]
    tensors: dict[str, TensorFacts]

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Read the headers of a model directory's files.

        Raises:
            ModelNotFound: no such directory, or no safetensors files in it.
            CorruptFile: a header is wrong, a tensor is in two files, or the index names one that
                is in none.
            ReadFailed: a file cannot be read.
        """
        directory = Path(path)
        shards = sorted(directory.glob(SHARDS))
        if not shards:
            raise ModelNotFound(f"there are no {SHARDS} files in {str(path)!r}")
        tensors: dict[str, TensorFacts] = {}
        for number, shard in enumerate(shards):
            for name, dtype, shape, begin, nbytes in core.safetensors(str(shard)):
                if name in tensors:
                    other = shards[tensors[name].file]
                    raise CorruptFile(f"tensor {name!r} is in {other} and in {shard}")
                tensors[name] = TensorFacts(dtype, tuple(shape), nbytes, number, begin)
        _check_index(directory / INDEX, shards, tensors)
        return cls(shards, tensors)

    def load(self) -> dict[str, mx.array]:
        """All tensors, as MLX reads them once they are evaluated."""
        arrays: dict[str, mx.array] = {}
        for path in self.paths:
            found = mx.load(str(path))
            assert isinstance(found, dict)  # as of every safetensors file
            arrays |= found
        return arrays

    def first_bytes(self, name: str, count: int) -> bytes:
        """Of a tensor; ReadFailed if they cannot be read."""
        facts = self.tensors[name]
        path = self.paths[facts.file]
        try:
            with path.open("rb") as file:
                file.seek(facts.begin)
                return file.read(min(count, facts.nbytes))
        except OSError as error:
            raise ReadFailed(f"cannot read {path}: {error}") from error


def _check_index(index: Path, shards: list[Path], tensors: dict[str, TensorFacts]) -> None:
    if not index.is_file():
        return
    try:
        weights = json.loads(index.read_bytes())["weight_map"]
        names = dict(weights)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFile(f"{index} is no index of weights: {error}") from error
    for name, file in names.items():
        if name not in tensors:
            raise CorruptFile(f"{index}: tensor {name!r} should be in {file} and is not")
        if shards[tensors[name].file].name != file:
            raise CorruptFile(f"{index}: tensor {name!r} should be in {file}, not where it is")


@dataclass(frozen=True)
class Projection:
    """One projection's format and tensors.

    Attributes:
        mode: "dense", or the mode of quantisation.
        bits, group_size: 0 where dense.
        names: of PARTS, in that order: one name of a stacked tensor, one an expert, or none.
    """

    mode: str
    bits: int
    group_size: int
    names: tuple[Names, ...]

    def source(self) -> tuple[str, int, int, list[list[str]]]:
        """As `core.Store` takes it."""
        return self.mode, self.bits, self.group_size, [list(names) for names in self.names]

    @property
    def has_bias(self) -> bool:
        return bool(self.names[PARTS.index("bias")])


@dataclass(frozen=True)
class StoredExperts:
    """The experts of one layer in a checkpoint.

    Attributes:
        name: dotted path of the layer's module.
        experts, hidden: their number, and features of the input.
        projections: by name, in the order of the module's forward.
        outputs: features that each gives.
        dtypes: of each one's floating-point arrays.
    """

    name: str
    experts: int
    hidden: int
    projections: dict[str, Projection]
    outputs: dict[str, int]
    dtypes: dict[str, tuple[mx.Dtype, ...]]


def stored_experts(
    checkpoint: Checkpoint,
    name: str,
    module: Any,
    projections: Sequence[str],
    names: Mapping[str, Sequence[str]] | None = None,
) -> StoredExperts:
    """Find the tensors of a stacked expert layer.

    Args:
        name: dotted path of `module` (a SwitchGLU or SwitchMLP), as the checkpoint names it.
        module: with its parameters not yet evaluated, or placeholders of the same shapes.
        projections: names of its children, in the order of the forward.
        names: where parameters are ("model...gate_proj.weight" -> one stacked tensor, or one an
            expert) that are not one stacked tensor of their own name.

    Raises:
        UnsupportedLayer: a tensor is not in the checkpoint under such a name, or is another one:
            the family's loader transforms it.
    """
    found: dict[str, Projection] = {}
    dtypes: dict[str, tuple[mx.Dtype, ...]] = {}
    for child in projections:
        linear = module[child]
        parts: list[Names] = []
        for part in PARTS:
            array = linear.get(part)
            if array is None:
                parts.append(())
                continue
            parameter = f"{name}.{child}.{part}"
            tensors = tuple((names or {}).get(parameter, (parameter,)))
            _check_tensors(checkpoint, parameter, tensors, array)
            parts.append(tensors)
        quantised = linear.get("scales") is not None
        mode, bits, group = quantisation(linear) if quantised else ("dense", 0, 0)
        found[child] = Projection(mode, bits, group, tuple(parts))
        arrays = [linear[part] for part in KEYS if linear.get(part) is not None]
        dtypes[child] = tuple(a.dtype for a in arrays if a.dtype in FLOATS)
    first = module[projections[0]]
    outputs = {child: int(module[child]["weight"].shape[-2]) for child in projections}
    return StoredExperts(
        name, int(first["weight"].shape[0]), columns(first), found, outputs, dtypes
    )


def _dtype(array: Any) -> str:
    return str(array.dtype).rpartition(".")[2]


def _check_tensors(checkpoint: Checkpoint, parameter: str, tensors: Names, array: Any) -> None:
    shape = tuple(array.shape)
    expected = shape if len(tensors) == 1 else shape[1:]
    if len(tensors) not in (1, shape[0]):
        raise UnsupportedLayer(f"{parameter}: {len(tensors)} tensors for {shape[0]} experts")
    for tensor in tensors:
        facts = checkpoint.tensors.get(tensor)
        if facts is None:
            raise UnsupportedLayer(
                f"{parameter}: the checkpoint has no tensor {tensor!r}; write one that has with "
                "`mlx_lm.convert`"
            )
        if facts.shape != expected or facts.dtype != DTYPES.get(_dtype(array)):
            raise UnsupportedLayer(
                f"{parameter} is {_dtype(array)} {list(expected)}, tensor {tensor!r} of the "
                f"checkpoint {facts.dtype} {list(facts.shape)}: its loader transforms it; write "
                "one that needs no more of that with `mlx_lm.convert`"
            )


def expert_bytes(checkpoint: Checkpoint, layers: Sequence[StoredExperts]) -> int:
    """Bytes of all tensors of these layers in the files."""
    parts = [projection.names for x in layers for projection in x.projections.values()]
    names = {name for part in parts for names in part for name in names}
    return sum(checkpoint.tensors[name].nbytes for name in names)


def slot_bytes(checkpoint: Checkpoint, layer: StoredExperts) -> int:
    """Bytes of the slot of one expert."""
    return slot_size(
        checkpoint.tensors[names[0]].nbytes // (1 if len(names) > 1 else layer.experts)
        for projection in layer.projections.values()
        for names in projection.names
        if names
    )
