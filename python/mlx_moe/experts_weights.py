"""The values of one expert's matrices, exactly: w = s * q + b in f32, rounded once."""

from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from .errors import InvalidArgument, UnsupportedLayer
from .layers import PROJECTIONS
from .stored_linear import refuse_placeholders
from .weights import MODES, quantisation

Dtype = Literal["float16", "float32"]
KNOWN = frozenset({"weight", "scales", "biases", "bias", "global_scale"})


@dataclass
class ExpertWeights:
    """One expert over a range of its inner features, [rows, columns] as MLX stores them.

    Attributes:
        gate, up: [inner, hidden]; gate is None for a two-matrix expert, whose fc1 is `up`.
        down: [hidden, inner].
        gate_bias, up_bias: [inner] or None.
        down_bias: [hidden] or None; only in the range that starts at 0, so that partial sums add
            it once.
    """

    gate: np.ndarray | None
    up: np.ndarray
    down: np.ndarray
    gate_bias: np.ndarray | None = None
    up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None

    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Of every attribute; None for what there is not."""
        return {k: None if array is None else array.shape for k, array in vars(self).items()}

    def arrays(self) -> dict[str, np.ndarray]:
        """What there is, by attribute name."""
        return {key: value for key, value in vars(self).items() if value is not None}


def expert_weights(
    module: Any,
    kind: str,
    expert: int,
    split: tuple[int, int],
    name: str,
    dtype: Dtype = "float16",
) -> ExpertWeights:
    """One expert's weights; reads and dequantises no other expert of an evaluated layer.

    Arrays of a lazily loaded model are read when first asked for, whole: `release` lets go of
    them. Nothing else of the model is evaluated.

    Args:
        module: an expert layer, or one MLP with the same children (its only expert is 0).
        kind: "glu" (gate_proj, up_proj, down_proj) or "mlp" (fc1, fc2).
        split: the range of inner features.
        name: the module's path, for errors.

    Raises:
        InvalidArgument: there is no such expert or range, or a value does not fit in f16.
        UnsupportedLayer: a projection is no plain or quantised linear layer.
    """
    begin, end = split
    *inner, last = PROJECTIONS[kind]
    first = _Projection(module, inner[0], name)
    if not 0 <= expert < first.experts or not 0 <= begin < end <= first.rows:
        raise InvalidArgument(
            f"{name}: expert {expert}, inner features {begin} to {end} asked for; there are "
            f"{first.experts} experts of {first.rows}"
        )
    matrices, biases = [], []
    for key in inner:
        projection = _Projection(module, key, name)
        matrices.append(projection.rows_of(expert, begin, end, dtype))
        biases.append(projection.bias_of(expert, begin, end, dtype))
    down = _Projection(module, last, name)
    return ExpertWeights(
        gate=matrices[0] if kind == "glu" else None,
        up=matrices[-1],
        down=down.columns_of(expert, begin, end, dtype),
        gate_bias=biases[0] if kind == "glu" else None,
        up_bias=biases[-1],
        down_bias=down.bias_of(expert, 0, down.rows, dtype) if begin == 0 else None,
    )


def release(module: Any) -> None:
    """Let go of a layer's arrays, of a model that nobody will run."""
    nn.Module.update(module, tree_map(lambda a: mx.zeros((0,), a.dtype), module.parameters()))


class _Projection:
    """One (stacked) linear module, dense or quantised."""

    def __init__(self, module: Any, key: str, layer: str):
        self.name = f"{layer}.{key}"
        linear = module.get(key)
        weight = linear.get("weight") if isinstance(linear, dict) else None
        arrays = {k for k, v in linear.items() if v is not None} if weight is not None else set()
        if weight is None or not arrays <= KNOWN or weight.ndim not in (2, 3):
            raise UnsupportedLayer(
                f"{self.name}: {type(linear).__name__} is no plain or quantised linear layer; "
                "fuse adapters into the model first (mlx_lm.fuse)"
            )
        refuse_placeholders(linear, self.name)
        self.linear = linear
        self.mode = getattr(linear, "mode", "affine") if "scales" in linear else None
        if self.mode not in (None, *MODES):
            raise UnsupportedLayer(
                f"{self.name}: weights in mode {self.mode!r}; known are {', '.join(MODES)}"
            )

    @property
    def experts(self) -> int:
        weight = self.linear["weight"]
        return int(weight.shape[0]) if weight.ndim == 3 else 1

    @property
    def rows(self) -> int:
        return int(self.linear["weight"].shape[-2])

    def rows_of(self, expert: int, begin: int, end: int, dtype: Dtype) -> np.ndarray:
        """[end - begin, columns]"""
        return self._rounded(self._values(expert, begin, end), dtype)

    def columns_of(self, expert: int, begin: int, end: int, dtype: Dtype) -> np.ndarray:
        """[rows, end - begin]"""
        return self._rounded(self._values(expert, 0, self.rows)[:, begin:end], dtype)

    def bias_of(self, expert: int, begin: int, end: int, dtype: Dtype) -> np.ndarray | None:
        if "bias" not in self.linear:
            return None
        return self._rounded(self._one("bias", expert)[begin:end], dtype)

    def _one(self, key: str, expert: int) -> mx.array:
        """A parameter of one expert; the only one of an unstacked module."""
        array = self.linear[key]
        return array[expert] if self.linear["weight"].ndim == 3 else array

    def _values(self, expert: int, begin: int, end: int) -> mx.array:
        """Rows in f32: a copy, or a view of dense weights."""
        weight = self._one("weight", expert)[begin:end]
        if self.mode is None:
            return weight
        scales, biases = self._one("scales", expert)[begin:end], None
        if self.mode == "affine":
            scales = scales.astype(mx.float32)
            biases = self._one("biases", expert)[begin:end].astype(mx.float32)
        scale = self.linear.get("global_scale")
        how: dict[str, Any] = quantisation(self.linear)._asdict()
        if scale is not None:
            how["global_scale"] = self._one("global_scale", expert)
        # The GPU would contract s * q + b into one rounding, the CPU does not.
        return mx.dequantize(weight, scales, biases, dtype=mx.float32, stream=mx.cpu, **how)

    def _rounded(self, values: mx.array, dtype: Dtype) -> np.ndarray:
        with mx.stream(mx.cpu):
            array = np.array(values.astype(mx.float32))
        if dtype == "float32":
            return array
        with np.errstate(over="ignore"):
            rounded = array.astype(np.float16)
        if not np.isfinite(rounded).all():
            largest = float(np.abs(array).max())
            raise InvalidArgument(
                f"{self.name}: a weight of {largest:g} does not fit in float16 (at most 65504); "
                "leave this layer out of the plan"
            )
        return rounded
