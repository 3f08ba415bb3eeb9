"""What compiling takes and refuses, and its command."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from artifacts import plan
from compiled import BLOB, LAYERS

pytest.importorskip("coremltools")

from mil_interpreter import MilProgram

from mlx_moe import Replacement, compile_estimate, errors, replace_moe_layers
from mlx_moe.cli import main
from mlx_moe.cli.compile import estimate_text
from mlx_moe.compile import compile_plan, estimate_plan
from mlx_moe.identity import identity_of_files, identity_of_model
from mlx_moe.manifest import Manifest
from mlx_moe.plan import Plan


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


def test_the_estimate_says_what_a_package_for_each_capacity_costs(
    compiled: Manifest,
    tiny_plan: Plan,
    tiny_model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compile_estimate, "estimate_seconds", lambda *_: 0.0)
    shared, separate = (
        estimate_plan(tiny_model_path, tiny_plan, tmp_path / "o", macos=macos, workers=1)
        for macos in (15, 14)
    )
    again = compiled.package("l0.g1").bytes  # its capacities are two, of the others one
    assert separate.bytes - shared.bytes == pytest.approx(again, rel=0.1)
    assert shared.shared_bytes == separate.shared_bytes == shared.bytes
    assert separate.largest == pytest.approx(shared.largest, rel=0.1)
    assert separate.space > shared.space
    assert "with --macos 15 it would be 0." in estimate_text(separate)
    assert "--macos" not in estimate_text(shared)


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
    tiny_plan: Plan, tiny_model: nn.Module, tiny_model_path: Path, tmp_path: Path
) -> None:
    empty = plan(tiny_model, {}, identity=identity_of_files(tiny_model_path))
    with pytest.raises(
        errors.InvalidArgument,
        match=r"no group to compile.*\(nothing of it is tested\).*--force-hot",
    ):
        compile_plan(tiny_model_path, empty, tmp_path / "o")
    with pytest.raises(errors.InvalidArgument, match="weights are 'int3'"):
        compile_plan(tiny_model_path, tiny_plan, tmp_path / "o", weights="int3")
    with pytest.raises(errors.InvalidArgument, match="macos is 13; expected 15 or 14"):
        compile_plan(tiny_model_path, tiny_plan, tmp_path / "o", macos=13)
    with pytest.raises(errors.InvalidArgument, match="workers is 0"):
        compile_plan(tiny_model_path, tiny_plan, tmp_path / "o", workers=0)
    with pytest.raises(errors.ModelNotFound):
        compile_plan(tmp_path / "nothing", tiny_plan, tmp_path / "o")


def test_an_activation_without_a_program_is_refused_by_name(
    tiny_plan: Plan, tiny_model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = dict(tiny_model.named_modules())[LAYERS[1]]
    monkeypatch.setitem(module, "activation", nn.Tanh())
    other = Plan(**{**vars(tiny_plan), "identity": identity_of_model(tiny_model)})
    with pytest.raises(errors.UnsupportedLayer, match=rf"{LAYERS[1]}: .*activation"):
        compile_plan(tiny_model, other, tmp_path / "o")


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


@contextmanager
def replaced(model: nn.Module, plan: Plan, artifacts: Path, files: Path) -> Iterator[Replacement]:
    """On the host executor, and as it was afterwards."""
    replacement = replace_moe_layers(
        model, plan, artifacts=artifacts, backend="host", checkpoint=files
    )
    try:
        yield replacement
    finally:
        replacement.restore()


def test_the_command_compiles_for_macos_14(
    copied: Path,
    compiled: Manifest,
    tiny_model: nn.Module,
    tiny_plan: Plan,
    tiny_model_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a directory of the other form, which goes."""
    tiny_plan.save(tmp_path / "plan.json")
    arguments = ["compile", "--plan", str(tmp_path / "plan.json"), "-o", str(copied)]
    model = ["--model", str(tiny_model_path), "--macos", "14"]
    assert main([*arguments, *model]) == 0
    assert "5 packages" in (out := capsys.readouterr().out) and "macOS 14 or newer" in out
    groups = ("l0.g0", "l0.g1", "l1.g0.p0", "l1.g0.p1")
    assert sorted(p.name for p in copied.iterdir()) == [
        *(f"{group}.tiers" for group in groups),
        "manifest.json",
    ]
    found = Manifest.load(copied)
    assert found.package("l0.g1").packages == ["c32.mlpackage", "c64.mlpackage"]
    weights = [copied / "l0.g1.tiers" / p / BLOB for p in ("c32.mlpackage", "c64.mlpackage")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    for place in found.package("l0.g1").functions.values():
        spec = MilProgram(found.package_path("l0.g1") / place.package).spec
        assert spec.specificationVersion == 8 and list(spec.mlProgram.functions) == ["main"]

    # A model runs the same in either form, to the last bit.
    tokens, logits = mx.random.randint(0, 500, (1, 64)), []
    for artifacts in (compiled.directory, copied):
        with replaced(tiny_model, tiny_plan, artifacts, tiny_model_path) as replacement:
            logits.append(np.array(tiny_model(tokens).astype(mx.float32)))
            counts = replacement.stats()
        assert all(counts[name]["static"]["hot"] > 0 for name in LAYERS)
    assert np.array_equal(*logits)

    before = {path: path.stat().st_mtime_ns for path in weights}
    assert main([*arguments, *model]) == 0  # nothing is left to do
    assert before == {path: path.stat().st_mtime_ns for path in weights}
    assert main([*arguments, "--verify"]) == 0
    weights[0].write_bytes(weights[0].read_bytes()[:-1] + b"x")
    assert main([*arguments, "--verify"]) == 1
    assert "l0.g1.tiers/c32.mlpackage/Data" in capsys.readouterr().err
