"""Compiling plans: what artifacts hold, going on after a stop, and whatever can break."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from artifacts import group, plan
from commands import INTERRUPTIBLE
from families import FAMILIES, build

pytest.importorskip("coremltools")

from mil_interpreter import MilProgram

from mlx_moe import compile as compiling
from mlx_moe import compile_worker, errors
from mlx_moe.cli import main
from mlx_moe.compile import compile_plan, estimate_plan
from mlx_moe.experts_weights import ExpertWeights, expert_weights
from mlx_moe.facts import layer_facts
from mlx_moe.identity import identity_of_files, identity_of_model
from mlx_moe.manifest import Manifest
from mlx_moe.plan import Plan

WIDTH, INNER = 192, 64  # of the example model
LAYERS = [f"model.layers.{i}.mlp.switch_mlp" for i in range(2)]


@pytest.fixture(scope="module")
def model(tiny_model_path: Path) -> nn.Module:
    return mlx_lm.load(str(tiny_model_path))[0]


@pytest.fixture(scope="module")
def tiny_plan(model: nn.Module, tiny_model_path: Path) -> Plan:
    """Two groups of two layers: in tiers 32 and 64, and in two parts."""
    groups = {
        LAYERS[0]: [group("l0.g0", [5, 0], 32, (0, INNER)), group("l0.g1", [9], 64, (0, INNER))],
        LAYERS[1]: [
            group("l1.g0.p0", [31, 7], 32, (0, 32), parts=2),
            group("l1.g0.p1", [31, 7], 32, (32, INNER), parts=2),
        ],
    }
    return plan(model, groups, identity=identity_of_files(tiny_model_path))


@pytest.fixture(scope="module")
def compiled(
    tiny_plan: Plan, tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Manifest:
    out = tmp_path_factory.mktemp("compiled") / "artifacts"
    return compile_plan(tiny_model_path, tiny_plan, out, progress=False)


@pytest.fixture
def copied(compiled: Manifest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled.directory, tmp_path / "artifacts"))


def stamps(directory: Path) -> dict[str, int]:
    """When each package was written."""
    return {p.name: (p / "Manifest.json").stat().st_mtime_ns for p in directory.glob("*.mlpackage")}


def blob(manifest: Manifest, id: str) -> Path:
    return manifest.directory / manifest.package(id).path / manifest.package(id).blob


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
        assert program.functions == sorted(entry.functions.values())
        assert list(entry.functions) == [c for c in (32, 64) if c <= planned.tier]


def test_offsets_in_the_manifest_are_the_weights_bit_for_bit(
    compiled: Manifest, model: nn.Module
) -> None:
    modules = dict(model.named_modules())
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


def test_programs_compute_the_models_experts(compiled: Manifest, model: nn.Module) -> None:
    x = mx.random.normal((32, WIDTH)).astype(mx.float16)
    columns = np.ascontiguousarray(np.array(x).T)[None, :, None]
    for name, ids in ((LAYERS[0], ["l0.g0"]), (LAYERS[1], ["l1.g0.p0", "l1.g0.p1"])):
        experts = compiled.package(ids[0]).experts
        tile = np.concatenate([columns] * len(experts), axis=-1)
        found: Any = 0
        for id in ids:
            program = MilProgram(compiled.package_path(id))
            found = found + program("c32", x=tile)["y"].astype(np.float32)
        module = dict(model.named_modules())[name]
        for g, expert in enumerate(experts):
            w = expert_weights(module, "glu", expert, (0, INNER), name, "float32")
            gate, up = (np.array(x, np.float64) @ m.T for m in (w.gate, w.up))
            expected = (gate / (1 + np.exp(-gate)) * up) @ w.down.T
            mine = found[0, :, 0, 32 * g : 32 * (g + 1)].T
            assert np.linalg.norm(mine - expected) <= 1e-3 * np.linalg.norm(expected)


def test_a_model_in_memory_compiles_to_the_same(
    compiled: Manifest, tiny_plan: Plan, model: nn.Module, tmp_path: Path
) -> None:
    layers = [layer for layer in tiny_plan.layers if layer.name != LAYERS[0]]
    part = Plan(**{**vars(tiny_plan), "identity": identity_of_model(model), "layers": layers})
    found = compile_plan(model, part, tmp_path / "o", workers=1, progress=False)
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
    tiny_plan: Plan, tiny_model_path: Path, model: nn.Module, tmp_path: Path
) -> None:
    layers = tuple(layer for layer in tiny_plan.layers if layer.name != LAYERS[1])
    part = Plan(**{**vars(tiny_plan), "layers": layers})
    found = compile_plan(
        tiny_model_path, part, tmp_path / "o", weights="int8", workers=1, progress=False
    )
    assert found.weights == "int8"
    data = blob(found, "l0.g1").read_bytes()
    (tensors,) = found.package("l0.g1").tensors
    module = dict(model.named_modules())[LAYERS[0]]
    weights = expert_weights(module, "glu", 9, (0, INNER), "")
    for key, array in weights.arrays().items():
        tensor = getattr(tensors, key)
        values = np.frombuffer(data, np.int8, array.size, tensor.offset).reshape(array.shape)
        scales = np.frombuffer(data, np.float16, array.shape[0], tensor.scale_offset)[:, None]
        assert np.abs(values * scales.astype(np.float32) - array).max() <= 0.51 * scales.max()


def test_what_is_current_is_kept_and_the_rest_is_written(
    copied: Path, tiny_plan: Plan, tiny_model_path: Path
) -> None:
    before = stamps(copied)
    manifest = (copied / "manifest.json").stat().st_mtime_ns
    compile_plan(tiny_model_path, tiny_plan, copied, progress=False)
    assert stamps(copied) == before and (copied / "manifest.json").stat().st_mtime_ns == manifest

    # Another plan: one group as it was, one changed, one gone.
    first = tiny_plan.layers[0]
    kept, changed = first.groups
    groups = (kept, group("l0.g1", [10], 64, (0, INNER)))
    layers = (Plan.layer(tiny_plan, LAYERS[0]).__class__(**{**vars(first), "groups": groups}),)
    other = Plan(**{**vars(tiny_plan), "layers": layers})
    found = compile_plan(tiny_model_path, other, copied, workers=1, progress=False)
    after = stamps(copied)
    assert set(after) == {"l0.g0.mlpackage", "l0.g1.mlpackage"}
    assert after["l0.g0.mlpackage"] == before["l0.g0.mlpackage"]
    assert after["l0.g1.mlpackage"] != before["l0.g1.mlpackage"]
    assert found.package("l0.g1").experts == (10,) and changed.experts == (9,)
    found.verify(deep=True)
    with pytest.raises(errors.InvalidArgument, match="from another plan"):
        found.check_plan(tiny_plan)


def test_what_is_about_to_change_has_no_manifest(copied: Path, compiled: Manifest) -> None:
    directory = compiling.CompileDirectory(copied)
    before = directory.finished()
    directory.begin(before)
    with pytest.raises(errors.CorruptArtifact, match="has no manifest.json"):
        Manifest.load(copied)
    assert directory.finished() == before == {p.id: p for p in compiled.packages}
    assert all(directory.is_current(entry, entry.recipe) for entry in before.values())


def test_damage_is_named_and_mended(
    copied: Path, compiled: Manifest, tiny_plan: Plan, tiny_model_path: Path
) -> None:
    def weights(id: str) -> Path:
        return copied / f"{id}.mlpackage" / compiled.package(id).blob

    manifest = Manifest.load(copied)
    os.truncate(weights("l0.g0"), weights("l0.g0").stat().st_size - 64)
    with pytest.raises(
        errors.CorruptArtifact, match=r"l0.g0.mlpackage/.* has \d+ bytes and should"
    ):
        manifest.verify()
    shutil.copy(compiled.directory / weights("l0.g0").relative_to(copied), weights("l0.g0"))
    manifest.verify(deep=True)
    data = bytearray(weights("l0.g1").read_bytes())
    data[len(data) // 2] ^= 1
    weights("l0.g1").write_bytes(data)
    manifest.verify()  # sizes alone
    with pytest.raises(errors.CorruptArtifact, match=r"l0.g1.mlpackage/.*SHA-256 differs"):
        manifest.verify(deep=True)
    shutil.rmtree(copied / "l1.g0.p1.mlpackage")
    with pytest.raises(errors.CorruptArtifact, match=r"l1.g0.p1.mlpackage/.* is missing"):
        manifest.verify()
    before = stamps(copied)
    mended = compile_plan(tiny_model_path, tiny_plan, copied, workers=1, progress=False)
    mended.verify(deep=True)
    after = stamps(copied)
    same = {name for name in after if after[name] == before.get(name)}
    assert same == {"l0.g0.mlpackage", "l1.g0.p0.mlpackage"}


def test_killed_half_way_leaves_no_manifest_and_goes_on(
    tiny_plan: Plan, tiny_model_path: Path, tmp_path: Path
) -> None:
    tiny_plan.save(tmp_path / "plan.json")
    out = tmp_path / "out"
    arguments = ["compile", "--model", tiny_model_path, "--plan", tmp_path / "plan.json"]
    arguments += ["-o", out, "--workers", 1]
    with started(arguments) as process:
        wait_for(lambda: any((out / ".compiling" / "journal").glob("*.json")), process)
        process.kill()
        process.wait()
    done = stamps(out)
    assert 0 < len(done) < 4 and not (out / "manifest.json").exists()
    with pytest.raises(errors.CorruptArtifact, match=f"{out} has no manifest.json.*finish it"):
        Manifest.load(out)
    finished = compile_plan(tiny_model_path, tiny_plan, out, workers=1, progress=False)
    assert len(finished.packages) == 4
    assert {name: stamp for name, stamp in stamps(out).items() if name in done} == done
    Manifest.load(out).verify(deep=True)
    assert not (out / ".compiling").exists()


def test_ctrl_c_stops_at_once_and_keeps_what_is_done(
    tiny_plan: Plan, tiny_model_path: Path, tmp_path: Path
) -> None:
    tiny_plan.save(tmp_path / "plan.json")
    out = tmp_path / "out"
    arguments = ["compile", "--model", tiny_model_path, "--plan", tmp_path / "plan.json", "-o", out]
    with started([*arguments, "--workers", 1]) as process:
        wait_for(lambda: any((out / ".compiling" / "journal").glob("*.json")), process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert stamps(out) and not (out / "manifest.json").exists()


def test_two_compilations_of_one_directory_do_not_meet(
    tiny_plan: Plan, tiny_model_path: Path, tmp_path: Path
) -> None:
    holding = compiling.CompileDirectory(tmp_path / "o")
    with (
        holding.locked(),
        pytest.raises(errors.MoEError, match="another `mlx_moe compile` is writing"),
    ):
        compile_plan(tiny_model_path, tiny_plan, tmp_path / "o", progress=False)


def test_too_little_space_is_said_before_anything_is_written(
    tiny_plan: Plan, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(compiling.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(errors.DiskFull, match=r"compiling needs [1-9] MB in .* 0 MB are free"):
        compile_plan(tiny_model_path, tiny_plan, tmp_path / "o", progress=False)
    assert not list((tmp_path / "o").iterdir())


def test_a_disk_that_fills_up_while_writing_is_named(tmp_path: Path) -> None:
    """In a child whose files may not grow past a megabyte: writes fail where they would."""
    script = """
import json, resource, signal, sys
from mlx_moe import compile_worker, coreml
coreml.coremltools()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    print(compile_worker.build(json.loads(sys.argv[1])))
except Exception as error:
    print(type(error).__name__, error)
"""
    rows = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float16)
    compile_worker.stage_weights(tmp_path, [ExpertWeights(rows, rows + 1, rows + 2)])
    request = {
        **{"id": "g", "directory": str(tmp_path), "experts": [0], "weights": "fp16"},
        **{"capacities": [32], "activation": {"name": "swiglu"}},
    }
    ran = subprocess.run(
        [sys.executable, "-c", script, json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
    )
    last = ran.stdout.strip().splitlines()[-1]
    assert last.startswith(("OSError", "CorruptArtifact", "DiskFull", "RuntimeError")), ran


def test_a_librarys_error_without_room_for_its_copies_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What coremltools leaves half written is removed before anyone looks at the free space."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("filesystem error: cannot copy: Input/output error")

    rows = np.zeros((32, 32), np.float16)
    request = {"id": "g7", "directory": str(tmp_path), "experts": [0], "weights": "fp16"}
    request |= {"capacities": [32, 64], "activation": {"name": "relu"}}
    monkeypatch.setattr(compile_worker, "write_package", fail)
    for copies, error in ((2, errors.DiskFull), (6, RuntimeError)):
        compile_worker.stage_weights(tmp_path, [ExpertWeights(None, rows, rows)])
        free = copies * (tmp_path / compile_worker.STAGED).stat().st_size
        monkeypatch.setattr(
            compile_worker.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free)
        )
        with pytest.raises(error):
            compile_worker.build(request)


@pytest.mark.parametrize("where", ["library", "journal"])
def test_enospc_is_a_full_disk_and_what_is_done_is_kept(
    where: str,
    tiny_plan: Plan,
    tiny_model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device", "somewhere")

    if where == "library":
        stage_weights = compile_worker.stage_weights
        stage_weights(tmp_path, [ExpertWeights(None, *[np.zeros((32, 32), np.float16)] * 2)])
        monkeypatch.setattr(compile_worker, "write_package", full)
        request = {"id": "g7", "directory": str(tmp_path), "experts": [0], "weights": "fp16"}
        with pytest.raises(errors.DiskFull, match="'g7'.*finished packages are kept"):
            compile_worker.build({**request, "capacities": [32], "activation": {"name": "relu"}})
        return
    monkeypatch.setattr(compiling.CompileDirectory, "_note", full)
    with pytest.raises(errors.DiskFull, match="No space left on device; make room"):
        compile_plan(tiny_model_path, tiny_plan, tmp_path / "o", workers=1, progress=False)
    with pytest.raises(errors.CorruptArtifact, match="has no manifest.json"):
        Manifest.load(tmp_path / "o")


def test_a_worker_that_dies_is_an_error_that_says_so(
    tiny_plan: Plan, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = compile_worker.Worker.request

    def killed(self: Any, what: dict[str, Any]) -> Any:
        if self._process is None:
            self._start()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        return request(self, what)

    monkeypatch.setattr(compile_worker.Worker, "request", killed)
    with pytest.raises(errors.MoEError, match=r"a worker ended \(SIGKILL\).*'l0.g[01]'.*fewer"):
        compile_plan(tiny_model_path, tiny_plan, tmp_path / "o", workers=1, progress=False)


def test_a_worker_that_was_closed_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_worker.Worker, "_start", lambda _: pytest.fail("it started"))
    worker = compile_worker.Worker()
    worker.close()
    with pytest.raises(errors.MoEError, match="closed"):
        worker.request({"id": "g"})


def test_a_worker_whose_parent_is_gone_ends() -> None:
    worker = compile_worker.Worker()
    worker._start()
    assert worker._process is not None and worker._process.stdin is not None
    worker._process.stdin.close()
    assert worker._process.wait(timeout=60) == 0
    worker.close()


def test_written_values_are_compared_bit_for_bit(
    compiled: Manifest, model: nn.Module, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(compiled.package_path("l0.g1"), tmp_path / "p.mlpackage"))
    module = dict(model.named_modules())[LAYERS[0]]
    weights = expert_weights(module, "glu", 9, (0, INNER), "")
    stored = [compile_worker.StoredExpert.of(weights, "fp16")]
    compile_worker.read_back(path, stored, [9], [32, 64])
    stored[0].matrices["down"].values[-1, -1] += np.float16(1)
    with pytest.raises(errors.CorruptArtifact, match="does not hold what was written"):
        compile_worker.read_back(path, stored, [9], [32, 64])


def test_the_estimate_is_within_twice_the_truth(
    compiled: Manifest, tiny_plan: Plan, tiny_model_path: Path, tmp_path: Path
) -> None:
    ratios = []
    for attempt in range(3):  # others use this machine too
        out = tmp_path / str(attempt)
        expected = estimate_plan(tiny_model_path, tiny_plan, out, workers=1)
        assert (expected.packages, expected.missing) == (4, 4)
        assert compiled.bytes / 2 <= expected.bytes <= 2 * compiled.bytes
        start = time.perf_counter()
        compile_plan(tiny_model_path, tiny_plan, out, workers=1, progress=False)
        ratios.append(expected.seconds / (time.perf_counter() - start))
        if 0.5 <= ratios[-1] <= 2:
            break
    assert 0.5 <= ratios[-1] <= 2, ratios
    again = estimate_plan(tiny_model_path, tiny_plan, out)
    assert (again.missing, again.seconds, again.space) == (0, 0, 0)


def refused(tiny_plan: Plan, change: Any) -> Plan:
    value = json.loads(json.dumps(tiny_plan.to_json()))
    change(value)
    return Plan.from_json(value)


def test_another_model_is_refused(tiny_plan: Plan, tiny_model_path: Path, tmp_path: Path) -> None:
    other = refused(tiny_plan, lambda p: p["identity"].update(sample="0" * 64, name="theirs"))
    with pytest.raises(errors.IdentityMismatch, match="'theirs'"):
        compile_plan(tiny_model_path, other, tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_a_layer_that_the_model_has_not_is_named(
    tiny_plan: Plan, tiny_model_path: Path, tmp_path: Path
) -> None:
    other = refused(tiny_plan, lambda p: p["layers"][1].update(name="model.layers.99.mlp"))
    with pytest.raises(errors.InvalidArgument, match="'model.layers.99.mlp' is not in the model"):
        compile_plan(tiny_model_path, other, tmp_path / "o")


def test_facts_that_are_not_the_models_are_named(
    tiny_plan: Plan, tiny_model_path: Path, tmp_path: Path
) -> None:
    other = refused(tiny_plan, lambda p: p["layers"][0].update(hidden=256))
    with pytest.raises(errors.InvalidArgument, match=r"0.mlp.switch_mlp: gate .*\(64, 192\)"):
        compile_plan(tiny_model_path, other, tmp_path / "o", progress=False)


def test_a_plan_without_groups_and_wrong_arguments(
    tiny_plan: Plan, model: nn.Module, tiny_model_path: Path, tmp_path: Path
) -> None:
    empty = plan(model, {}, identity=identity_of_files(tiny_model_path))
    with pytest.raises(
        errors.InvalidArgument,
        match=r"no group to compile.*\(nothing of it is tested\).*--force-hot",
    ):
        compile_plan(tiny_model_path, empty, tmp_path / "o")
    with pytest.raises(errors.InvalidArgument, match="weights are 'int3'"):
        compile_plan(tiny_model_path, tiny_plan, tmp_path / "o", weights="int3")
    with pytest.raises(errors.InvalidArgument, match="workers is 0"):
        compile_plan(tiny_model_path, tiny_plan, tmp_path / "o", workers=0)
    with pytest.raises(errors.ModelNotFound):
        compile_plan(tmp_path / "nothing", tiny_plan, tmp_path / "o")


def test_an_activation_without_a_program_is_refused_by_name(
    tiny_plan: Plan, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = dict(model.named_modules())[LAYERS[1]]
    monkeypatch.setitem(module, "activation", nn.Tanh())
    other = Plan(**{**vars(tiny_plan), "identity": identity_of_model(model)})
    with pytest.raises(errors.UnsupportedLayer, match=rf"{LAYERS[1]}: .*activation"):
        compile_plan(model, other, tmp_path / "o")


def test_without_coremltools_the_error_says_what_to_do(
    tiny_plan: Plan, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "coremltools", None)
    with pytest.raises(errors.MissingDependency, match=r"3\.14.*older Python"):
        compile_plan(tiny_model_path, tiny_plan, tmp_path / "o")


def test_the_command_compiles_estimates_and_verifies(
    copied: Path,
    tiny_plan: Plan,
    tiny_model_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_plan.save(tmp_path / "plan.json")
    arguments = ["compile", "--plan", str(tmp_path / "plan.json"), "-o", str(copied)]
    model = ["--model", str(tiny_model_path)]
    assert main([*arguments, *model]) == 0
    out = capsys.readouterr().out
    assert "4 packages" in out and LAYERS[1] in out
    assert main([*arguments, *model, "--estimate", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == 0
    assert main([*arguments, "--verify"]) == 0
    (copied / "l0.g0.mlpackage" / "Manifest.json").write_text("{}")
    assert main([*arguments, "--verify"]) == 1
    assert "l0.g0.mlpackage/Manifest.json has 2 bytes" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # no --model
        main(arguments)


class started:
    """A command in a process of its own, killed at the end."""

    def __init__(self, arguments: list[Any]):
        script = INTERRUPTIBLE + "import runpy; runpy.run_module('mlx_moe', run_name='__main__')"
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> subprocess.Popen[str]:
        return self.process

    def __exit__(self, *error: Any) -> None:
        self.process.kill()
        self.process.communicate()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
