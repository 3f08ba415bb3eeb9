"""A plan and a store together: hot experts on static programs, the others from disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from static_models import groups_of, plan_of, write_artifacts
from stored_models import assert_same

from mlx_moe import InvalidArgument, Replacement, replace_linear_layers, replace_moe_layers
from mlx_moe.errors import ExpertsOnDisk, IdentityMismatch
from mlx_moe.expert_memory import ExpertMemory
from mlx_moe.identity import identity_of_model
from mlx_moe.placeholders import is_placeholder
from mlx_moe.plan import Plan

LAYERS, INNER = 6, 64
TOKENS = (mx.arange(96) * 131 + 7)[None] % 2048


@pytest.fixture(scope="module")
def planned(tiny_model_path: Path, tmp_path_factory: Any) -> tuple[Plan, Path]:
    """16 of 32 experts hot from 8 tokens on, some of them for a few tokens only."""
    model, _ = mlx_lm.load(str(tiny_model_path))
    groups = {
        f"model.layers.{i}.mlp.switch_mlp": groups_of(
            f"l{i}", [range(0, 8), range(8, 16)], (64, 32), INNER
        )
        for i in range(LAYERS)
    }
    plan = plan_of(model, groups, identity=identity_of_model(model, tiny_model_path), static_from=8)
    return plan, write_artifacts(model, plan, tmp_path_factory.mktemp("artifacts"))


def replaced(path: Path, planned: Any, memory: Any, **options: Any) -> tuple[nn.Module, Any]:
    model, _ = mlx_lm.load(str(path), lazy=True)
    how = {"expert_memory": ExpertMemory(memory, counts=False)} if memory else {}
    plan, artifacts = planned
    options = {"artifacts": artifacts, "backend": "host", "checkpoint": path, **options}
    replacement = replace_moe_layers(model, plan, **how, **options)
    replace_linear_layers(model)  # or the test would wait for these
    return model, replacement


def outputs(model: nn.Module) -> list[mx.array]:
    found = [model(TOKENS), model(TOKENS[:, :3])]  # the second starts no program
    mx.eval(found)
    return found


def static_counts(replacement: Replacement) -> list[dict[str, Any]]:
    return [s["static"] for name, s in replacement.stats().items() if name != "store"]


@pytest.mark.parametrize("overflow", ("spill", "prune"))
@pytest.mark.parametrize("limit", ("5%", "100%"))
def test_bits_are_those_of_the_plan_alone(
    overflow: str, limit: str, planned: Any, tiny_model_path: Path
) -> None:
    model, alone = replaced(tiny_model_path, planned, None, overflow=overflow)
    expected = outputs(model)
    model, both = replaced(tiny_model_path, planned, limit, overflow=overflow)
    assert_same(outputs(model), expected)
    assert all(
        is_placeholder(a)
        for a in model.model.layers[0].mlp.switch_mlp.up_proj.values()
        if isinstance(a, mx.array)
    )
    for one, other in zip(static_counts(both), static_counts(alone), strict=True):
        assert one["hot"] == other["hot"] > 0 and one["cold"] == other["cold"] > 0
    assert both.stats()["store"]["bytes_read"] > 0
    assert [row.backend for row in both.layers] == ["host"] * LAYERS


def test_a_plan_after_the_store(planned: Any, tiny_model_path: Path) -> None:
    model, _ = replaced(tiny_model_path, planned, None)
    expected = outputs(model)
    model, _ = mlx_lm.load(str(tiny_model_path), lazy=True)
    memory = ExpertMemory("10%", counts=False)
    replace_moe_layers(model, expert_memory=memory, checkpoint=tiny_model_path)
    plan, artifacts = planned
    how = {"artifacts": artifacts, "backend": "host", "checkpoint": tiny_model_path}
    replacement = replace_moe_layers(model, plan, **how)
    replace_linear_layers(model)
    assert_same(outputs(model), expected)
    assert all(counts["hot"] > 0 for counts in static_counts(replacement))


def test_gradients_are_refused_there_too(planned: Any, tiny_model_path: Path) -> None:
    model, _ = replaced(tiny_model_path, planned, "10%")
    x = mx.random.normal((1, 16, 192)).astype(mx.bfloat16)
    with pytest.raises(ExpertsOnDisk, match="have no gradients"):
        mx.eval(mx.grad(lambda x: model.model.layers[0].mlp(x).sum())(x))


def test_a_plan_of_copies_in_memory_is_refused(planned: Any, tiny_model_path: Path) -> None:
    plan, _ = planned
    layers = tuple(replace(layer, groups=()) for layer in plan.layers)
    cpu = replace(plan, executor="cpu", layers=layers)
    with pytest.raises(InvalidArgument, match="copies of experts in memory"):
        replaced(tiny_model_path, (cpu, None), "10%", backend="cpu")


def test_a_plan_of_another_model_is_refused(planned: Any, tiny_model_path: Path) -> None:
    model, _ = mlx_lm.load(str(tiny_model_path), lazy=True)
    other = model.model.layers[0].mlp.switch_mlp.up_proj
    other.weight = other.weight + 1
    with pytest.raises(IdentityMismatch):
        replace_moe_layers(model, planned[0], artifacts=planned[1], backend="host")
