"""Replacement: values, what is seen of later changes, restoring, refusing."""

import copy
import logging
import pickle

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from foreign_experts import GatedExperts, TanhGLU
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU
from switch_reference import (
    EXPERTS,
    FORMATS,
    HIDDEN,
    TOLERANCE,
    TOP_K,
    WIDTH,
    Block,
    FamilyBlock,
    block,
    calls_since,
    error,
    exact,
    float64,
    glu,
    in_threads,
    inputs,
    mlp,
    only,
)

from mlx_moe import (
    InvalidArgument,
    NoMoELayers,
    UnsupportedLayer,
    core,
    replace_linear_layers,
    replace_moe_layers,
    restore_linear_layers,
    restore_moe_layers,
)


class Doubled(nn.Module):
    """An activation with the two arguments of a switch layer that is nobody's special case."""

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        return mx.tanh(gate) * x * 2


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("caller", [Block, FamilyBlock])
def test_values_of_every_format(caller, weights: str, tokens: int) -> None:
    dtype = mx.float16 if weights == "float16" else mx.bfloat16
    dtype = mx.float32 if weights in ("float32", "affine-8") else dtype
    model = block(glu(), weights, caller)
    x, ids, scores = inputs(tokens, dtype)
    y = exact(model.experts, x, ids)
    replacement = replace_moe_layers(model)
    total, plain = model(x, ids, scores), mx.array(model.experts(x, ids))
    assert total.dtype == plain.dtype
    assert error(plain, y) < TOLERANCE[dtype]
    assert error(total, (y * float64(scores)[..., None]).sum(-2)) < TOLERANCE[dtype]
    assert only(replacement)["fallbacks"] == {}
    assert only(replacement)["kernel_calls"] == 2


@pytest.mark.parametrize(
    ("layer", "kernels"),
    [
        (lambda: glu(bias=True), {"grouped": 3}),
        (lambda: glu(activation=Doubled()), {"grouped": 3}),
        (lambda: mlp(), {"grouped": 2}),
        (lambda: mlp(bias=True, activation=nn.ReLU2()), {"grouped": 2}),
        (lambda: glu(), {"swiglu_combine": 1}),
    ],
)
@pytest.mark.parametrize("tokens", [2, 40])
def test_other_layers_equal_stock_and_run_these_kernels(layer, kernels, tokens: int) -> None:
    model = block(layer())
    arguments = inputs(tokens)
    expected = float64(model(*arguments))
    replace_moe_layers(model)
    before = core.calls()
    assert error(model(*arguments), expected) < 1e-5
    assert calls_since(before) == kernels


@pytest.mark.parametrize("x_dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("scores_dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("weights", ["float32", "affine-4"])
def test_dtypes_are_promoted_as_stock_does(weights, scores_dtype, x_dtype) -> None:
    model = block(glu(), weights)
    x, ids, scores = inputs(3, x_dtype)
    y = model.experts(x, ids)
    total = (y * scores.astype(scores_dtype)[..., None]).sum(axis=-2)
    replace_moe_layers(model)
    ours = model.experts(x, ids)
    weighted = ours * scores.astype(scores_dtype)[..., None]
    assert (ours.dtype, weighted.dtype) == (y.dtype, total.dtype)
    assert weighted.sum(axis=-2).dtype == total.dtype


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64, mx.uint16])
def test_any_integer_chooses_experts(dtype: mx.Dtype) -> None:
    model = block(glu())
    x, ids, scores = inputs()
    expected = float64(model(x, ids, scores))
    replacement = replace_moe_layers(model)
    assert error(model(x, ids.astype(dtype), scores), expected) < 1e-5
    assert only(replacement)["fallbacks"] == {}


def test_inputs_that_are_not_contiguous() -> None:
    model = block(glu())
    x, ids, scores = inputs(6)
    views = [
        mx.swapaxes(mx.contiguous(mx.swapaxes(a, 1, 2)), 1, 2)[:, ::2] for a in (x, ids, scores)
    ]
    expected = float64(model(*views))
    replace_moe_layers(model)
    assert error(model(*views), expected) < 1e-5


def test_flat_tokens_and_no_tokens() -> None:
    model = block(glu())
    x, ids, scores = (a[0] for a in inputs(4))
    expected = float64(model(x, ids, scores))
    replace_moe_layers(model)
    assert error(model(x, ids, scores), expected) < 1e-5
    nothing = model(x[:0], ids[:0], scores[:0])
    assert nothing.shape == (0, WIDTH)


def test_an_expert_that_does_not_exist_is_an_error_with_the_layers_name() -> None:
    model = block(glu())
    x, ids, scores = inputs()
    replace_moe_layers(model)
    with pytest.raises(InvalidArgument, match=r"^experts: ids.* expected an expert from 0 to 7"):
        mx.eval(model(x, ids + EXPERTS, scores))


def test_results_own_their_memory() -> None:
    model = block(glu())
    replace_moe_layers(model)
    calls = [inputs() for _ in range(4)]
    results = [model(*arguments) for arguments in calls]
    kept = [float64(result) for result in results]
    for _ in range(20):
        mx.eval(model(*inputs()))
    for result, before in zip(results, kept, strict=True):
        assert np.array_equal(float64(result), before)


def test_tree_classes_and_parameters_stay_and_restore_is_exact() -> None:
    model = block(glu(), "affine-4")
    arguments = inputs()
    layer = model.experts
    state, parameters = dict(layer.__dict__), dict(tree_flatten(model.parameters()))
    text, expected = repr(model), model(*arguments)
    replacement = replace_moe_layers(model)
    mx.eval(model(*arguments))
    assert isinstance(layer, SwitchGLU) and type(layer) is not SwitchGLU
    assert repr(model) == text
    now = dict(tree_flatten(model.parameters()))
    assert now.keys() == parameters.keys()
    assert all(now[name] is array for name, array in parameters.items())
    replacement.restore()
    assert type(layer) is SwitchGLU and layer.__dict__ == state
    assert mx.array_equal(model(*arguments), expected)
    restore_moe_layers(model)  # nothing left to do


def test_replacing_twice_is_replacing_once() -> None:
    model = block(glu())
    first = replace_moe_layers(model)
    mx.eval(model(*inputs()))
    second = replace_moe_layers(model)
    assert second == first and second.stats() == first.stats()
    second.restore()
    assert type(model.experts) is SwitchGLU


def test_a_layer_in_two_places_is_one_row() -> None:
    shared = glu()
    model = nn.Module()
    model.blocks = [block(shared), block(shared)]
    assert [row.name for row in replace_moe_layers(model).layers] == ["blocks.0.experts"]


def test_stock_backend_swaps_classes_off() -> None:
    model = block(glu())
    replace_moe_layers(model, backend="cpu")
    replacement = replace_moe_layers(model, backend="stock")
    assert type(model.experts) is SwitchGLU
    assert [layer.backend for layer in replacement.layers] == ["stock"]
    assert replacement.stats() == {}


def test_the_table() -> None:
    model = block(glu(), "affine-4")
    replacement = replace_moe_layers(model)
    (row,) = replacement.layers
    assert (row.name, row.family, row.experts, row.bits) == ("experts", "qwen3_moe", EXPERTS, 4)
    assert (row.dtype, row.backend, row.top_k) == ("float32", "cpu", None)
    mx.eval(model(*inputs(5)))
    assert row.top_k == TOP_K
    assert only(replacement) == {
        "calls": 1,
        "tokens": 5,
        "kernel_calls": 1,
        "small": 0,
        "fallbacks": {},
    }
    last = str(replacement).splitlines()[-1].split()
    assert last == ["experts", "experts", "qwen3_moe", "8", "2", "4-bit", "float32", "cpu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "cuda"}, "backend"),
        ({"overflow": "drop"}, "overflow"),
        ({"plan": ["p"]}, "plan"),
        ({"checkpoint": 5}, "checkpoint is 5; expected the directory"),
    ],
)
def test_wrong_arguments_change_nothing(arguments, message: str) -> None:
    model = block(glu())
    with pytest.raises(InvalidArgument, match=message):
        replace_moe_layers(model, **arguments)
    assert type(model.experts) is SwitchGLU


@pytest.mark.parametrize(
    "call", [replace_moe_layers, replace_linear_layers, restore_moe_layers, restore_linear_layers]
)
def test_what_is_no_model(call) -> None:
    with pytest.raises(InvalidArgument, match=r"expected a model .* found str; mlx_moe.load"):
        call("examples/tiny-qwen3-moe")


def test_a_model_without_experts() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(NoMoELayers, match="Sequential"):
        replace_moe_layers(model)
    assert type(model.layers[0]) is nn.Linear


class Louder(SwitchGLU):
    """Computes something else than its base class."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        return super().__call__(x, indices) * 2


def test_all_or_nothing() -> None:
    model = nn.Module()
    model.plain = glu()
    model.louder = Louder(WIDTH, HIDDEN, EXPERTS)
    model.eval()
    with pytest.raises(UnsupportedLayer, match="louder"):
        replace_moe_layers(model)
    assert type(model.plain) is SwitchGLU
    replacement = replace_moe_layers(model, strict=False)
    assert {row.name: row.backend for row in replacement.layers} == {
        "louder": "stock",
        "plain": "cpu",
    }
    assert type(model.louder) is Louder


def test_training_mode_is_stock() -> None:
    model = block(glu())
    arguments = inputs()
    expected = model(*arguments)
    replacement = replace_moe_layers(model)
    model.train()
    assert mx.array_equal(model(*arguments), expected)
    assert only(replacement)["fallbacks"] == {"training": 1}


@pytest.mark.parametrize("caller", [Block, FamilyBlock])
def test_compiled_callers_get_stock(caller) -> None:
    model = block(glu(), caller=caller)
    arguments = inputs()
    expected = float64(model(*arguments))
    replacement = replace_moe_layers(model)
    assert error(mx.compile(model)(*arguments), expected) < 1e-5
    assert only(replacement)["fallbacks"] == {"tracing": 1}
    assert error(model(*arguments), expected) < 1e-5


def test_vmap_falls_back_cleanly() -> None:
    """On experts of other code: mlx-lm's own cannot be vmapped."""
    model = block(GatedExperts(WIDTH, HIDDEN, EXPERTS, TanhGLU()), caller=Block)
    x, ids, scores = inputs()
    expected = float64(model(x, ids, scores))
    replacement = replace_moe_layers(model)
    found = mx.vmap(lambda x: model(x, ids, scores))(mx.stack([x, x]))
    assert error(found[1], expected) < 1e-5
    assert only(replacement)["fallbacks"] == {"tracing": 1}


def test_a_fallback_is_logged_once(caplog) -> None:
    model = nn.Module()
    model.blocks = [block(glu()), block(glu())]
    replace_moe_layers(model)
    model.train()
    with caplog.at_level(logging.WARNING, "mlx_moe"):
        for part in (*model.blocks, *model.blocks):
            part(*inputs())
    assert len(caplog.records) == 1 and "training" in caplog.text


def test_threads_share_a_model() -> None:
    model = block(glu(), "affine-4")
    work = [inputs(tokens) for tokens in (1, 7, 33, 64)]
    expected = [float64(model(*arguments)) for arguments in work]
    replacement = replace_moe_layers(model)
    errors = in_threads(lambda i: error(model(*work[i]), expected[i]), len(work))
    assert max(errors) < 1e-5
    assert only(replacement)["calls"] == only(replacement)["kernel_calls"] == len(errors)


def test_a_deep_copy_is_a_replaced_model_of_its_own() -> None:
    model = block(glu())
    arguments = inputs()
    replacement = replace_moe_layers(model)
    other = copy.deepcopy(model)
    other.experts.down_proj.weight *= 2
    assert error(other(*arguments), 2 * float64(model(*arguments))) < 1e-5
    assert only(replacement)["calls"] == 1


@pytest.mark.parametrize("replace", [replace_moe_layers, replace_linear_layers])
def test_a_replaced_model_is_not_pickled(replace) -> None:
    model = nn.Module()
    model.block, model.linear = block(glu(), caller=Block), nn.Linear(WIDTH, WIDTH)
    arguments = inputs()
    replacement = replace(model)
    with pytest.raises(InvalidArgument, match="cannot be pickled: first call restore_moe_layers"):
        pickle.dumps(model)
    replacement.restore()
    again = pickle.loads(pickle.dumps(model))
    assert mx.array_equal(again.block(*arguments), model.block(*arguments))
