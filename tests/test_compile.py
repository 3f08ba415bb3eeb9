"""Compiled plans: what artifacts hold."""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from artifacts import group, plan
from compiled import INNER, LAYERS, WIDTH, blob
from families import FAMILIES, build

pytest.importorskip("coremltools")

from mil_interpreter import MilProgram

from mlx_moe import compile_worker, errors
from mlx_moe.compile import compile_plan
from mlx_moe.experts_weights import expert_weights
from mlx_moe.facts import layer_facts
from mlx_moe.identity import identity_of_model
from mlx_moe.manifest import Manifest
from mlx_moe.package_form import functions
from mlx_moe.plan import Plan


def test_artifacts_are_the_plans_groups(compiled: Manifest, tiny_plan: Plan) -> None:
    assert sorted(p.name for p in compiled.directory.iterdir()) == [
        *("l0.g0.mlpackage", "l0.g1.mlpackage", "l1.g0.p0.mlpackage", "l1.g0.p1.mlpackage"),
        "manifest.json",
    ]
    assert Manifest.load(compiled.directory) == compiled
    compiled.verify(deep=True)
    compiled.check_plan(tiny_plan)
    for layer, planned in tiny_plan.groups():
        entry = compiled.package(planned.id)
        assert (entry.layer, entry.experts, entry.split) == (
            layer.name,
            planned.experts,
            planned.split,
        )
        assert (entry.hidden, entry.inner) == (WIDTH, planned.split[1] - planned.split[0])
        assert (entry.kind, entry.activation, entry.tier) == ("glu", "swiglu", planned.tier)
        program = MilProgram(compiled.directory / entry.path)
        assert program.functions == sorted(f.defined for f in entry.functions.values())
        assert list(entry.functions) == [c for c in (32, 64) if c <= planned.tier]


def test_offsets_in_the_manifest_are_the_weights_bit_for_bit(
    compiled: Manifest, tiny_model: nn.Module
) -> None:
    modules = dict(tiny_model.named_modules())
    for entry in compiled.packages:
        data = blob(compiled, entry.id).read_bytes()
        for tensors in entry.tensors:
            weights = expert_weights(
                modules[entry.layer], "glu", tensors.expert, entry.split, entry.layer
            )
            for key, array in weights.arrays().items():
                tensor = getattr(tensors, key)
                assert tensor.shape == array.shape and tensor.dtype == "fp16"
                assert data[tensor.offset :][: array.nbytes] == array.tobytes()


def test_programs_compute_the_models_experts(compiled: Manifest, tiny_model: nn.Module) -> None:
    x = mx.random.normal((32, WIDTH)).astype(mx.float16)
    columns = np.ascontiguousarray(np.array(x).T)[None, :, None]
    for name, ids in ((LAYERS[0], ["l0.g0"]), (LAYERS[1], ["l1.g0.p0", "l1.g0.p1"])):
        experts = compiled.package(ids[0]).experts
        tile = np.concatenate([columns] * len(experts), axis=-1)
        found: Any = 0
        for id in ids:
            program = MilProgram(compiled.package_path(id))
            found = found + program("c32", x=tile)["y"].astype(np.float32)
        module = dict(tiny_model.named_modules())[name]
        for g, expert in enumerate(experts):
            w = expert_weights(module, "glu", expert, (0, INNER), name, "float32")
            gate, up = (np.array(x, np.float64) @ m.T for m in (w.gate, w.up))
            expected = (gate / (1 + np.exp(-gate)) * up) @ w.down.T
            mine = found[0, :, 0, 32 * g : 32 * (g + 1)].T
            assert np.linalg.norm(mine - expected) <= 1e-3 * np.linalg.norm(expected)


def test_a_model_in_memory_compiles_to_the_same(
    compiled: Manifest, tiny_plan: Plan, tiny_model: nn.Module, tmp_path: Path
) -> None:
    layers = [layer for layer in tiny_plan.layers if layer.name != LAYERS[0]]
    part = Plan(**{**vars(tiny_plan), "identity": identity_of_model(tiny_model), "layers": layers})
    found = compile_plan(tiny_model, part, tmp_path / "o", workers=1, progress=False)
    for id in ("l1.g0.p0", "l1.g0.p1"):
        assert blob(found, id).read_bytes() == blob(compiled, id).read_bytes()


def test_two_matrices_biases_and_a_shared_expert(tmp_path: Path) -> None:
    for family in (f for f in FAMILIES if f.name in ("phixtral", "qwen2_moe")):
        made = build(family)
        facts = next(f for f in layer_facts(made) if f.kind == "mlp" or f.shared)
        whole, beside = [group("routed", [3, 1], 32, (0, facts.inner))], {}
        if facts.shared is not None:
            beside = {facts.name: [group("shared", [0], 64, (0, facts.shared.inner))]}
        planned = plan(made, {facts.name: whole}, shared=beside)
        found = compile_plan(made, planned, tmp_path / family.name, workers=1, progress=False)
        routed = found.package("routed")
        assert (routed.kind, routed.layer) == (facts.kind, facts.name)
        assert all((t.gate is None) == (facts.kind == "mlp") for t in routed.tensors)
        assert all((t.up_bias is None) != facts.biases for t in routed.tensors)
        modules = dict(made.named_modules())
        x = mx.random.normal((32, facts.hidden)).astype(mx.float16)
        tile = np.concatenate([np.array(x).T] * 2, axis=1)[None, :, None]
        y = MilProgram(found.package_path("routed"))("c32", x=tile)["y"][0, :, 0].T
        ids = mx.broadcast_to(mx.array([3, 1], mx.uint32), (32, 2))
        stock = modules[facts.name](x.astype(mx.float32), ids)
        check(y, np.concatenate([stock[:, 0], stock[:, 1]]))
        if facts.shared is not None:
            shared = found.package("shared")
            assert (shared.layer, shared.experts) == (facts.shared.name, (0,))
            assert list(shared.functions) == [32, 64]
            y = MilProgram(found.package_path("shared"))("c32", x=tile[..., :32])["y"][0, :, 0].T
            check(y, np.array(modules[shared.layer](x.astype(mx.float32))))


def check(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.linalg.norm(found - expected) <= 1e-3 * np.linalg.norm(expected)


def test_int8_is_scaled_by_channel(
    tiny_plan: Plan, tiny_model_path: Path, tiny_model: nn.Module, tmp_path: Path
) -> None:
    layers = tuple(layer for layer in tiny_plan.layers if layer.name != LAYERS[1])
    part = Plan(**{**vars(tiny_plan), "layers": layers})
    found = compile_plan(
        tiny_model_path, part, tmp_path / "o", weights="int8", workers=1, progress=False
    )
    assert found.weights == "int8"
    data = blob(found, "l0.g1").read_bytes()
    (tensors,) = found.package("l0.g1").tensors
    module = dict(tiny_model.named_modules())[LAYERS[0]]
    weights = expert_weights(module, "glu", 9, (0, INNER), "")
    for key, array in weights.arrays().items():
        tensor = getattr(tensors, key)
        values = np.frombuffer(data, np.int8, array.size, tensor.offset).reshape(array.shape)
        scales = np.frombuffer(data, np.float16, array.shape[0], tensor.scale_offset)[:, None]
        assert np.abs(values * scales.astype(np.float32) - array).max() <= 0.51 * scales.max()


def test_written_values_are_compared_bit_for_bit(
    compiled: Manifest, tiny_model: nn.Module, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(compiled.package_path("l0.g1"), tmp_path / "p.mlpackage"))
    module = dict(tiny_model.named_modules())[LAYERS[0]]
    weights = expert_weights(module, "glu", 9, (0, INNER), "")
    stored = [compile_worker.StoredExpert.of(weights, "fp16")]
    compile_worker.read_back(path, stored, [9], functions([32, 64], 15))
    stored[0].matrices["down"].values[-1, -1] += np.float16(1)
    with pytest.raises(errors.CorruptArtifact, match="does not hold what was written"):
        compile_worker.read_back(path, stored, [9], functions([32, 64], 15))
