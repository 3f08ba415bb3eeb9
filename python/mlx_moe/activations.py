"""Which function stands between an expert's matrices: a name and parameters, or a refusal."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from .errors import UnsupportedLayer
from .layers import PROJECTIONS
from .weights import own_class, shallow_copy

Array = np.ndarray
TOLERANCE = 2e-5  # of f32 functions on inputs up to 30; GELU's two forms differ by 5e-4


@dataclass(frozen=True)
class Activation:
    """A function of (gate, up), or of one input for two-matrix experts.

    Attributes:
        name: a key of GATED or SINGLE.
        parameters: what the function takes beside its inputs, by name.
    """

    name: str
    parameters: dict[str, float] = field(default_factory=dict)

    def __call__(self, *inputs: Array) -> Array:
        """The values in float64 for (gate, up) or (x,)."""
        function = GATED.get(self.name) or SINGLE[self.name]
        return function(*[np.asarray(x, np.float64) for x in inputs], **self.parameters)


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))  # does not overflow


def _gelu_erf(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _swiglu_oai(gate: Array, up: Array, alpha: float, limit: float) -> Array:
    gate = np.minimum(gate, limit)
    return (np.clip(up, -limit, limit) + 1) * gate * _sigmoid(alpha * gate)


def _swiglu_clamped_inputs(gate: Array, up: Array, limit: float) -> Array:
    gate = np.minimum(gate, limit)
    return gate * _sigmoid(gate) * np.clip(up, -limit, limit)


def _swiglu_clamped(gate: Array, up: Array, limit: float) -> Array:
    return np.minimum(gate * _sigmoid(gate), limit) * np.clip(up, -limit, limit)


def _situ(gate: Array, up: Array, beta: float, linear_beta: float = 0.0) -> Array:
    if linear_beta:
        up = linear_beta * np.tanh(up / linear_beta)
    return beta * np.tanh(gate / beta) * _sigmoid(gate) * up


GATED: dict[str, Callable[..., Array]] = {
    "swiglu": lambda gate, up: gate * _sigmoid(gate) * up,
    "geglu_tanh": lambda gate, up: _gelu_tanh(gate) * up,
    "geglu_erf": lambda gate, up: _gelu_erf(gate) * up,
    "reglu": lambda gate, up: np.maximum(gate, 0) * up,
    "swiglu_oai": _swiglu_oai,
    "swiglu_clamped_inputs": _swiglu_clamped_inputs,
    "swiglu_clamped": _swiglu_clamped,
    "situ": _situ,
}
SINGLE: dict[str, Callable[..., Array]] = {
    "gelu_tanh": _gelu_tanh,
    "gelu_erf": _gelu_erf,
    "gelu_sigmoid": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "silu": lambda x: x * _sigmoid(x),
}
# The attributes in which mlx-lm's modules keep the parameters.
PARAMETERS: dict[str, dict[str, tuple[str, ...]]] = {
    "swiglu_oai": {"alpha": ("_alpha", "alpha"), "limit": ("_limit", "limit")},
    "swiglu_clamped_inputs": {"limit": ("limit",)},
    "swiglu_clamped": {"limit": ("limit",)},
    "situ": {"beta": ("beta",), "linear_beta": ("linear_beta",)},
}


def recognise(module: Any, kind: str, name: str) -> Activation:
    """The activation of an expert layer or of a shared expert's MLP.

    The module's own forward runs with its matrices taken out, and what it computes is compared
    with every function known here, so that a class's name alone decides nothing.

    Args:
        module: a `SwitchGLU` or `SwitchMLP`, or an MLP with the same children.
        kind: "glu" (gate, up, down) or "mlp" (fc1, fc2).
        name: the module's path, for errors.

    Raises:
        UnsupportedLayer: it is none of the known functions, or cannot be run by itself.
    """
    found, inputs = _observed(module, kind, name)
    for candidate in _candidates(module, kind):
        if np.allclose(found, candidate(*inputs), TOLERANCE, TOLERANCE):
            return candidate
    activation = getattr(module, "activation", module)
    known = ", ".join(GATED if kind == "glu" else SINGLE)
    raise UnsupportedLayer(
        f"{name}: the activation {type(activation).__name__} is none of those that static "
        f"programs have ({known}); leave this layer out of the plan"
    )


def _candidates(module: Any, kind: str) -> list[Activation]:
    owners = [getattr(module, "activation", None), module]
    found = []
    for name in GATED if kind == "glu" else SINGLE:
        wanted = PARAMETERS.get(name, {})
        for owner in owners if wanted else owners[:1]:
            values = {key: _attribute(owner, names) for key, names in wanted.items()}
            given = {key: value for key, value in values.items() if value}
            if given or not wanted:
                found.append(Activation(name, given))
    return [c for c in found if c.parameters.keys() >= _required(c.name)]


def _required(name: str) -> set[str]:
    return set(PARAMETERS.get(name, {})) - {"linear_beta"}


def _attribute(owner: Any, names: tuple[str, ...]) -> float | None:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int | float):
            return float(value)
    return None


def _observed(module: Any, kind: str, name: str) -> tuple[Array, list[Array]]:
    """What the module computes between its matrices in f32, and the inputs (gate, up) or (x,)."""
    inputs = _samples(kind)
    twin = shallow_copy(module, own_class(module))
    hidden: list[mx.array] = []
    *inner, last = PROJECTIONS[kind]
    for projection, values in zip(inner, inputs, strict=True):
        twin[projection] = lambda *_, values=values, **__: mx.array(values)[None]

    def catch(x: mx.array, *_: Any, **__: Any) -> mx.array:
        hidden.append(x)
        return mx.zeros((1, 1, 1))

    twin[last] = catch
    sample = mx.zeros((1, 1))
    arguments = [sample, mx.zeros((1, 1), mx.uint32)] if _is_switch(module, kind) else [sample]
    try:
        with mx.stream(mx.cpu):
            twin(*arguments)
            return np.array(hidden[0].astype(mx.float32)).reshape(-1), inputs
    except Exception as error:
        raise UnsupportedLayer(
            f"{name}: the forward of {type(module).__name__} cannot be run by itself: {error}"
        ) from error


def _samples(kind: str) -> list[Array]:
    """f32 inputs, far ones too: a limit that lies far out is still one."""
    near = np.concatenate([np.linspace(-30, 30, 61), np.linspace(-4, 4, 67)])
    far, few = np.array([-1e4, -1e3, -100, 100, 1e3, 1e4]), np.array([1.0, 2.0, 5.0])
    if kind == "mlp":
        return [np.concatenate([near, far]).astype(np.float32)]
    # Not far by every near: 1 + tanh(x) of a negative x has few digits, which far ones would show.
    pairs = [np.meshgrid(*sides) for sides in ((near, near), (far, few), (few, far))]
    return [np.concatenate([p[i].ravel() for p in pairs]).astype(np.float32) for i in range(2)]


def _is_switch(module: Any, kind: str) -> bool:
    weight = module[PROJECTIONS[kind][0]]
    return bool(weight.get("linear", weight)["weight"].ndim == 3)
