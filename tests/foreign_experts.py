"""Expert layers of somebody else's code: the shape of mlx-lm's, nothing imported from it."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn


class Stacked(nn.Module):
    """One matrix per expert: rows `x` [..., k, K] by the experts `chosen` [..., k]."""

    def __init__(self, inputs: int, outputs: int, experts: int, bias: bool):
        super().__init__()
        self.weight = mx.random.normal((experts, outputs, inputs)) / inputs**0.5
        if bias:
            self.bias = mx.random.normal((experts, outputs))

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        y = (self.weight[chosen] @ x[..., None])[..., 0]
        return y + self.bias[chosen] if "bias" in self else y


class SwiGLU(nn.Module):
    def __call__(self, up: mx.array, gate: mx.array) -> mx.array:
        return nn.silu(gate) * up


class TanhGLU(nn.Module):
    def __call__(self, up: mx.array, gate: mx.array) -> mx.array:
        return mx.tanh(gate) * up


class GatedExperts(nn.Module):
    def __init__(self, dims: int, hidden: int, experts: int, activation: nn.Module, bias=False):
        super().__init__()
        self.gate_proj = Stacked(dims, hidden, experts, bias)
        self.up_proj = Stacked(dims, hidden, experts, bias)
        self.down_proj = Stacked(hidden, dims, experts, bias)
        self.activation = activation

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        x = mx.broadcast_to(x[..., None, :], (*chosen.shape, x.shape[-1]))
        hidden = self.activation(self.up_proj(x, chosen), self.gate_proj(x, chosen))
        return self.down_proj(hidden, chosen)


class DoublingExperts(GatedExperts):
    """Same children, other arithmetic: nothing that may be replaced."""

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        return 2 * super().__call__(x, chosen)


class TwoMatrixExperts(nn.Module):
    def __init__(self, dims: int, hidden: int, experts: int, activation: Callable, bias=False):
        super().__init__()
        self.fc1 = Stacked(dims, hidden, experts, bias)
        self.fc2 = Stacked(hidden, dims, experts, bias)
        self.activation = activation

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        x = mx.broadcast_to(x[..., None, :], (*chosen.shape, x.shape[-1]))
        return self.fc2(self.activation(self.fc1(x, chosen)), chosen)


class Block(nn.Module):
    """A router and its experts, combined in an order of its own."""

    def __init__(self, experts: nn.Module, dims: int, number: int, top_k: int = 2):
        super().__init__()
        self.router = nn.Linear(dims, number, bias=False)
        self.experts = experts
        self.top_k = top_k

    def __call__(self, x: mx.array) -> mx.array:
        probabilities = mx.softmax(self.router(x), axis=-1)
        chosen = mx.argsort(-probabilities, axis=-1)[..., : self.top_k]
        weights = mx.take_along_axis(probabilities, chosen, axis=-1)
        return mx.einsum("...kd,...k->...d", mx.array(self.experts(x, chosen)), weights)
