"""Read what a saved .mlpackage holds: its functions, and where the weights are in the file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CorruptArtifact

WEIGHT_ROOT = "@model_path/"
ENTRY = np.dtype(
    [("sentinel", "<u4"), ("type", "<u4"), ("bytes", "<u8"), ("offset", "<u8"), ("", "V40")]
)
SENTINEL = 0xDEADBEEF
TYPES = {1: ("fp16", np.float16), 2: ("fp32", np.float32), 4: ("int8", np.int8)}


@dataclass(frozen=True)
class Blob:
    """A tensor in a weight file.

    Attributes:
        offset: of its first value, bytes from the file's beginning.
        dtype: "fp16", "fp32" or "int8".
        file: path in the package.
    """

    offset: int
    dtype: str
    shape: tuple[int, ...]
    file: str

    def read(self, package: Path) -> np.ndarray:
        """The values, mapped from the file."""
        kind = next(t for name, t in TYPES.values() if name == self.dtype)
        return np.memmap(package / self.file, kind, "r", self.offset, self.shape)


class Package:
    """The specification (a protobuf) of a saved package.

    Attributes:
        path: the .mlpackage directory.
        model: the path of the specification in it.
        spec: coremltools' Model message.
    """

    def __init__(self, path: Path):
        """Raises CorruptArtifact if the package cannot be read."""
        from coremltools.proto import Model_pb2

        self.path = path
        try:
            manifest = json.loads((path / "Manifest.json").read_text())
            item = manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]
            self.model = f"Data/{item['path']}"
            self.spec = Model_pb2.Model()
            self.spec.ParseFromString((path / self.model).read_bytes())
        except Exception as error:  # protobuf's own errors differ by its back end
            raise CorruptArtifact(f"{path} is no readable Core ML package: {error}") from error

    @property
    def functions(self) -> Mapping[str, Any]:
        return self.spec.mlProgram.functions

    def operations(self, function: str) -> list[Any]:
        """A function's operations in order."""
        body = self.functions[function]
        return list(body.block_specializations[body.opset].operations)

    def outputs(self, function: str) -> list[str]:
        body = self.functions[function]
        return list(body.block_specializations[body.opset].outputs)

    def blob(self, value: Any) -> Blob:
        """Where a value that is kept in a weight file is."""
        stored = value.blobFileValue
        file = str(Path(self.model).parent / stored.fileName.removeprefix(WEIGHT_ROOT))
        entry = np.fromfile(self.path / file, ENTRY, 1, offset=stored.offset)
        if not entry.size or entry["sentinel"][0] != SENTINEL or int(entry["type"][0]) not in TYPES:
            raise CorruptArtifact(
                f"{self.path / file} has no known weight entry at byte {stored.offset}; "
                "compile the package again"
            )
        shape = tuple(int(d.constant.size) for d in value.type.tensorType.dimensions)
        name, kind = TYPES[int(entry["type"][0])]
        if int(entry["bytes"][0]) != np.dtype(kind).itemsize * int(np.prod(shape)):
            raise CorruptArtifact(
                f"{self.path / file}: the entry at byte {stored.offset} has "
                f"{int(entry['bytes'][0])} bytes, not {shape} of {name}"
            )
        return Blob(int(entry["offset"][0]), name, shape, file)


def convolution_blobs(package: Package, function: str) -> dict[str, dict[str, Blob]]:
    """For each convolution by name: "weight" or ("data" and "scale"), and "bias" if it has one."""
    sources = {op.outputs[0].name: op for op in package.operations(function)}

    def blob(operation: Any, key: str) -> Blob:
        """An argument: a value itself, or the name of a constant."""
        argument = operation.inputs[key].arguments[0]
        if argument.WhichOneof("binding") == "value":
            return package.blob(argument.value)
        return package.blob(sources[argument.name].attributes["val"])

    found: dict[str, dict[str, Blob]] = {}
    for name, operation in sources.items():
        if operation.type != "conv":
            continue
        source = sources.get(operation.inputs["weight"].arguments[0].name)
        if source is not None and source.type == "constexpr_blockwise_shift_scale":
            found[name] = {key: blob(source, key) for key in ("data", "scale")}
        elif source is not None and source.type == "constexpr_affine_dequantize":
            named = {"data": "quantized_data", "scale": "scale"}
            found[name] = {key: package.blob(source.attributes[n]) for key, n in named.items()}
        else:
            found[name] = {"weight": blob(operation, "weight")}
        if "bias" in operation.inputs:
            found[name]["bias"] = blob(operation, "bias")
    return found
