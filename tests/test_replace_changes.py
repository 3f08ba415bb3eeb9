"""What changes on a replaced layer after its first call is seen: weights, formats, adapters."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRASwitchLinear
from switch_reference import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    WIDTH,
    block,
    error,
    float64,
    glu,
    inputs,
    only,
)

from mlx_moe import InvalidArgument, replace_moe_layers
from mlx_moe.experts_weights import expert_weights
from mlx_moe.facts import layer_facts
from mlx_moe.weights import quantisation


def halve_in_place(layer) -> None:
    layer.down_proj.weight /= 2


def other_array(layer) -> None:
    layer.up_proj.weight = mx.random.normal(layer.up_proj.weight.shape)


def one_row(layer) -> None:
    layer.gate_proj.weight[:, 0] = 1


def add_bias(layer) -> None:
    layer.down_proj.bias = mx.random.normal((EXPERTS, WIDTH))


def add_bias_to_the_gate(layer) -> None:
    layer.gate_proj.bias = mx.random.normal((EXPERTS, HIDDEN))


def quantise(layer) -> None:
    nn.quantize(layer, 32, 8)


def quantise_each_projection_otherwise(layer) -> None:
    layer.down_proj = layer.down_proj.to_quantized(32, 8)
    layer.up_proj = layer.up_proj.to_quantized(64, 4)
    layer.gate_proj = layer.gate_proj.to_quantized(64, 6)


def shard(layer) -> None:
    for name, axis in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 2)):
        weight = mx.split(layer[name].weight, 2, axis=axis)[0]
        layer[name].weight = mx.contiguous(weight)


def load(layer) -> None:
    layer.load_weights(
        [(k, mx.random.normal(v.shape)) for k, v in tree_flatten(layer.parameters())]
    )


@pytest.mark.parametrize(
    "change",
    [
        halve_in_place,
        other_array,
        one_row,
        add_bias,
        add_bias_to_the_gate,
        quantise,
        quantise_each_projection_otherwise,
        shard,
        load,
    ],
)
def test_changes_after_the_first_call_are_seen(change) -> None:
    model = block(glu())
    arguments = inputs()
    replacement = replace_moe_layers(model)
    first = float64(model(*arguments))
    change(model.experts)
    found = model(*arguments)
    mx.eval(found)
    assert only(replacement)["fallbacks"] == {}
    replacement.restore()
    expected = float64(model(*arguments))
    assert error(found, expected) < 1e-5
    assert error(mx.array(first.astype(np.float32)), expected) > 1e-3


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_quantised_with_mlxs_own_defaults(mode: str) -> None:
    """What `nn.quantize` is not told, mlx-lm's stacked layers keep as None."""
    model = block(glu())
    nn.quantize(model, mode=mode)
    arguments, linear = inputs(), model.experts.down_proj
    scales, biases = linear.scales, linear.get("biases")
    weight = mx.dequantize(linear.weight, scales, biases, mode=mode, dtype=mx.float32)
    bits = 32 * linear.weight.shape[-1] // HIDDEN
    assert (linear.bits, linear.group_size) == (None, None)
    assert quantisation(linear) == (mode, bits, HIDDEN // scales.shape[-1])
    stock = float64(model(*arguments))
    replacement = replace_moe_layers(model)
    assert error(model(*arguments), stock) < 1e-5
    assert only(replacement)["kernel_calls"] == 1 and replacement.layers[0].bits == bits
    (facts,) = layer_facts(model, {"experts": TOP_K})
    assert (facts.weights.mode, facts.weights.bits) == (mode, bits)
    values = expert_weights(model.experts, "glu", 1, (0, HIDDEN), "experts", "float32").down
    assert np.array_equal(values, np.array(weight[1]))


@pytest.mark.parametrize(("name", "value"), [("bits", 8), ("group_size", 32)])
def test_a_format_that_the_shapes_deny_is_an_error_with_the_projections_name(name, value) -> None:
    model = block(glu(), "affine-4")
    replace_moe_layers(model)
    setattr(model.experts.up_proj, name, value)
    with pytest.raises(InvalidArgument, match=rf"^experts\.up_proj: weight has .* {value}\b"):
        mx.eval(model(*inputs()))


def adapt(layer) -> None:
    layer.up_proj = LoRASwitchLinear.from_base(layer.up_proj, r=4)
    layer.up_proj.lora_b = mx.random.normal(layer.up_proj.lora_b.shape)
    layer.eval()


@pytest.mark.parametrize("before", [True, False])
def test_adapters_count_before_and_after_replacement(before: bool) -> None:
    model = block(glu())
    arguments = inputs()
    bare = float64(model(*arguments))
    if before:
        adapt(model.experts)
    replacement = replace_moe_layers(model)
    if not before:
        assert error(model(*arguments), bare) < 1e-5
        adapt(model.experts)
    found = model(*arguments)
    assert only(replacement)["fallbacks"] == {"adapter": 1}
    replacement.restore()
    expected = float64(model(*arguments))
    assert error(found, expected) < 1e-5
    assert error(found, bare) > 1e-2
