"""Check a foreign expert module by running its own forward on small weights."""

from typing import Any

import mlx.core as mx

from .errors import UnsupportedLayer
from .layers import PROJECTIONS
from .weights import quantisation, shallow_copy

WIDTH, EXPERTS, TOP_K = 128, 3, 2
TOKEN_COUNTS = (2, 40)  # below and above the 64 assignments at which switch layers sort


def check_forward(module: Any, kind: str, name: str) -> None:
    """Raise UnsupportedLayer unless `module(x, indices)` computes what `kind` stands for.

    The module's classes run on copies that hold small f32 (or freshly quantised) weights, so
    that no real weight is read: "glu" is down(activation(up(x), gate(x))), "mlp" is
    fc2(activation(fc1(x))), for each chosen expert.
    """
    with mx.stream(mx.cpu):
        twin = shallow_copy(module, type(module))
        weights = {}
        for seed, projection in enumerate(PROJECTIONS[kind]):
            twin[projection], weights[projection] = _small_linear(module[projection], seed)
        for tokens in TOKEN_COUNTS:
            x = mx.random.normal((tokens, WIDTH), key=mx.random.key(tokens))
            ids = mx.arange(tokens * TOP_K, dtype=mx.uint32).reshape(tokens, TOP_K) * 7 % EXPERTS
            try:
                found = twin(x, ids.astype(mx.uint32))
                mx.eval(found)
            except Exception as error:
                raise UnsupportedLayer(
                    f"{name}: {type(module).__name__} failed on small f32 weights: {error}"
                ) from error
            expected = _reference(module.activation, kind, weights, x, ids)
            if found.shape != expected.shape or not mx.allclose(found, expected, 1e-3, 1e-3):
                raise UnsupportedLayer(
                    f"{name}: {type(module).__name__} has the children of a switch layer and "
                    "computes something else; use strict=False to leave it as it is"
                )


def is_swiglu(activation: Any) -> bool:
    """Whether a class named SwiGLU computes silu(gate) * up, at any size of input."""
    if type(activation).__name__ != "SwiGLU":
        return False
    up = mx.array([-1e4, -30.0, -1.0, 0.5, 8.0, 1e4])
    gate = mx.array([-1e4, -20.0, -0.3, 0.0, 2.0, 12.0, 1e4])[:, None]
    expected = gate * mx.sigmoid(gate) * up
    return bool(mx.allclose(activation(up, gate), expected, 1e-5, 1e-5))


def _small_linear(linear: Any, seed: int) -> tuple[Any, mx.array]:
    """A copy of a stacked linear module with small weights, and these as [E, N, K + bias]."""
    twin = shallow_copy(linear, type(linear))
    key = mx.random.key(seed)
    weight = mx.random.normal((EXPERTS, WIDTH, WIDTH), key=key) / WIDTH**0.5
    twin["weight"] = weight
    if "scales" in linear:
        how = quantisation(linear)._asdict()
        packed = mx.quantize(weight, **how)
        twin.update(dict(zip(("weight", "scales", "biases"), packed, strict=False)))
        weight = mx.dequantize(*packed, **how)
    bias = mx.zeros((EXPERTS, WIDTH))
    if "bias" in linear:
        bias = twin["bias"] = mx.random.normal(bias.shape, key=key)
    return twin, mx.concatenate([weight, bias[..., None]], axis=-1)


def _reference(
    activation: Any, kind: str, weights: dict[str, mx.array], x: mx.array, ids: mx.array
) -> mx.array:
    def linear(x: mx.array, projection: str) -> mx.array:
        chosen = weights[projection][ids]
        return (chosen[..., :-1] @ x[..., None])[..., 0] + chosen[..., -1]

    x = mx.broadcast_to(x[:, None], (*ids.shape, WIDTH))
    *inner, last = PROJECTIONS[kind]
    hidden = activation(*[linear(x, projection) for projection in reversed(inner)])
    return linear(hidden, last)
