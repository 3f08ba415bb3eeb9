"""The MIL program of a group: its experts side by side, each on its own columns of the tile."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .activations import Activation
from .experts_weights import ExpertWeights
from .package_form import MACOS

INPUT, OUTPUT = "x", "y"
LEVELS = 127  # of int8, to either side of zero
HALF = np.float16


@dataclass
class Stored:
    """A matrix as the package holds it: f16 values, or int8 values and f16 scales per row."""

    values: np.ndarray
    scales: np.ndarray | None = None

    @classmethod
    def of(cls, matrix: np.ndarray, weights: str) -> "Stored":
        """`matrix` [rows, columns] f16 as "fp16" or "int8"."""
        if weights == "fp16":
            return cls(matrix)
        largest = np.abs(matrix).max(axis=1, keepdims=True).astype(np.float32)
        scales = (largest / LEVELS).astype(HALF)
        # Rounded up, so that nothing is clipped; an empty row takes any scale.
        scales = np.where(
            scales.astype(np.float32) * LEVELS < largest, np.nextafter(scales, HALF(np.inf)), scales
        )
        scales = np.where(largest == 0, HALF(1), scales)
        values = np.rint(matrix.astype(np.float32) / scales.astype(np.float32))
        return cls(np.clip(values, -LEVELS, LEVELS).astype(np.int8), scales)


@dataclass
class StoredExpert:
    """One expert's matrices (gate, up, down; no gate with two) and its biases by those names."""

    matrices: dict[str, Stored]
    biases: dict[str, np.ndarray]

    @classmethod
    def of(cls, expert: ExpertWeights, weights: str) -> "StoredExpert":
        arrays = expert.arrays()
        biases = {k.removesuffix("_bias"): a for k, a in arrays.items() if k.endswith("_bias")}
        matrices = {k: Stored.of(a, weights) for k, a in arrays.items() if not k.endswith("_bias")}
        return cls(matrices, biases)

    @property
    def hidden(self) -> int:
        return int(self.matrices["down"].values.shape[0])


def operation_name(expert: int, matrix: str, count: int) -> str:
    """The convolution with `matrix` of the `expert`-th of `count` experts."""
    return OUTPUT if count == 1 and matrix == "down" else f"e{expert}_{matrix}"


def target(macos: int) -> Any:
    """coremltools' deployment target; iOS18 is the first with functions that share weights."""
    targets = importlib.import_module("coremltools").target
    return targets.iOS18 if macos == 15 else targets.iOS17


def program(
    experts: Sequence[StoredExpert], activation: Activation, capacity: int, macos: int = MACOS[0]
) -> Any:
    """x [1, hidden, 1, G*C] f16 -> y of the same shape, as a coremltools Program.

    Convolutions of 1x1 over channels, the form that the Neural Engine takes best: split on the
    last axis, two or three convolutions for each expert, concatenation.
    """
    mb = importlib.import_module("coremltools.converters.mil").Builder
    half = importlib.import_module("coremltools.converters.mil.mil").types.fp16
    count = len(experts)

    def convolution(g: int, matrix: str, x: Any) -> Any:
        stored, name = experts[g].matrices[matrix], operation_name(g, matrix, count)
        weight = stored.values[:, :, None, None]
        if stored.scales is not None:
            weight = _dequantised(mb, weight, stored.scales, f"{name}_weight", macos)
        bias = experts[g].biases.get(matrix)
        return mb.conv(x=x, weight=weight, name=name, **({} if bias is None else {"bias": bias}))

    def expert(g: int, x: Any) -> Any:
        inner = [key for key in ("gate", "up") if key in experts[g].matrices]
        inputs = [convolution(g, key, x) for key in inner]
        hidden = EMITTERS[activation.name](mb, *inputs, **activation.parameters)
        return convolution(g, "down", hidden)

    shape = (1, experts[0].hidden, 1, count * capacity)

    def function(x: Any) -> Any:
        if count == 1:
            return expert(0, x)
        tiles = mb.split(x=x, num_splits=count, axis=3)
        return mb.concat(values=[expert(g, t) for g, t in enumerate(tiles)], axis=3, name=OUTPUT)

    spec = mb.TensorSpec(shape, dtype=half)
    return mb.program(input_specs=[spec], opset_version=target(macos))(function)


def _dequantised(mb: Any, values: Any, scales: np.ndarray, name: str, macos: int) -> Any:
    """values [rows, ...] int8 times scales [rows, 1] f16, by the operation that the system has."""
    if macos == 15:
        scale = scales[:, :, None, None]
        return mb.constexpr_blockwise_shift_scale(data=values, scale=scale, name=name)
    return mb.constexpr_affine_dequantize(
        quantized_data=values,
        zero_point=np.int8(0),
        scale=scales[:, 0],
        axis=np.int32(0),
        name=name,
    )


def _sigmoid_unit(mb: Any, x: Any, alpha: float) -> Any:
    return mb.mul(x=x, y=mb.sigmoid(x=mb.mul(x=x, y=HALF(alpha))))


def _clip(mb: Any, x: Any, limit: float) -> Any:
    return mb.clip(x=x, alpha=HALF(-limit), beta=HALF(limit))


def _bounded(mb: Any, x: Any, limit: float) -> Any:
    """limit * tanh(x / limit)"""
    return mb.mul(x=mb.tanh(x=mb.mul(x=x, y=HALF(1 / limit))), y=HALF(limit))


def _gated(emit: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda mb, gate, up: mb.mul(x=emit(mb, gate), y=up)


def _gelu(mode: str) -> Callable[[Any, Any], Any]:
    return lambda mb, x: mb.gelu(x=x, mode=mode)


def _silu(mb: Any, x: Any) -> Any:
    return mb.silu(x=x)


def _relu(mb: Any, x: Any) -> Any:
    return mb.relu(x=x)


def _swiglu_oai(mb: Any, gate: Any, up: Any, alpha: float, limit: float) -> Any:
    gate = mb.minimum(x=gate, y=HALF(limit))
    up = mb.add(x=_clip(mb, up, limit), y=HALF(1))
    return mb.mul(x=_sigmoid_unit(mb, gate, alpha), y=up)


def _swiglu_clamped_inputs(mb: Any, gate: Any, up: Any, limit: float) -> Any:
    gate = mb.minimum(x=gate, y=HALF(limit))
    return mb.mul(x=mb.silu(x=gate), y=_clip(mb, up, limit))


def _swiglu_clamped(mb: Any, gate: Any, up: Any, limit: float) -> Any:
    gate = mb.minimum(x=mb.silu(x=gate), y=HALF(limit))
    return mb.mul(x=gate, y=_clip(mb, up, limit))


def _situ(mb: Any, gate: Any, up: Any, beta: float, linear_beta: float = 0.0) -> Any:
    gate = mb.mul(x=_bounded(mb, gate, beta), y=mb.sigmoid(x=gate))
    return mb.mul(x=gate, y=_bounded(mb, up, linear_beta) if linear_beta else up)


# By the names in activations.GATED and activations.SINGLE: (builder, inputs, parameters).
EMITTERS: dict[str, Callable[..., Any]] = {
    "swiglu": _gated(_silu),
    "geglu_tanh": _gated(_gelu("TANH_APPROXIMATION")),
    "geglu_erf": _gated(_gelu("EXACT")),
    "reglu": _gated(_relu),
    "swiglu_oai": _swiglu_oai,
    "swiglu_clamped_inputs": _swiglu_clamped_inputs,
    "swiglu_clamped": _swiglu_clamped,
    "situ": _situ,
    "gelu_tanh": _gelu("TANH_APPROXIMATION"),
    "gelu_erf": _gelu("EXACT"),
    "gelu_sigmoid": _gelu("SIGMOID_APPROXIMATION"),
    "relu": _relu,
    "relu2": lambda mb, x: mb.square(x=mb.relu(x=x)),
    "silu": _silu,
}
