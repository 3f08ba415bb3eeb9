"""The reference for half-precision and quantised models: the same model, its experts in float32.

Everything outside the experts keeps its dtype, so whatever differs from this model was done by
the experts' arithmetic.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from families import switches
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP


def dense(linear: nn.Module) -> SwitchLinear:
    """`linear` with the values its weights stand for, in float32."""
    if isinstance(linear, QuantizedSwitchLinear):
        weight = _dequantize(linear)
    else:
        weight = linear.weight.astype(mx.float32)
    out = SwitchLinear(linear.input_dims, linear.output_dims, linear.num_experts, bias=False)
    out.weight = weight
    if "bias" in linear:
        out.bias = linear.bias.astype(mx.float32)
    return out


def _dequantize(linear: QuantizedSwitchLinear) -> mx.array:
    scales, biases = linear.scales, linear.get("biases")
    global_scale = linear.get("global_scale")  # mlx-lm 0.31 does not know it
    if linear.mode == "affine":
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    experts = []
    for e in range(linear.num_experts):
        experts.append(
            mx.dequantize(
                linear.weight[e],
                scales[e],
                None if biases is None else biases[e],
                linear.group_size,
                linear.bits,
                mode=linear.mode,
                global_scale=None if global_scale is None else global_scale[e],
                dtype=mx.float32,
            )
        )
    return mx.stack(experts)


class _Exact:
    """Computes in float32 and answers in the dtype that stock would."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        return super().__call__(x.astype(mx.float32), indices).astype(x.dtype)


class ExactGLU(_Exact, SwitchGLU):
    pass


class ExactMLP(_Exact, SwitchMLP):
    pass


def with_exact_experts(model: nn.Module) -> nn.Module:
    """Turn the switch modules of `model` into float32 ones, in place."""
    for _, switch in switches(model):
        names = ("gate_proj", "up_proj", "down_proj", "fc1", "fc2")
        for name in (n for n in names if n in switch):
            setattr(switch, name, dense(switch[name]))
        switch.__class__ = ExactGLU if isinstance(switch, SwitchGLU) else ExactMLP
    mx.eval(model.parameters())
    return model
