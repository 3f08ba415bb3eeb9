"""The cold path in MLX's operations, on the CPU device: values, bits, and nothing but MLX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.activations import SwigluOAI
from static_layer import ALL, HALF, hot, routed, routing, static, weighted
from static_models import groups_of, host, plan_of
from switch_reference import (
    Block,
    FamilyBlock,
    block,
    calls_since,
    error,
    float64,
    glu,
    inputs,
    mlp,
    only,
)

from mlx_moe import cold_ops, core, custom, layers

KERNELS = {"swiglu", "swiglu_combine", "grouped"}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_ops, "on_gpu", lambda: True)


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for every time that values are asked for."""
    seen: list[int] = []

    def counted(*arrays: mx.array) -> None:
        seen.append(len(arrays))
        custom_evaluate(*arrays)

    custom_evaluate = custom.evaluate
    for module in (custom, layers, cold_ops):
        monkeypatch.setattr(module, "evaluate", counted)
    return seen


def kernel_calls(before: dict[str, int]) -> dict[str, int]:
    return {name: n for name, n in calls_since(before).items() if name in KERNELS}


def copied(model: nn.Module, layer: nn.Module, weights: str, caller: type[Block]) -> Block:
    stock = block(layer, weights, caller)
    stock.update(model.parameters())
    return stock


@pytest.mark.parametrize("caller", [Block, FamilyBlock])
@pytest.mark.parametrize("tokens", [1, 3, 33, 90])
def test_some_hot_some_cold(tmp_path, caller, tokens: int) -> None:
    model = block(glu(), caller=caller)
    x, ids, scores = inputs(tokens)
    want = weighted(model, x, ids, scores)
    replacement = hot(model, tmp_path)
    before = core.calls()
    assert error(model(x, ids, scores), want) < HALF
    counts = static(replacement)
    assert counts["forwards"] == 1 and routed(counts) == 2 * tokens
    assert tokens < 33 or 0 < counts["cold"] < counts["hot"]
    assert not kernel_calls(before) and not only(replacement)["kernel_calls"]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("weights", ["float32", "affine-4", "mxfp4"])
def test_formats_and_dtypes_as_the_kernels(tmp_path, weights: str, dtype: mx.Dtype) -> None:
    model = block(glu(), weights)
    if weights == "affine-4" and dtype != mx.float32:
        model.set_dtype(dtype)  # scales too, so that results are half
    x, ids, scores = inputs(40, dtype)
    want = weighted(model, x, ids, scores)
    limit = max(HALF, 1.1 * error(model(x, ids, scores), want))  # no worse than stock itself
    replacement = hot(model, tmp_path)
    found, plain = model(x, ids, scores), mx.array(model.experts(x, ids))
    assert static(replacement)["cold"] > 0
    model.experts._moe_layer.static.ops = False
    kernels, kernels_plain = model(x, ids, scores), mx.array(model.experts(x, ids))
    assert (found.dtype, plain.dtype) == (kernels.dtype, kernels_plain.dtype)
    assert error(found, want) < limit and error(found, float64(kernels)) < 1.5 * limit
    assert error(plain, float64(kernels_plain)) < 1.5 * limit


@pytest.mark.parametrize(
    "layer",
    [
        lambda: glu(bias=True),
        lambda: glu(activation=SwigluOAI(), bias=True),
        lambda: mlp(),
        lambda: mlp(bias=True, activation=nn.ReLU2()),
    ],
    ids=["bias", "swiglu_oai", "gelu", "relu2"],
)
@pytest.mark.parametrize("caller", [Block, FamilyBlock])
def test_other_layers(tmp_path, layer: Callable[[], Any], caller) -> None:
    model = block(layer(), caller=caller)
    x, ids, scores = inputs(160)
    want = float64(model(x, ids, scores))
    replacement = hot(model, tmp_path, tiers=(32,))  # with overflow, which is cold too
    before = core.calls()
    assert error(model(x, ids, scores), want) < HALF
    counts = static(replacement)
    assert counts["cold"] and counts["spilled"] and not kernel_calls(before)


@pytest.mark.parametrize("weights", ["float32", "affine-4"])
@pytest.mark.parametrize("caller", [Block, FamilyBlock])
@pytest.mark.parametrize("tokens", [2, 40])
def test_all_cold_is_stocks_own_call(tmp_path, caller, weights: str, tokens: int) -> None:
    dtype = mx.float32 if weights == "float32" else mx.bfloat16  # whose sums show their order
    model = block(glu(), weights, caller)
    model.set_dtype(dtype)
    x, _, scores = inputs(tokens, dtype)
    ids = mx.array([[[2, 7], [4, 2]] * (tokens // 2)])  # SOME leaves 2, 4 and 7 cold
    stock = copied(model, glu(), weights, caller)
    replacement = hot(model, tmp_path)
    assert mx.array_equal(model(x, ids, scores), stock(x, ids, scores))
    assert mx.array_equal(mx.array(model.experts(x, ids)), stock.experts(x, ids))
    counts = static(replacement)
    assert (counts["cold"], counts["hot"], counts["waits"]) == (4 * tokens, 0, 0)


@pytest.mark.parametrize("caller", [Block, FamilyBlock])
def test_decoding_is_one_lazy_graph(tmp_path, caller, evaluations: list[int]) -> None:
    model = block(glu(), caller=caller)
    stock = copied(model, glu(), "float32", caller)
    replacement = hot(model, tmp_path, static_from=32)
    evaluations.clear()
    x, ids, scores = inputs(5)
    # Nothing has a value yet: reading one would evaluate it.
    lazy = (x + 0.5, ids + 0, scores * 2)
    found, want = model(*lazy), stock(*lazy)
    assert not evaluations and not isinstance(model.experts(*lazy[:2]), layers.Deferred)
    assert mx.array_equal(found, want)
    assert static(replacement)["forwards"] == 0 == only(replacement)["kernel_calls"]
    model(*inputs(32))
    assert evaluations and static(replacement)["forwards"] == 1


def test_the_cold_path_is_submitted_before_the_wait(tmp_path, monkeypatch) -> None:
    events: list[str] = []

    class Watching:
        def submit(self, tiles: list[Any]) -> Any:
            events.append("submit")
            self.submitted = real.submit(tiles)
            return self

        def wait(self) -> list[str]:
            events.append("wait")
            return self.submitted.wait()

    model = block(glu())
    hot(model, tmp_path)
    layer = model.experts._moe_layer.static.layer
    real, layer.executor = layer.executor, Watching()
    begin = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *a: (events.append("cold"), begin(*a))[1])
    model(*inputs(40))
    assert events == ["submit", "cold", "wait"]


def test_tiles_that_fail_are_computed_in_ops(tmp_path) -> None:
    class Failing:
        def submit(self, tiles: list[Any]) -> Any:
            return self

        def wait(self) -> list[str]:
            return ["device lost", ""]

    model = block(glu())
    x, ids, scores = routing([0, 0, 0, 20, 10, 0, 0, 0], 30)
    want = weighted(model, x, ids, scores)
    replacement = hot(model, tmp_path, [[3]], (32,), splits=(64,))
    model.experts._moe_layer.static.layer.executor = Failing()
    before = core.calls()
    assert error(model(x, ids, scores), want) < 1e-5
    assert static(replacement)["failed_tiles"] == 1 and not kernel_calls(before)


def test_pruning(tmp_path) -> None:
    model = block(glu())
    x, ids, scores = routing([60, 0, 20, 0, 0, 0, 0, 0], 80)
    values = np.array(scores)[0, :, 0]
    first = np.flatnonzero(np.array(ids).reshape(-1) == 0)
    kept = np.zeros(80, bool)
    kept[first[np.argsort(-values[first], kind="stable")[:32]]] = True
    kept |= np.array(ids).reshape(-1) == 2
    want = weighted(model, x, ids, scores) * kept[None, :, None]
    replacement = hot(model, tmp_path, [[0]], (32,), overflow="prune")
    assert error(model(x, ids, scores), want) < HALF
    counts = static(replacement)
    assert (counts["hot"], counts["pruned"], counts["cold"]) == (32, 28, 20)


def test_changed_weights_are_stocks_own_call(tmp_path) -> None:
    model = block(glu())
    x, ids, scores = inputs(40)
    replacement = hot(model, tmp_path)
    model.experts.up_proj.weight[2] = 0.25
    stock = copied(model, glu(), "float32", FamilyBlock)
    for _ in range(2):
        assert mx.array_equal(model(x, ids, scores), stock(x, ids, scores))
    assert static(replacement)["stale"] == 1


def test_gradients_tracing_and_training_are_stocks(tmp_path) -> None:
    model = block(glu())
    stock = copied(model, glu(), "float32", FamilyBlock)
    x, ids, scores = inputs(40)

    def loss(which: nn.Module) -> Callable[[mx.array, mx.array], mx.array]:
        def of(weight: mx.array, x: mx.array) -> mx.array:
            which.update({"experts": {"up_proj": {"weight": weight}}})
            return mx.square(which(x, ids, scores)).sum()

        return of

    weight = stock.experts.up_proj.weight
    replacement = hot(model, tmp_path)
    found = mx.grad(loss(model), (0, 1))(weight, x)
    for a, b in zip(found, mx.grad(loss(stock), (0, 1))(weight, x), strict=True):
        assert error(a, float64(b)) < HALF
    assert static(replacement)["forwards"] == 1
    want = stock(x, ids, scores)
    assert error(mx.compile(lambda x: model(x, ids, scores))(x), float64(want)) < 1e-6
    model.train()
    assert mx.array_equal(model(x, ids, scores), want)
    assert static(replacement)["forwards"] == 1


def test_layers_without_a_static_path_are_stocks_own(tmp_path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = block(glu()), block(glu())

    model = Two()
    model.eval()
    plan = plan_of(model, {"first.experts": groups_of("e", ALL, (64, 32, 64), 128)})
    replacement = host(model, plan, tmp_path)
    assert [(r.name, r.backend) for r in replacement.layers] == [
        ("first.experts", "host"),
        ("second.experts", "stock"),
    ]
    assert list(replacement.stats()) == ["first.experts"]
    assert "_moe_layer" not in model.second.experts.__dict__


def test_what_watches_a_layer_sees_it_and_its_scores(tmp_path) -> None:
    model = block(glu())
    stock = copied(model, glu(), "float32", FamilyBlock)
    replacement = hot(model, tmp_path, static_from=32)
    seen: list[Any] = []
    layer = model.experts._moe_layer
    layer.observer = lambda module, layer, x, ids, scores: seen.append(scores)
    x, ids, scores = inputs(5)
    assert mx.array_equal(model(x, ids, scores), stock(x, ids, scores))
    assert len(seen) == 1 and seen[0].shape == (1, 5, 2, 1)
    assert only(replacement)["kernel_calls"] == 0


def test_a_whole_model(tiny_model_path, tmp_path) -> None:
    model, _ = mlx_lm.load(str(tiny_model_path))
    model.set_dtype(mx.float32)
    prompt = mx.random.randint(0, 500, (1, 24))
    stock = model(prompt)
    few = model(prompt[:, :4])
    mx.eval(stock, few)
    members = [range(at, at + 8) for at in (0, 8, 16)]  # 24 of 32 experts
    groups = {
        f"model.layers.{i}.mlp.switch_mlp": groups_of(f"l{i}", members, (64, 32, 64), 64)
        for i in range(6)
    }
    replacement = host(model, plan_of(model, groups, static_from=8), tmp_path)
    assert mx.array_equal(model(prompt[:, :4]), few)
    assert error(model(prompt), float64(stock)) < HALF
    for counts in replacement.stats().values():
        assert (counts["calls"], counts["static"]["forwards"], counts["kernel_calls"]) == (2, 1, 0)
        assert counts["static"]["hot"] > counts["static"]["cold"] > 0
