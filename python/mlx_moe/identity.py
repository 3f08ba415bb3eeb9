"""Which model a calibration, a plan or an artifact was made from."""

import hashlib
import io
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .errors import CorruptFile, IdentityMismatch, ModelNotFound
from .json_fields import Fields, is_count
from .safetensors_headers import SHARDS, read_header

SAMPLE_BYTES, SAMPLES = 4096, 64  # of all shards together, at least one of each
# Our entry in the config.json of an attached model: {"backend", "model_file": the model's own}.
ATTACHED = "mlx_moe"
LAYER_VALUES = 64  # of the first row of a projection's first expert
PARTS = {
    "config": "config.json",
    "headers": "the tensors' names, shapes and dtypes",
    "sample": "sampled bytes of the weights",
    "layers": "the expert layers",
}


@dataclass(frozen=True)
class ModelIdentity:
    """Digests (SHA-256, hex) by which a model is known again; None where there was nothing to read.

    Attributes:
        name: the directory's name or the repository's id; for people, never compared.
        config: of config.json, without regard to layout and order.
        headers: of the safetensors headers.
        sample: of bytes at fixed places of the weight files.
        layers: of the expert layers in memory: names, shapes, dtypes, formats, a few values.
    """

    name: str
    config: str | None = None
    headers: str | None = None
    sample: str | None = None
    layers: str | None = None

    def to_json(self) -> dict[str, str | None]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any, what: str = "identity") -> "ModelIdentity":
        """The identity written by `to_json`; CorruptFile, which names `what`, for anything else."""
        take = Fields(value, what, {f.name for f in fields(cls)})
        return cls(take.text("name"), *(take.optional(part, take.text) for part in PARTS))


class Place(NamedTuple):
    """Where a tensor is: its file, and the offset and number of its bytes there."""

    shard: Path
    offset: int
    bytes: int


def identity_of_files(path: str | Path) -> ModelIdentity:
    """The identity of a model directory; reads headers and a few hundred KB of any size of model.

    Raises:
        ModelNotFound: there is no such directory.
        CorruptFile: config.json or a weight file cannot be read as what it is.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ModelNotFound(f"there is no model directory {str(path)!r}")
    config = directory / "config.json"
    shards = sorted(directory.glob(SHARDS))
    return ModelIdentity(
        name=_name(directory),
        config=_digest(_canonical(_config(config))) if config.is_file() else None,
        headers=_digest(*_headers(shards)) if shards else None,
        sample=_digest(*_samples(shards)) if shards else None,
    )


def identity_of_model(
    model: nn.Module, files: str | Path | None = None, stored: Mapping[str, Any] | None = None
) -> ModelIdentity:
    """The identity of a model in memory, and of the directory it was loaded from if given.

    Replacing and restoring layers leave it as it is, experts on disk too; adapters do, quantising
    does not. With `files`, weights that are loaded lazily from there stay unloaded.

    Args:
        stored: `Stored` by a layer's name, for experts that are about to be on disk.
    """
    on_disk = ModelIdentity(type(model).__module__.rpartition(".")[2])
    if files is not None:
        on_disk = identity_of_files(files)
    return ModelIdentity(**{**asdict(on_disk), "layers": _layers(model, files, stored or {})})


def check_same(expected: ModelIdentity, found: ModelIdentity, what: str) -> None:
    """Raise IdentityMismatch unless `found` is the model that `what` (a file) was made from.

    What only one of the two knows is not compared; that leaves nothing is a mismatch too.
    """
    both = [
        part
        for part in PARTS
        if getattr(expected, part) is not None and getattr(found, part) is not None
    ]
    different = [PARTS[p] for p in both if getattr(expected, p) != getattr(found, p)]
    if different:
        raise IdentityMismatch(
            f"{what} was made from the model {expected.name!r}, and this is {found.name!r}: "
            f"{' and '.join(different)} differ; use that model, or make {what} again from this one"
        )
    if not both:
        raise IdentityMismatch(
            f"{what} was made from the model {expected.name!r}, and nothing is known by which to "
            f"tell whether {found.name!r} is the same; make {what} again from this one"
        )


def _name(directory: Path) -> str:
    """The repository's id for a directory of the hub's cache, else the directory's name."""
    directory = directory.absolute()
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return directory.resolve().name


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(struct.pack("<Q", len(p)) + p for p in parts)).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _config(path: Path) -> dict[str, Any]:
    """config.json as it was before `mlx_moe attach` wrote itself into it."""
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptFile(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CorruptFile(f"{path} is no JSON object")
    if isinstance(ours := config.pop(ATTACHED, None), dict):
        config.pop("model_file", None)
        if (own := ours.get("model_file")) is not None:
            config["model_file"] = own
    return config


def _headers(shards: list[Path]) -> Iterator[bytes]:
    for shard in shards:
        yield shard.name.encode()
        yield _canonical(read_header(shard))


def _samples(shards: list[Path]) -> Iterator[bytes]:
    each = max(1, SAMPLES // len(shards))
    for shard in shards:
        with shard.open("rb") as file:
            size = shard.stat().st_size
            yield size.to_bytes(8, "little")
            start = 8 + int.from_bytes(file.read(8), "little")
            for number in range(each):  # spread from the first tensor to the file's last bytes
                end = max(size - SAMPLE_BYTES, start)
                file.seek(start + (end - start) * (number + 1) // each)
                yield file.read(SAMPLE_BYTES)


def _layers(model: nn.Module, files: str | Path | None, stored: Mapping[str, Any]) -> str | None:
    from .find import find_modules, switch_kind  # with which mlx-lm comes
    from .layers import PROJECTIONS
    from .weights import quantisation

    places = {} if files is None else dict(_places(sorted(Path(files).glob(SHARDS))))
    facts: list[Any] = []
    values: list[bytes] = []
    for name, module, _ in find_modules(model, lambda m: switch_kind(m) is not None):
        kind = switch_kind(module)
        assert kind is not None
        on_disk = stored.get(name) or getattr(module.__dict__.get("_moe_layer"), "stored", None)
        for projection in PROJECTIONS[kind]:
            linear = module[projection]
            linear = linear.get("linear", linear)  # adapters wrap their base layer
            arrays = {k: linear[k] for k in sorted(linear) if isinstance(linear[k], mx.array)}
            how = list(quantisation(linear)) if "scales" in linear else [None] * 3
            shapes = [[key, list(a.shape), str(a.dtype)] for key, a in arrays.items()]
            facts.append([name, projection, how, shapes])
            if on_disk is None:
                place = places.get(f"{name}.{projection}.weight")
                values.append(_first(linear["weight"], place))
            else:
                values.append(on_disk.first_values(projection, LAYER_VALUES))
    return _digest(_canonical(facts), *values) if facts else None


def _first(weight: mx.array, place: Place | None) -> bytes:
    """The first values of the first row; from the file for a weight that is not loaded yet, which
    evaluating a slice of it would load whole."""
    size = min(weight.shape[-1], LAYER_VALUES) * weight.itemsize
    if place is not None and place.bytes == weight.nbytes and _waits_for_a_file(weight):
        with place.shard.open("rb") as file:
            file.seek(place.offset)
            return file.read(size)
    return np.array(weight[0, 0, :LAYER_VALUES].view(mx.uint8)).tobytes()


def _waits_for_a_file(weight: mx.array) -> bool:
    graph = io.StringIO()
    mx.export_to_dot(graph, weight)
    return graph.getvalue().count("[label =") == 1 and '"Load"' in graph.getvalue()


def _places(shards: list[Path]) -> Iterator[tuple[str, Place]]:
    """Where each tensor of the files is; those whose header says nothing of use are left out."""
    for shard in shards:
        with shard.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
        for name, tensor in read_header(shard).items():
            offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
            if isinstance(offsets, list) and len(offsets) == 2 and all(map(is_count, offsets)):
                yield name, Place(shard, start + offsets[0], offsets[1] - offsets[0])
