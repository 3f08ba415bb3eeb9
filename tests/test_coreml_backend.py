"""`backend="coreml"` from plan to forward, with the host executor in Core ML's place.

Everything is the real code but Core ML itself: `CoreMLPrograms`, the process of the first load,
its cache and crashes, what becomes of groups that are not on the Neural Engine.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from static_layer import ALL, HALF, SOME, static, weighted
from static_models import groups_of, plan_of, write_artifacts
from switch_reference import HIDDEN, block, error, float64, glu, inputs, only

from mlx_moe import (
    InvalidArgument,
    cold_ops,
    compile_plan,
    core,
    coreml_load,
    replace_moe_layers,
    tune_profile,
)
from mlx_moe.coreml_load import CoreMLPrograms, cache_directory
from mlx_moe.coreml_trial import Trials
from mlx_moe.devices import load_device
from mlx_moe.manifest import Manifest
from mlx_moe.measured import Measurements, Sample
from mlx_moe.static_programs import load_program

UNITS = {"on": "ane", "gpu": "gpu"}
CHILD = """
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    outcome = OUTCOMES.get(os.path.basename(asked["package"]).split(".")[1], "on")
    if outcome == "crash":
        os.kill(os.getpid(), 11)
    os.makedirs(asked["compiled"])
    unit, count = UNITS.get(outcome), 3 * asked["groups"]
    found = {c: {unit: [count + 1, count]} for c in asked["functions"] if unit}
    print(json.dumps({"placement": found}), flush=True)
"""


@pytest.fixture
def core_ml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Core ML, as the host executor; what becomes of groups by name: "crash", "gpu", "unknown"."""
    outcomes: dict[str, str] = {}
    monkeypatch.setenv("MLX_MOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(core, "coreml_missing", lambda: "")
    monkeypatch.setattr(coreml_load, "system_macos", lambda: 15)  # where tests run on 14 too
    opened = CoreMLPrograms.open

    def on_host(manifest: Manifest, ids: list[str]) -> CoreMLPrograms:
        class Executor:
            def __init__(self) -> None:
                self._host = core.HostExecutor()
                self.submit = self._host.submit

            def load(self, functions: dict[int, tuple[str, str]], *_: Any) -> int:
                ((path, _), *_) = functions.values()
                kept = Path(path).relative_to(cache_directory(manifest))
                entry = manifest.package(kept.parts[0].removesuffix(kept.suffix))
                return load_program(self._host, manifest.directory, entry)

        child = f"OUTCOMES, UNITS = {outcomes!r}, {UNITS!r}\n{CHILD}"
        stand_in = SimpleNamespace(coreml_missing=lambda: "", CoreMLExecutor=Executor)
        trials = Trials([sys.executable, "-c", child], seconds=60)
        return opened(manifest, ids, core=stand_in, trials=trials)

    monkeypatch.setattr(coreml_load.CoreMLPrograms, "open", on_host)
    return outcomes


def replaced(model: nn.Module, directory: Path, **options: Any) -> Any:
    plan = plan_of(model, {"experts": groups_of("e", ALL, (64, 32, 64), HIDDEN, **options)})
    artifacts = write_artifacts(model, plan, directory / "artifacts")
    return replace_moe_layers(model, plan, artifacts=artifacts, backend="coreml")


@pytest.mark.parametrize(
    ("outcomes", "hot", "cell", "note"),
    [
        (
            {},
            {0, 1, 2, 3, 4, 5, 6, 7},
            "8 of 8 experts hot; Neural Engine preferred for 3 of 3 groups",
            "Core ML prefers the Neural Engine for 3 of 3 groups",
        ),
        (
            {"g0": "crash"},
            {3, 4, 5, 6, 7},
            "5 of 8 experts hot; Neural Engine preferred for 2 of 3 groups",
            r"2 of 3 groups; 1 are computed cold \(e.g0.p0: .*its first load crashed \(SIGSEGV\)",
        ),
        (
            {"g0": "gpu", "g2": "crash"},
            {3},
            "1 of 8 experts hot; Neural Engine preferred for 1 of 3 groups",
            r"1 of 3 groups; 2 are computed cold \(e.g0.p0: .* 9 for the GPU",
        ),
        (
            {"g1": "unknown"},
            {0, 1, 2, 3, 4, 5, 6, 7},
            "8 of 8 experts hot; Neural Engine preferred for 2 of 3 groups, not known for 1",
            "2 of 3 groups; it does not say for 1",
        ),
    ],
)
def test_groups_that_came_up_are_hot(
    tmp_path, core_ml: dict[str, str], caplog, outcomes, hot: set[int], cell: str, note: str
) -> None:
    core_ml.update(outcomes)
    model = block(glu())
    x, ids, scores = inputs(40)
    want = weighted(model, x, ids, scores)
    replacement = replaced(model, tmp_path)
    assert error(model(x, ids, scores), want) < HALF
    counts = static(replacement)
    assert counts["hot"] == sum(int(e) in hot for e in ids.reshape(-1).tolist())
    assert counts["hot"] + counts["cold"] == 80 and counts["failed_tiles"] == 0
    cold = [outcome for outcome in outcomes.values() if outcome != "unknown"]
    assert counts["cold_groups"] == len(cold) == caplog.text.count("is computed cold")
    (row,) = replacement.layers
    assert (row.backend, row.residency) == ("coreml", cell)
    assert re.search(note, replacement.note) and replacement.note in str(replacement)


@pytest.mark.parametrize("ops", [False, True])
def test_nothing_came_up(tmp_path, core_ml: dict[str, str], monkeypatch, ops: bool) -> None:
    monkeypatch.setattr(cold_ops, "on_gpu", lambda: ops)
    core_ml.update({"g0": "crash", "g1": "gpu", "g2": "gpu"})
    model = block(glu())
    x, ids, scores = inputs(40)
    stock = model(x, ids, scores)
    replacement = replaced(model, tmp_path)
    found = model(x, ids, scores)
    assert mx.array_equal(found, stock) if ops else error(found, float64(stock)) < 1e-5
    counts = static(replacement)
    assert (counts["forwards"], counts["cold_groups"]) == (0, 3)
    assert (only(replacement)["kernel_calls"] == 0) == ops
    (row,) = replacement.layers
    assert row.backend == ("stock" if ops else "cpu")
    assert row.residency == "0 of 8 experts hot; Neural Engine preferred for 0 of 3 groups"


def test_a_group_in_parts_needs_them_all(tmp_path, core_ml: dict[str, str]) -> None:
    model = block(glu())
    x, ids, scores = inputs(40)
    want = weighted(model, x, ids, scores)
    groups = groups_of("e", ALL, (64, 32, 64), HIDDEN, splits=(64,))
    plan = plan_of(model, {"experts": groups})
    artifacts = write_artifacts(model, plan, tmp_path / "artifacts")
    number = CoreMLPrograms.number
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            CoreMLPrograms, "number", lambda self, id: None if id == "e.g2.p1" else number(self, id)
        )
        replacement = replace_moe_layers(model, plan, artifacts=artifacts, backend="coreml")
    assert error(model(x, ids, scores), want) < HALF
    counts = static(replacement)
    assert counts["cold_groups"] == 1 and counts["dispatches"] == 4
    assert counts["hot"] == sum(e < 4 for e in ids.reshape(-1).tolist())


def test_on_a_gpu_all_else_is_mlxs(tmp_path, core_ml: dict[str, str], monkeypatch) -> None:
    monkeypatch.setattr(cold_ops, "on_gpu", lambda: True)
    core_ml.update({"g2": "crash"})
    model = block(glu(), "affine-4")
    x, ids, scores = inputs(40)
    want = weighted(model, x, ids, scores)
    replacement = replaced(model, tmp_path)
    assert error(model(x, ids, scores), want) < HALF
    assert static(replacement)["cold"] > 0 == only(replacement)["kernel_calls"]


def test_a_plan_by_other_numbers_than_were_measured_here_is_said(
    tmp_path, core_ml: dict[str, str], caplog, monkeypatch
) -> None:
    device = load_device("m2-max")
    samples = tuple(Sample(path, 64, 128, 1, 32, 1e-3) for path in ("static", "cold"))
    tuned = replace(device, name="m2-tuned", measurements=Measurements("2026-01-31", 1.0, samples))
    monkeypatch.setattr(tune_profile, "load", lambda: tuned)
    replaced(block(glu()), tmp_path)
    assert "the numbers of m2-max, and this machine was tuned (m2-tuned): plan again" in caplog.text
    assert tune_profile.better_than(tuned) is None
    monkeypatch.setattr(tune_profile, "load", lambda: replace(device, name="no samples"))
    assert tune_profile.better_than(device) is None


@pytest.mark.skipif(bool(core.coreml_missing()), reason="Core ML is on Macs")
@pytest.mark.parametrize("device", [mx.cpu, mx.gpu], ids=["cpu", "gpu"])
def test_core_ml_itself(tmp_path, monkeypatch, device: Any) -> None:
    """Compiled, replaced and run; on whichever unit there is, since machines of CI are virtual."""
    if device == mx.gpu and not mx.metal.is_available():
        pytest.skip("MLX has no GPU here")
    pytest.importorskip("coremltools")
    monkeypatch.setattr(coreml_load, "demotion", lambda placement: None)
    check_compiled(tmp_path, device)


def check_compiled(directory: Path, device: Any) -> None:
    model = block(glu(), "affine-4")
    plan = plan_of(model, {"experts": groups_of("e", SOME, (64, 32), HIDDEN)}, static_from=32)
    compile_plan(model, plan, directory, macos=14, progress=False)
    few, many = inputs(3), inputs(60)
    want = weighted(model, *many)
    before = mx.default_device()
    mx.set_default_device(device)
    try:
        stock = model(*few)
        replacement = replace_moe_layers(model, plan, artifacts=directory, backend="coreml")
        decoded, found = model(*few), model(*many)
        mx.eval(stock, decoded, found)
    finally:
        mx.set_default_device(before)
    assert error(found, want) < HALF
    counts = static(replacement)
    assert counts["hot"] > counts["cold"] > 0 == counts["failed_tiles"]
    if device == mx.gpu:
        assert mx.array_equal(decoded, stock)
        assert only(replacement)["kernel_calls"] == 0


@pytest.mark.skipif(not core.coreml_missing(), reason="Core ML is here")
@pytest.mark.parametrize("plan", [None, "plan.json"])
def test_without_core_ml_the_host_is_named(plan: str | None) -> None:
    with pytest.raises(InvalidArgument, match="backend='coreml': .*backend='host' runs a plan"):
        replace_moe_layers(block(glu()), plan, backend="coreml")
