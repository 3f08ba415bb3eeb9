"""Dense layers on the kernels: values, what is seen of later changes, restoring, refusing."""

import copy

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear
from switch_reference import (
    FORMATS,
    TOLERANCE,
    calls_since,
    error,
    float64,
    in_threads,
    quantise,
)

from mlx_moe import (
    InvalidArgument,
    NoMoELayers,
    core,
    replace_linear_layers,
    restore_linear_layers,
)

INPUTS, OUTPUTS, TOKENS = 128, 320, 5


class Tied(nn.Module):
    """A model whose output projection is its embedding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(OUTPUTS, INPUTS)

    def __call__(self, x: mx.array) -> mx.array:
        return self.table.as_linear(x)


class Single(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.table = nn.Linear(INPUTS, OUTPUTS, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.table(x)


def prepare(model: nn.Module, weights: str) -> nn.Module:
    quantise(model, weights)
    model.eval()
    mx.eval(model.parameters())
    return model


def exact(layer: nn.Module, x: mx.array) -> np.ndarray:
    weight = layer["weight"]
    if "scales" in layer:
        how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        weight = mx.dequantize(weight, layer["scales"], layer.get("biases"), **how)
    y = float64(x) @ float64(weight).T
    return y + float64(layer["bias"]) if "bias" in layer else y


def counts(replacement) -> dict:
    return replacement.stats()["table"]


@pytest.mark.parametrize("tokens", [4, 70])
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("make", [Single, lambda: Single(bias=True), Tied])
def test_values_of_every_format(make, weights: str, tokens: int) -> None:
    dtype = {"float32": mx.float32, "affine-8": mx.float32, "float16": mx.float16}.get(
        weights, mx.bfloat16
    )
    model = prepare(make(), weights)
    x = mx.random.normal((2, tokens, INPUTS)).astype(dtype)
    stock = model(x)
    expected = exact(model.table, x)
    replacement = replace_linear_layers(model)
    before = core.calls()
    found = model(x)
    assert found.dtype == stock.dtype and found.shape == stock.shape
    assert error(found, expected) < TOLERANCE[dtype]
    assert calls_since(before) == {"linear": 1}
    assert counts(replacement) == {
        "calls": 1,
        "tokens": 2 * tokens,
        "kernel_calls": 1,
        "small": 0,
        "fallbacks": {},
    }


def test_an_embedding_still_looks_up() -> None:
    model = prepare(Tied(), "affine-4")
    expected = model.table(mx.array([3, 1]))
    replace_linear_layers(model)
    assert mx.array_equal(model.table(mx.array([3, 1])), expected)


def halve_in_place(layer) -> None:
    layer.weight /= 2


def other_array(layer) -> None:
    layer.weight = mx.random.normal(layer.weight.shape)


def add_bias(layer) -> None:
    layer.bias = mx.random.normal((OUTPUTS,))


@pytest.mark.parametrize("change", [halve_in_place, other_array, add_bias])
def test_changes_after_the_first_call_are_seen(change) -> None:
    model = prepare(Single(), "float32")
    x = mx.random.normal((TOKENS, INPUTS))
    replacement = replace_linear_layers(model)
    mx.eval(model(x))
    change(model.table)
    assert error(model(x), exact(model.table, x)) < 1e-5
    assert counts(replacement)["kernel_calls"] == 2


def test_quantising_after_replacement_keeps_the_kernels() -> None:
    model = prepare(Single(), "float32")
    replacement = replace_linear_layers(model)
    nn.quantize(model, 64, 4)
    x = mx.random.normal((TOKENS, INPUTS))
    assert isinstance(model.table, nn.QuantizedLinear)
    assert error(model(x), exact(model.table, x)) < 1e-5
    assert counts(replacement)["kernel_calls"] == 1
    replacement.restore()
    assert type(model.table) is nn.QuantizedLinear


def test_quantised_layers_of_a_model_in_evaluation_mode_run_on_the_kernels() -> None:
    """nn.quantize leaves its new layers in training mode."""
    model = prepare(Single(), "float32")
    nn.quantize(model, 64, 4)
    replacement = replace_linear_layers(model)
    mx.eval(model(mx.random.normal((TOKENS, INPUTS))))
    assert counts(replacement)["kernel_calls"] == 1


def test_a_copy_follows_its_own_models_training_flag() -> None:
    model = prepare(Single(), "float32")
    nn.quantize(model, 64, 4)  # the layer itself is left in training mode
    replace_linear_layers(model)
    other = copy.deepcopy(model)
    model.train()
    before = core.calls()
    mx.eval(other(mx.random.normal((TOKENS, INPUTS))))
    assert calls_since(before) == {"linear": 1}


def test_adapters_keep_their_base_on_the_kernels() -> None:
    model = prepare(Single(), "affine-4")
    replacement = replace_linear_layers(model)
    model.table = LoRALinear.from_base(model.table, r=4)
    model.table.lora_b = mx.random.normal(model.table.lora_b.shape)
    model.eval()
    x = mx.random.normal((TOKENS, INPUTS))
    found = model(x)
    mx.eval(found)
    assert counts(replacement)["kernel_calls"] == 1
    replacement.restore()
    assert error(found, float64(model(x))) < 1e-5
    assert type(model.table.linear) is nn.QuantizedLinear


def test_restore_is_exact() -> None:
    model = prepare(Single(bias=True), "affine-4")
    x = mx.random.normal((TOKENS, INPUTS))
    state, expected = dict(model.table.__dict__), model(x)
    replacement = replace_linear_layers(model)
    assert replace_linear_layers(model) == replacement
    mx.eval(model(x))
    assert isinstance(model.table, nn.QuantizedLinear)
    replacement.restore()
    assert type(model.table) is nn.QuantizedLinear and model.table.__dict__ == state
    assert type(model) is Single
    assert mx.array_equal(model(x), expected)
    restore_linear_layers(model)


@pytest.mark.parametrize(("mode", "reason"), [("train", "training"), ("compile", "tracing")])
def test_stock_code_where_it_must_be(mode: str, reason: str) -> None:
    model = prepare(Single(), "float32")
    x = mx.random.normal((TOKENS, INPUTS))
    expected = float64(model(x))
    replacement = replace_linear_layers(model)
    model.train(mode == "train")
    call = mx.compile(model) if mode == "compile" else model
    assert error(call(x), expected) < 1e-5
    assert counts(replacement)["fallbacks"] == {reason: 1}


def test_threads_share_a_model() -> None:
    model = prepare(Single(), "affine-4")
    work = [mx.random.normal((tokens, INPUTS)) for tokens in (2, 9, 65)]
    expected = [exact(model.table, x) for x in work]
    replacement = replace_linear_layers(model)
    errors = in_threads(lambda i: error(model(work[i]), expected[i]), len(work))
    assert max(errors) < 1e-5
    assert counts(replacement)["kernel_calls"] == len(errors)


def test_refusals() -> None:
    with pytest.raises(InvalidArgument, match="backend"):
        replace_linear_layers(Single(), backend="gpu")
    with pytest.raises(NoMoELayers):
        replace_linear_layers(nn.Sequential(nn.ReLU()))
    model = prepare(Single(), "float32")
    replacement = replace_linear_layers(model, backend="stock")
    assert type(model.table) is nn.Linear
    assert {row.backend for row in replacement.layers} == {"stock"}


def test_a_format_that_the_shapes_deny_is_an_error_with_the_layers_name() -> None:
    model = prepare(Single(), "affine-4")
    replace_linear_layers(model)
    model.table.bits = 8
    with pytest.raises(InvalidArgument, match=r"^table: weight has .* 8 bits"):
        mx.eval(model(mx.ones((TOKENS, INPUTS))))


def test_a_lone_layer_has_no_attention_product() -> None:
    layer = nn.Linear(INPUTS, OUTPUTS).eval()
    assert [row.name for row in replace_linear_layers(layer).layers] == [""]
