"""Every family, with every routed and shared expert on static programs, against the kernels."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from families import FAMILIES, build
from mlx.utils import tree_flatten
from static_models import groups_of, host, plan_of
from switch_reference import error, float64

from mlx_moe import calibrate, replace_moe_layers
from mlx_moe.facts import layer_facts

TOKENS = (mx.arange(2 * 24) * 37 + 5).reshape(2, 24) % 128
TIERS = (32, 64)


def all_hot(model: nn.Module, directory, **options):
    """Every expert of every layer, and the shared ones, on the host executor."""
    groups, shared = {}, {}
    for i, facts in enumerate(layer_facts(model)):
        members = [range(0, facts.experts, 2), range(1, facts.experts, 2)]
        groups[facts.name] = groups_of(f"l{i}", members, (64, 32), facts.inner, spill_limit=0)
        if facts.shared is not None:
            shared[facts.name] = groups_of(f"s{i}", [[0]], (32,), facts.shared.inner, spill_limit=0)
    plan = plan_of(model, groups, shared=shared, tiers=TIERS)
    return host(model, plan, directory, **options)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_logits(tmp_path, family) -> None:
    model = build(family)
    cold = replace_moe_layers(model)
    want = float64(model(TOKENS))
    cold.restore()
    replacement = all_hot(model, tmp_path)
    got = model(TOKENS)
    # Weights in f16 of an f32 model: where two experts are close, a router chooses the other.
    each = np.linalg.norm(float64(got) - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert np.mean(each < 1e-2) > 0.9
    stats = [s["static"] for s in replacement.stats().values()]
    assert len(stats) >= family.layers
    assert all(s["hot"] > 0 and s["forwards"] == 1 for s in stats)
    assert sum(s["cold"] + s["spilled"] + s["recomputed_tiles"] for s in stats) == 0


SHARED = ("qwen2_moe", "deepseek_v3", "glm4_moe", "hunyuan", "ernie4_5_moe")


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in SHARED], ids=str)
def test_shared_experts_are_a_group_of_their_own(tmp_path, family) -> None:
    model = build(family)
    facts = [f for f in layer_facts(model) if f.shared is not None]
    assert facts
    modules = dict(model.named_modules())
    classes = {f.shared.name: type(modules[f.shared.name]) for f in facts}
    x = mx.random.normal((1, 70, facts[0].hidden))
    wants = {name: float64(modules[name](x)) for name in classes}
    replacement = all_hot(model, tmp_path)
    for name, want in wants.items():
        got = modules[name](x)
        assert error(got, want) < 2e-3
        counts = replacement.stats()[name]["static"]
        assert (counts["hot"], counts["spilled"], counts["dispatches"]) == (70, 0, 3)
        assert counts["padding"] == 3 * 32 - 70
    assert [r.kind for r in replacement.layers].count("shared") == len(facts)
    replacement.restore()
    assert {name: type(modules[name]) for name in classes} == classes
    assert all(float64(modules[n](x)).tobytes() == w.tobytes() for n, w in wants.items())


def test_gradients_and_modes_of_a_shared_expert(tmp_path) -> None:
    family = next(f for f in FAMILIES if f.name == "qwen2_moe")
    model = build(family)
    module = model.model.layers[0].mlp.shared_expert
    x = mx.random.normal((1, 40, 64))

    def loss(weights: mx.array, x: mx.array) -> mx.array:
        module.update({"up_proj": {"weight": weights}})
        return mx.square(module(x)).sum()

    weights = module.up_proj.weight
    wanted = mx.grad(loss, (0, 1))(weights, x)
    replacement = all_hot(model, tmp_path)
    found = mx.grad(loss, (0, 1))(weights, x)
    counts = replacement.stats()["model.layers.0.mlp.shared_expert"]
    assert counts["static"]["forwards"] == 1
    assert all(error(f, float64(w)) < 2e-3 for f, w in zip(found, wanted, strict=True))
    module.update({"up_proj": {"weight": weights}})
    want = float64(module(x))
    module.train()
    module(x)
    module.eval()
    assert error(mx.compile(lambda x: module(x))(x), want) < 2e-3
    fallbacks = replacement.stats()["model.layers.0.mlp.shared_expert"]["fallbacks"]
    assert fallbacks == {"training": 1, "tracing": 1}
    module.up_proj.weight = 2 * weights
    twice = float64(nn.silu(x @ module.gate_proj.weight.T) * (x @ (2 * weights).T))
    twice = twice @ float64(module.down_proj.weight).T
    assert error(module(x), twice) < 1e-4
    assert replacement.stats()["model.layers.0.mlp.shared_expert"]["static"]["stale"] == 1
    assert np.isfinite([float(a.sum()) for _, a in tree_flatten(model.parameters())]).all()


def test_a_later_call_takes_the_plan_from_shared_experts_too(tmp_path) -> None:
    model = build(next(f for f in FAMILIES if f.name == "qwen2_moe"))
    classes = {name: type(module) for name, module in model.named_modules()}
    all_hot(model, tmp_path)
    replacement = replace_moe_layers(model)
    model(TOKENS)
    assert not any("static" in stats for stats in replacement.stats().values())
    all_hot(model, tmp_path)
    replace_moe_layers(model, backend="stock")
    assert {name: type(module) for name, module in model.named_modules()} == classes


def test_calibrating_counts_the_model_and_not_its_plan(tmp_path) -> None:
    model = build(next(f for f in FAMILIES if f.name == "qwen2_moe"))
    tokens = TOKENS[0].tolist()
    want = calibrate(model, tokens, chunk=24)
    replacement = all_hot(model, tmp_path)
    found = calibrate(model, tokens, chunk=24)
    assert sum(s["static"]["forwards"] for s in replacement.stats().values()) == 0
    assert np.array_equal(found.loads(1), want.loads(1))
    model(TOKENS)
    assert all(s["static"]["forwards"] == 1 for s in replacement.stats().values())
