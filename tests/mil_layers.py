"""Expert layers of every activation, packages of them, and their values in float64."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mil_interpreter import MilProgram
from mlx_lm.models.activations import SwigluOAI
from switch_reference import HIDDEN, WIDTH, glu, mlp, quantise

from mlx_moe.activations import recognise
from mlx_moe.coreml import write_package
from mlx_moe.experts_weights import expert_weights
from mlx_moe.mil_program import StoredExpert

EXPERTS = (5, 0, 3)


class Limited(nn.Module):
    """The clamped kinds, with a limit that acts."""

    def __init__(self, limit: float):
        super().__init__()
        self.limit = limit


class ClampedInputs(Limited):
    def __call__(self, up: mx.array, gate: mx.array) -> mx.array:
        return nn.silu(mx.minimum(gate, self.limit)) * mx.clip(up, -self.limit, self.limit)


class Clamped(Limited):
    def __call__(self, up: mx.array, gate: mx.array) -> mx.array:
        return mx.minimum(nn.silu(gate), self.limit) * mx.clip(up, -self.limit, self.limit)


class Situ(nn.Module):
    def __init__(self, beta: float, linear_beta: float | None = None):
        super().__init__()
        self.beta, self.linear_beta = beta, linear_beta

    def __call__(self, up: mx.array, gate: mx.array) -> mx.array:
        if self.linear_beta is not None:
            up = self.linear_beta * mx.tanh(up / self.linear_beta)
        return self.beta * mx.tanh(gate / self.beta) * mx.sigmoid(gate) * up


def gated(function: Callable[[mx.array], mx.array]) -> Any:
    return lambda up, gate: function(gate) * up


LAYERS: dict[str, Callable[..., Any]] = {
    "swiglu": glu,
    "geglu_tanh": lambda **how: glu(activation=gated(nn.gelu_approx), **how),
    "geglu_erf": lambda **how: glu(activation=gated(nn.gelu), **how),
    "reglu": lambda **how: glu(activation=gated(nn.relu), **how),
    "swiglu_oai": lambda **how: glu(activation=SwigluOAI(1.702, 1.5), **how),
    "swiglu_clamped_inputs": lambda **how: glu(activation=ClampedInputs(0.8), **how),
    "swiglu_clamped": lambda **how: glu(activation=Clamped(0.8), **how),
    "situ": lambda **how: glu(activation=Situ(1.5, 2.0), **how),
    "situ without a second bound": lambda **how: glu(activation=Situ(1.5), **how),
    "gelu_tanh": mlp,
    "gelu_erf": lambda **how: mlp(activation=nn.GELU(), **how),
    "gelu_sigmoid": lambda **how: mlp(activation=nn.GELU("fast"), **how),
    "relu": lambda **how: mlp(activation=nn.ReLU(), **how),
    "relu2": lambda **how: mlp(activation=nn.ReLU2(), **how),
    "silu": lambda **how: mlp(activation=nn.silu, **how),
}


def layer(name: str, bias: bool = False, weights: str = "float32") -> Any:
    """A layer whose activation works where it is not linear."""
    made = LAYERS[name](bias=bias)
    for child in made.children().values():
        if "weight" in child:
            child.weight = 3 * child.weight
    quantise(made, weights)
    made.eval()
    return made


def kind_of(module: Any) -> str:
    return "glu" if "gate_proj" in module else "mlp"


def package(
    path: Path,
    module: Any,
    capacities: tuple[int, ...] = (32,),
    weights: Any = "fp16",
    split: tuple[int, int] = (0, HIDDEN),
    experts: tuple[int, ...] = EXPERTS,
) -> MilProgram:
    write(path, module, capacities, weights, split, experts)
    return MilProgram(path)


def write(
    path: Path,
    module: Any,
    capacities: Sequence[int] = (32,),
    weights: Any = "fp16",
    split: tuple[int, int] = (0, HIDDEN),
    experts: tuple[int, ...] = EXPERTS,
    macos: int = 15,
) -> list[StoredExpert]:
    """A package, or for macOS 14 a directory of them."""
    kind = kind_of(module)
    chosen = [expert_weights(module, kind, e, split, "layer") for e in experts]
    return write_package(path, chosen, recognise(module, kind, "layer"), capacities, weights, macos)


def tile(capacity: int, experts: int = len(EXPERTS), seed: int = 0) -> np.ndarray:
    """[G, C, d] f16"""
    made = np.random.default_rng(seed).standard_normal((experts, capacity, WIDTH))
    return made.astype(np.float16)


def run(program: MilProgram, rows: np.ndarray, function: str | None = None) -> np.ndarray:
    """[G, C, d] through the function of that capacity."""
    experts, capacity, width = rows.shape
    x = np.ascontiguousarray(rows.reshape(-1, width).T)[None, :, None]
    (y,) = program(function or f"c{capacity}", x=x).values()
    return y[0, :, 0].T.reshape(experts, capacity, -1)


def exact(module: Any, rows: np.ndarray, experts: tuple[int, ...] = EXPERTS) -> np.ndarray:
    """float64, but for the layer's own activation in f32."""
    names = ("up_proj", "gate_proj") if kind_of(module) == "glu" else ("fc1",)
    last = "down_proj" if kind_of(module) == "glu" else "fc2"

    def project(name: str, x: np.ndarray) -> np.ndarray:
        linear = module[name]
        weight = linear["weight"]
        if "scales" in linear:
            how = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
            weight = mx.dequantize(weight, linear["scales"], linear.get("biases"), **how)
        chosen = mx.array(experts)
        y = x @ np.array(weight[chosen], np.float64).swapaxes(1, 2)
        return y + np.array(linear["bias"][chosen])[:, None] if "bias" in linear else y

    inner = [mx.array(project(name, rows.astype(np.float64)).astype(np.float32)) for name in names]
    return project(last, np.array(module.activation(*inner), np.float64))


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
