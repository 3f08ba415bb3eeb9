"""Plans and artifacts that do not fit are refused before anything is changed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import FAMILIES, build
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.tuner.lora import LoRASwitchLinear
from static_layer import ALL, HALF, hot, static, weighted
from static_models import BLOB, groups_of, plan_of, write_artifacts
from switch_reference import HIDDEN, Block, block, error, glu, inputs, mlp

from mlx_moe import (
    InvalidArgument,
    MoEError,
    UnsupportedLayer,
    load,
    replace_moe_layers,
    restore_moe_layers,
)
from mlx_moe.devices import load_device
from mlx_moe.errors import CorruptArtifact, CorruptFile, IdentityMismatch
from mlx_moe.facts import layer_facts
from mlx_moe.manifest import Manifest
from mlx_moe.plan import Plan

GROUPS = groups_of("e", ALL, (64, 32, 64), HIDDEN)


def made(directory: Path, model: nn.Module | None = None) -> tuple[nn.Module, Path, Path]:
    """A model, the file of its plan, and the directory of its artifacts."""
    model = model or block(glu())
    plan = plan_of(model, {"experts": GROUPS})
    plan.save(directory / "plan.json")
    return model, directory / "plan.json", write_artifacts(model, plan, directory / "artifacts")


def refused(model: nn.Module, error: type[MoEError], message: str, *args, **options) -> None:
    """Replacing raises, and leaves every module and array as it was."""
    modules = {name: type(m) for name, m in model.named_modules()}
    arrays = dict(tree_flatten(model.parameters()))
    with pytest.raises(error, match=message):
        replace_moe_layers(model, *args, **options)
    assert {name: type(m) for name, m in model.named_modules()} == modules
    assert all(a is arrays[key] for key, a in tree_flatten(model.parameters()))
    assert not any("_moe_layer" in m.__dict__ for m in model.modules())


def test_from_files(tmp_path) -> None:
    model, plan, artifacts = made(tmp_path)
    x, ids, scores = inputs(40)
    want = weighted(model, x, ids, scores)
    replacement = replace_moe_layers(model, plan, artifacts=artifacts, backend="host")
    assert error(model(x, ids, scores), want) < HALF
    assert static(replacement)["hot"] == 80
    (row,) = replacement.layers
    assert (row.backend, row.residency) == ("host", "8 of 8 experts hot")
    assert str(replacement).splitlines()[-1].endswith("host  8 of 8 experts hot")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "host"}, "give plan and artifacts"),
        ({"artifacts": "a"}, "artifacts go with the plan"),
        ({"plan": "p", "backend": "stock"}, "backend='stock' uses no plan"),
        ({"plan": 3}, "plan is a int; expected a Plan"),
        ({"plan": "/no/plan.json"}, "there is no plan"),
        ({"importance": "luck"}, "importance is 'luck'; expected one of router, norm"),
        ({"overflow": "drop"}, "overflow is 'drop'; expected one of spill, prune"),
    ],
)
def test_arguments(options, message: str) -> None:
    refused(block(glu()), InvalidArgument, message, **options)


def test_the_host_needs_artifacts(tmp_path) -> None:
    model, plan, _ = made(tmp_path)
    refused(model, InvalidArgument, "needs its artifacts", plan, backend="host")


def test_another_models_plan(tmp_path) -> None:
    _, plan, artifacts = made(tmp_path)
    options = {"plan": plan, "artifacts": artifacts, "backend": "host"}
    mx.random.seed(7)
    refused(block(glu()), IdentityMismatch, r"plan\.json was made from the model", **options)
    refused(block(mlp()), IdentityMismatch, r"plan\.json was made from the model", **options)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"experts": 9}, r"^experts: experts is 8, and .* 9"),
        ({"kind": "mlp"}, r"^experts: kind is 'glu'"),
        ({"inner": 64}, r"^experts: inner is 128"),
        ({"activation": "GELU"}, r"^experts: activation is 'SwiGLU'"),
        ({"biases": True}, r"^experts: biases is False"),
        ({"name": "other"}, r"1 layers and the model 1; experts is only in the model"),
    ],
)
def test_facts_that_are_not_the_models(tmp_path, facts, message: str) -> None:
    model, path, artifacts = made(tmp_path)
    plan = Plan.load(path)
    layer = plan.layers[0]
    plan = replace(plan, layers=(replace(layer, facts=replace(layer.facts, **facts)),))
    refused(model, InvalidArgument, message, plan, artifacts=artifacts, backend="host")


def test_artifacts_of_another_plan(tmp_path) -> None:
    model, path, artifacts = made(tmp_path)
    other = replace(Plan.load(path), chunk=64)
    refused(model, InvalidArgument, "another plan", other, artifacts=artifacts, backend="host")


def damaged_manifest(artifacts: Path, change) -> None:
    path = artifacts / "manifest.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "manifest.json").unlink(), "no manifest.json"),
        (lambda d: (d / "manifest.json").write_text("{"), "not JSON"),
        (lambda d: (d / "e.g1.p0.mlpackage" / BLOB).unlink(), "missing"),
        (lambda d: (d / "e.g1.p0.mlpackage" / BLOB).write_bytes(b"short"), "has 5 bytes"),
        (lambda d: damaged_manifest(d, lambda v: v["packages"].pop()), "no package for.*e.g2.p0"),
        (
            lambda d: damaged_manifest(
                d, lambda v: v["packages"][0]["tensors"][0]["up"].update(offset=1 << 40)
            ),
            "past its blob",
        ),
        (
            lambda d: damaged_manifest(
                d, lambda v: v["packages"][0]["tensors"][0]["up"].update(offset=65)
            ),
            "at offset 65",
        ),
        (
            lambda d: damaged_manifest(d, lambda v: v["packages"][0].update(activation="reglu")),
            "has the activation reglu",
        ),
        (
            lambda d: damaged_manifest(d, lambda v: v["packages"][0]["functions"].pop("32")),
            "compile again",
        ),
        (
            lambda d: damaged_manifest(d, lambda v: v["packages"][0].update(layer="other")),
            "compile again",
        ),
    ],
)
def test_damaged_artifacts(tmp_path, damage, message: str) -> None:
    model, plan, artifacts = made(tmp_path)
    damage(artifacts)
    refused(model, CorruptArtifact, message, plan, artifacts=artifacts, backend="host")


def test_a_damaged_plan(tmp_path) -> None:
    model, plan, artifacts = made(tmp_path)
    plan.write_text(plan.read_text()[:-20])
    refused(model, CorruptFile, "not JSON", plan, artifacts=artifacts, backend="host")


def test_importance_that_cannot_be_known(tmp_path) -> None:
    model, plan, artifacts = made(tmp_path, block(glu(), caller=Block))
    options = {"artifacts": artifacts, "backend": "host", "overflow": "prune"}
    refused(
        model,
        UnsupportedLayer,
        "^experts: .*importance='router'.*switch_reference",
        plan,
        **options,
    )
    replacement = replace_moe_layers(model, plan, importance="norm", **options)
    model(*inputs(40))
    assert static(replacement)["forwards"] == 1


def test_adapters_are_refused(tmp_path) -> None:
    model, plan, artifacts = made(tmp_path)
    model.experts.up_proj = LoRASwitchLinear.from_base(model.experts.up_proj)
    options = {"artifacts": artifacts, "backend": "host"}
    refused(model, UnsupportedLayer, "^experts.up_proj is a LoRASwitchLinear", plan, **options)


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_without_an_executor_all_is_cold_and_said_so(tmp_path, backend: str, caplog) -> None:
    caplog.set_level("INFO", "mlx_moe")
    model, plan, artifacts = made(tmp_path)
    x, ids, scores = inputs(40)
    replacement = replace_moe_layers(model, plan, artifacts=artifacts, backend=backend)
    assert error(model(x, ids, scores), weighted(model, x, ids, scores)) < 1e-5
    assert "static" not in replacement.stats()["experts"]
    assert "all experts stay on the cold path; backend coreml" in caplog.text
    assert replacement.note is not None and replacement.note in str(replacement)
    assert replacement.layers[0].residency == "8 of 8 experts hot in the plan, none here"


def test_a_plan_without_a_static_path_needs_no_artifacts(tmp_path) -> None:
    model, path, _ = made(tmp_path)
    plan = Plan.load(path)
    layers = tuple(
        replace(layer, tiers=(), groups=(), static_from=None, reason="nothing to gain")
        for layer in plan.layers
    )
    x, ids, scores = inputs(40)
    replacement = replace_moe_layers(model, replace(plan, layers=layers), backend="host")
    assert error(model(x, ids, scores), weighted(model, x, ids, scores)) < 1e-5
    assert "static" not in replacement.stats()["experts"]
    assert "static path on no layer (nothing to gain)" in str(replacement.note)


def test_a_plan_can_come_later_and_go(tmp_path) -> None:
    model, plan, artifacts = made(tmp_path)
    replace_moe_layers(model)
    replacement = replace_moe_layers(model, plan, artifacts=artifacts, backend="host")
    model(*inputs(40))
    assert static(replacement)["forwards"] == 1
    for later in (plan, None):
        again = replace_moe_layers(model, later)
        model(*inputs(40))
        assert "static" not in again.stats()["experts"]
        replacement = replace_moe_layers(model, plan, artifacts=artifacts, backend="host")
        model(*inputs(40))
        assert static(replacement)["forwards"] == 1
    restore_moe_layers(model)
    assert type(model.experts) is SwitchGLU


def test_packed_experts_of_a_cpu_plan(tmp_path) -> None:
    model = block(glu(), "affine-4")
    plan = plan_of(model, {})
    layer = replace(plan.layers[0], packed=(1, 5), static_from=8, reason=None)
    plan = replace(plan, executor="cpu", device=load_device("cpu"), layers=(layer,))
    refused(
        model, InvalidArgument, "for the CPU kernels alone", plan, backend="host", artifacts="a"
    )
    replacement = replace_moe_layers(model, plan)
    for tokens in (7, 60):
        x, ids, scores = inputs(tokens, mx.bfloat16)
        assert error(model(x, ids, scores), weighted(model, x, ids, scores)) < 6e-3
    assert "in place" in str(replacement) or "2 of 8 experts packed" in str(replacement)
    assert len(model.experts._moe_layer.packed.copies) == 3


def test_load_compares_the_files_too(tmp_path, tiny_model_path) -> None:
    from mlx_moe.identity import identity_of_model

    model, _ = load(tiny_model_path, backend="stock")
    groups = {"model.layers.0.mlp.switch_mlp": groups_of("a", [range(32)], [32], 64)}
    identity = identity_of_model(model, tiny_model_path)
    plan = plan_of(model, groups, identity=identity, tiers=(32,))
    artifacts = write_artifacts(model, plan, tmp_path / "artifacts")
    options = {"plan": plan, "artifacts": artifacts, "backend": "host"}
    model, _ = load(tiny_model_path, **options)
    assert model.model.layers[0].mlp.switch_mlp._moe_layer.static is not None
    other = tmp_path / "other"
    shutil.copytree(tiny_model_path, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    with pytest.raises(IdentityMismatch, match="config.json differ"):
        load(other, **options)
    assert Manifest.load(artifacts).plan_sha256 == plan.sha256


SWITCHED = [f for f in FAMILIES if f.name in ("gpt_oss", "qwen2_moe", "nemotron_h")]


@pytest.mark.parametrize("family", SWITCHED, ids=str)
def test_pruning_by_scores_is_for_families_that_show_them(tmp_path, family) -> None:
    model = build(family)
    facts = layer_facts(model)
    groups = {f.name: groups_of(f"l{i}", [range(8)], [32], f.inner) for i, f in enumerate(facts)}
    plan = plan_of(model, groups, tiers=(32,))
    write_artifacts(model, plan, tmp_path)
    options = {"artifacts": tmp_path, "backend": "host", "overflow": "prune"}
    if family.name == "gpt_oss":
        refused(model, UnsupportedLayer, "family 'gpt_oss' does not hand", plan, **options)
    else:
        replace_moe_layers(model, plan, **options)


def test_hot_is_the_helper_of_these_tests(tmp_path) -> None:
    """The shape of a hand-made plan is one that `Plan.load` takes."""
    model = block(glu())
    hot(model, tmp_path, ALL)
    plan = plan_of(block(glu()), {"experts": GROUPS})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
