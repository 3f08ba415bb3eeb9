"""Run a saved .mlpackage in numpy: its own Manifest.json, protobuf and weight file.

Only the operations that our programs use. Every result is stored in float16, as on the device;
products and functions are evaluated in float32. Nothing of mlx_moe is used.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from math import erf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from coremltools.proto import MIL_pb2, Model_pb2

BLOB_TYPES = {1: np.float16, 2: np.float32, 4: np.int8, 14: np.int32}
DATA_TYPES = {
    MIL_pb2.FLOAT16: np.float16,
    MIL_pb2.FLOAT32: np.float32,
    MIL_pb2.INT8: np.int8,
    MIL_pb2.INT32: np.int32,
    MIL_pb2.BOOL: np.bool_,
}


class MilProgram:
    """The functions of a package; calling one with a wrong shape is an error."""

    def __init__(self, path: Path):
        manifest = json.loads((path / "Manifest.json").read_text())
        self.root = path / "Data"
        entries = manifest["itemInfoEntries"]
        self.model = self.root / entries[manifest["rootModelIdentifier"]]["path"]
        self.spec = Model_pb2.Model()
        self.spec.ParseFromString(self.model.read_bytes())
        self.blobs: set[tuple[str, int]] = set()

    @property
    def functions(self) -> list[str]:
        return sorted(self.spec.mlProgram.functions)

    def __call__(self, function: str, **inputs: np.ndarray) -> dict[str, np.ndarray]:
        body = self.spec.mlProgram.functions[function]
        known: dict[str, Any] = {}
        for wanted in body.inputs:
            shape, dtype = self._tensor_type(wanted.type)
            given = inputs.pop(wanted.name)
            if given.shape != shape or given.dtype != dtype:
                raise TypeError(f"{wanted.name}: {given.shape} {given.dtype}, not {shape} {dtype}")
            known[wanted.name] = given
        assert not inputs
        block = body.block_specializations[body.opset]
        for operation in block.operations:
            self._run(operation, known)
        return {name: known[name] for name in block.outputs}

    def _run(self, operation: Any, known: dict[str, Any]) -> None:
        names = [output.name for output in operation.outputs]
        if operation.type == "const":
            known[names[0]] = self._value(operation.attributes["val"])
            return
        if operation.type == "constexpr_affine_dequantize":  # its arguments are attributes
            named = {k: self._value(v) for k, v in operation.attributes.items() if k != "name"}
            known[names[0]] = _affine(**named).astype(
                self._tensor_type(operation.outputs[0].type)[1]
            )
            return
        arguments = {
            key: [
                known[a.name] if a.WhichOneof("binding") == "name" else self._value(a.value)
                for a in argument.arguments
            ]
            for key, argument in operation.inputs.items()
        }
        lists = {key: v if key == "values" else v[0] for key, v in arguments.items()}
        results = OPERATIONS[operation.type](**lists)
        results = results if isinstance(results, list) else [results]
        for output, result in zip(operation.outputs, results, strict=True):
            shape, dtype = self._tensor_type(output.type)
            with np.errstate(over="ignore"):
                stored = result.astype(dtype)
            assert stored.shape == shape, f"{output.name}: {stored.shape}, declared {shape}"
            known[output.name] = stored

    @staticmethod
    def _tensor_type(value_type: Any) -> tuple[tuple[int, ...], Any]:
        tensor = value_type.tensorType
        return tuple(d.constant.size for d in tensor.dimensions), DATA_TYPES[tensor.dataType]

    def _value(self, value: Any) -> Any:
        if value.WhichOneof("value") == "blobFileValue":
            return self._blob(value.blobFileValue, *self._tensor_type(value.type))
        tensor = value.immediateValue.tensor
        field = tensor.WhichOneof("value")
        values = getattr(tensor, field).values
        if field == "strings":
            return values[0]
        shape, dtype = self._tensor_type(value.type)
        array = np.frombuffer(values, dtype) if field == "bytes" else np.array(values, dtype)
        return array.reshape(shape)

    def _blob(self, blob: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An entry of the weight file: metadata of 64 bytes, which say where the values are."""
        path = self.model.parent / blob.fileName.removeprefix("@model_path/")
        with path.open("rb") as file:
            file.seek(blob.offset)
            sentinel, kind, size, offset = struct.unpack("<IIQQ", file.read(24))
            assert sentinel == 0xDEADBEEF and BLOB_TYPES[kind] == dtype
            assert size == np.prod(shape) * np.dtype(dtype).itemsize
            file.seek(offset)
            values = np.frombuffer(file.read(size), dtype).reshape(shape)
        self.blobs.add((str(path), offset))
        return values


def _wide(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """`function` of float32 arrays for x, and y if it takes one."""

    def run(**arguments: Any) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            for key in ("x", "y", "alpha", "beta"):
                if key in arguments:
                    arguments[key] = arguments[key].astype(np.float32)
            return function(**arguments)

    return run


def _conv(x: Any, weight: Any, strides: Any, dilations: Any, groups: Any, **rest: Any) -> Any:
    bias = rest.pop("bias", None)
    assert weight.shape[2:] == (1, 1) and x.shape[0] == 1 and int(groups) == 1
    assert set(strides.tolist()) == set(dilations.tolist()) == {1} and not rest["pad"].any()
    y = weight[:, :, 0, 0].astype(np.float32) @ x[0, :, 0].astype(np.float32)
    if bias is not None:
        y += bias.astype(np.float32)[:, None]
    return y[None, :, None]


def _dequantised(data: Any, scale: Any) -> Any:
    return data.astype(np.float32) * scale.astype(np.float32)  # offset would be another argument


def _affine(quantized_data: Any, scale: Any, zero_point: Any, axis: Any) -> Any:
    assert axis == 0 and zero_point == 0
    wide = scale.astype(np.float32).reshape(-1, *[1] * (quantized_data.ndim - 1))
    return quantized_data.astype(np.float32) * wide


def _split(x: Any, axis: Any, num_splits: Any) -> list[Any]:
    return np.split(x, int(num_splits), int(axis))


def _concat(values: list[Any], axis: Any, interleave: Any) -> Any:
    assert not interleave
    return np.concatenate(values, int(axis))


def _gelu(x: Any, mode: str) -> Any:
    if mode == "TANH_APPROXIMATION":
        return 0.5 * x * (1 + np.tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    if mode == "SIGMOID_APPROXIMATION":
        return x * _sigmoid(1.702 * x)
    assert mode == "EXACT"
    return 0.5 * x * (1 + np.vectorize(erf)(x / sqrt(2)))


def _sigmoid(x: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * x))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": _wide(lambda x, y: x + y),
    "mul": _wide(lambda x, y: x * y),
    "minimum": _wide(lambda x, y: np.minimum(x, y)),
    "clip": _wide(lambda x, alpha, beta: np.clip(x, alpha, beta)),
    "sigmoid": _wide(_sigmoid),
    "silu": _wide(lambda x: x * _sigmoid(x)),
    "tanh": _wide(lambda x: np.tanh(x)),
    "relu": _wide(lambda x: np.maximum(x, 0)),
    "square": _wide(lambda x: np.square(x)),
    "gelu": _wide(_gelu),
    "conv": lambda pad_type, **arguments: _conv(**arguments),
    "constexpr_blockwise_shift_scale": _dequantised,
    "split": _split,
    "concat": _concat,
}
