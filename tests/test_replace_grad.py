"""Gradients through replaced layers are stock's, in both modes."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRASwitchLinear
from switch_reference import Block, FamilyBlock, block, error, float64, glu, inputs, mlp

from mlx_moe import replace_linear_layers, replace_moe_layers

LAYERS = {"swiglu": glu, "biases": lambda: glu(bias=True), "mlp": lambda: mlp(bias=True)}


def same(found: Any, expected: Any) -> None:
    found, expected = dict(tree_flatten(found)), dict(tree_flatten(expected))
    assert found.keys() == expected.keys() and found
    for name, gradient in expected.items():
        assert mx.abs(gradient).max() > 0, name
        assert error(found[name], float64(gradient)) < 1e-4, name


def loss(model: Any, *arguments: mx.array) -> mx.array:
    return model(*arguments).square().sum()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("caller", [Block, FamilyBlock])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tokens", [3, 40])
def test_weights_inputs_and_scores(tokens, layer: str, caller, training: bool) -> None:
    model = block(LAYERS[layer](), caller=caller)
    model.train(training)
    x, ids, scores = inputs(tokens)

    def gradients() -> Any:
        weights = nn.value_and_grad(model, lambda *a: loss(model, *a))(x, ids, scores)[1]
        data = mx.grad(lambda x, s: loss(model, x, ids, s), argnums=(0, 1))(x, scores)
        return weights, data

    expected = gradients()
    mx.eval(expected)
    replace_moe_layers(model)
    same(gradients(), expected)


@pytest.mark.parametrize("weights", ["affine-4", "mxfp4"])
def test_through_quantised_weights(weights: str) -> None:
    model = block(glu(), weights)
    x, ids, scores = inputs(3)

    def gradient() -> Any:
        return mx.grad(lambda x, s: loss(model, x, ids, s), argnums=(0, 1))(x, scores)

    expected = gradient()
    mx.eval(expected)
    replace_moe_layers(model)
    same(gradient(), expected)


def test_scales_of_quantised_weights() -> None:
    model = block(glu(), "affine-4")
    for child in model.experts.children().values():
        child.unfreeze(keys=["scales", "biases"], recurse=False)
    arguments = inputs(3)

    def gradient() -> Any:
        return nn.value_and_grad(model, lambda *a: loss(model, *a))(*arguments)[1]

    expected = gradient()
    mx.eval(expected)
    replace_moe_layers(model)
    same(gradient(), expected)


def test_the_evaluated_value_inside_a_gradient() -> None:
    """`mx.eval` inside `mx.grad` succeeds: constants must not come of it."""
    model = block(glu())
    x, ids, scores = inputs(3)

    def function(x: mx.array) -> mx.array:
        y = model(x, ids, scores)
        mx.eval(y)
        return y.square().sum()

    expected = mx.grad(function)(x)
    mx.eval(expected)
    replace_moe_layers(model)
    same([mx.grad(function)(x)], [expected])


def test_gradient_of_a_gradient() -> None:
    model = block(mlp(activation=nn.Tanh()))
    x, ids, scores = inputs(2)

    def slope(x: mx.array) -> mx.array:
        return mx.grad(lambda x: loss(model, x, ids, scores))(x).square().sum()

    expected = mx.grad(slope)(x)
    mx.eval(expected)
    replace_moe_layers(model)
    same([mx.grad(slope)(x)], [expected])


@pytest.mark.parametrize("before", [True, False])
def test_adapters_train(before: bool) -> None:
    model = block(glu(), "affine-4")
    arguments = inputs(3)

    def adapt() -> None:
        model.freeze()
        model.experts.up_proj = LoRASwitchLinear.from_base(model.experts.up_proj, r=4)
        model.experts.up_proj.lora_b = mx.random.normal(
            model.experts.up_proj.lora_b.shape, key=mx.random.key(3)
        )
        model.experts.up_proj.linear.freeze()

    if before:
        adapt()
    replacement = replace_moe_layers(model)
    if not before:
        adapt()
    assert {k for k, _ in tree_flatten(model.trainable_parameters())} == {
        "experts.up_proj.lora_a",
        "experts.up_proj.lora_b",
    }
    model.train()
    step = nn.value_and_grad(model, lambda *a: loss(model, *a))
    found = step(*arguments)[1]
    mx.eval(found)
    replacement.restore()
    same(found, step(*arguments)[1])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
def test_dense_layers(bits: int | None, training: bool) -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 64))
    if bits:
        nn.quantize(model, 64, bits)
    model.train(training)
    x = mx.random.normal((16, 128))

    def gradients() -> Any:
        data = mx.grad(lambda x: loss(model, x))(x)
        return data if bits else (data, nn.value_and_grad(model, lambda x: loss(model, x))(x)[1])

    expected = gradients()
    mx.eval(expected)
    replace_linear_layers(model)
    same([gradients()], [expected])
