"""Opening compiled groups: the process of the first load, the cache, and who is computed cold.

Core ML itself is a stand-in here; what it really does is seen on a Mac alone.
"""

import fcntl
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_manifest import manifest, separate

from mlx_moe import core, coreml_load
from mlx_moe.coreml_load import (
    CoreMLPrograms,
    cache_directory,
    demotion,
    model_path,
    prefers_neural_engine,
    report_path,
)
from mlx_moe.coreml_trial import Trials, trial_request, try_package
from mlx_moe.errors import InvalidArgument, MissingDependency, MoEError
from mlx_moe.manifest import Manifest
from mlx_moe.package_form import functions

ON = {"ane": [9, 6], "gpu": [0, 0], "cpu": [1, 0], "other": [0, 0]}
SPLIT = {"ane": [7, 4], "gpu": [2, 2], "cpu": [0, 0], "other": [0, 0]}


class Executor:
    """Doubles every tile; refuses models that are not there."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def load(self, functions: Any, groups: int, width: int, input: str, output: str) -> int:
        for path, name in functions.values():
            if not Path(path, name or "main").exists():
                raise InvalidArgument(f"{path} does not load: no {name}")
        self.loaded.append((functions, groups, width, input, output))
        return len(self.loaded) - 1

    def submit(self, tiles: Any) -> Any:
        (_, x, out) = tiles[0]
        out[:] = 2 * x
        return SimpleNamespace(wait=lambda: [""])


def fake_core(tmp_path: Path, **changes: Any) -> Any:
    def compile(package: str) -> str:
        made = tmp_path / "system" / Path(package).name
        made.mkdir(parents=True)
        for name in ("c32", "c64", "main"):
            (made / name).touch()
        return str(made)

    plain: dict[str, Any] = {
        "coreml_missing": lambda: "",
        "coreml_compile": compile,
        "coreml_placement": lambda path, name: ON,
        "CoreMLExecutor": Executor,
    }
    return SimpleNamespace(**{**plain, **changes})


class Here:
    """Trials without a process; `fails` says how packages end."""

    def __init__(self, core: Any, fails: dict[str, str] | None = None):
        self.core, self.fails, self.asked = core, fails or {}, []

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        name = Path(request["package"]).stem
        self.asked.append(name)
        if name in self.fails:
            raise MoEError(self.fails[name])
        return try_package(request, self.core)

    def close(self) -> None:
        pass


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    monkeypatch.setenv("MLX_MOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(coreml_load, "system_macos", lambda: 15)  # where tests run on 14 too
    one = manifest(tmp_path)
    other = replace(one.package("g1"), layer="model.layers.1.mlp")
    found = replace(one, packages=[one.package("g0"), other])
    found.save()
    return found


def test_groups_are_prepared_once_and_loaded_with_their_functions(
    artifacts: Manifest, tmp_path: Path
) -> None:
    fake = fake_core(tmp_path)
    first = Here(fake)
    programs = CoreMLPrograms.open(artifacts, ["g0", "g1"], core=fake, trials=first)
    assert first.asked == ["g0", "g1"]
    assert [programs.number("g0"), programs.number("g1")] == [0, 1]
    kept = cache_directory(artifacts)
    path = str(model_path(kept, artifacts.package("g0")))
    expected = ({32: (path, "c32"), 64: (path, "c64")}, 2, 4, "x", "y")
    assert programs.executor.loaded[0] == expected
    assert programs.summary() == "Core ML prefers the Neural Engine for 2 of 2 groups"
    assert len(list(kept.iterdir())) == 4  # two models, two reports

    again = Here(fake)
    programs = CoreMLPrograms.open(artifacts, ["g0", "g1"], core=fake, trials=again)
    assert again.asked == [] and programs.number("g1") == 1


def test_packages_for_each_capacity_are_prepared_together_and_loaded(
    artifacts: Manifest, tmp_path: Path
) -> None:
    separately = replace(artifacts, packages=[separate("g0")], macos=14)
    separately.save()
    compiled: list[str] = []

    def compile(package: str) -> str:
        compiled.append(package)
        return str(fake_core(tmp_path).coreml_compile(package))

    fake = fake_core(tmp_path, coreml_compile=compile)
    programs = CoreMLPrograms.open(separately, ["g0"], core=fake, trials=Here(fake))
    kept = model_path(cache_directory(separately), separately.package("g0"))
    assert compiled == [str(tmp_path / "g0.tiers" / f"c{c}.mlpackage") for c in (32, 64)]
    loaded = {c: (str(kept / f"c{c}.mlmodelc"), "") for c in (32, 64)}
    assert programs.executor.loaded == [(loaded, 2, 4, "x", "y")]
    again = Here(fake)
    assert CoreMLPrograms.open(separately, ["g0"], core=fake, trials=again).number("g0") == 0
    assert again.asked == []


def test_functions_are_refused_on_macos_14(
    artifacts: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coreml_load, "system_macos", lambda: 14)
    monkeypatch.setattr("platform.mac_ver", lambda: ("14.6.1", ("", "", ""), "arm64"))
    fake = fake_core(tmp_path)
    with pytest.raises(InvalidArgument, match=r"for macOS 15 and this is 14.6.1: .*--macos 14"):
        CoreMLPrograms.open(artifacts, ["g0"], core=fake, trials=Here(fake))
    separately = replace(artifacts, packages=[separate("g0")], macos=14)
    separately.save()
    assert CoreMLPrograms.open(separately, ["g0"], core=fake, trials=Here(fake)).number("g0") == 0


@pytest.mark.parametrize("what", ["report", "model", "manifest", "system"])
def test_what_is_gone_or_of_another_time_is_prepared_anew(
    artifacts: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    fake = fake_core(tmp_path)
    CoreMLPrograms.open(artifacts, ["g0"], core=fake, trials=Here(fake))
    kept, entry = cache_directory(artifacts), artifacts.package("g0")
    if what == "report":
        coreml_load.report_path(kept, entry).write_text('{"placement": 3}')
    elif what == "model":
        (model_path(kept, entry)).rename(tmp_path / "away")
    elif what == "manifest":
        (tmp_path / "manifest.json").write_text((tmp_path / "manifest.json").read_text() + " ")
    else:
        monkeypatch.setattr(coreml_load, "system_build", lambda: "24A1")
    trials = Here(fake)
    CoreMLPrograms.open(artifacts, ["g0"], core=fake, trials=trials)
    assert trials.asked == ["g0"]


def test_a_package_that_fails_is_cold_and_tried_again_the_next_time(
    artifacts: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = fake_core(tmp_path)
    trials = Here(fake, {"g0": "its first load crashed (SIGSEGV)"})
    programs = CoreMLPrograms.open(artifacts, ["g0", "g1"], core=fake, trials=trials)
    assert programs.number("g0") is None and programs.number("g1") == 0
    assert "1 of 2 groups; 1 are computed cold (g0: its first load crashed" in programs.summary()
    assert "group g0 is computed cold: its first load crashed (SIGSEGV)" in caplog.text
    later = Here(fake)
    programs = CoreMLPrograms.open(artifacts, ["g0", "g1"], core=fake, trials=later)
    assert later.asked == ["g0"] and programs.number("g0") == 0


def test_a_model_that_no_longer_loads_here_is_cold_and_forgotten(
    artifacts: Manifest, tmp_path: Path
) -> None:
    fake = fake_core(tmp_path)
    CoreMLPrograms.open(artifacts, ["g0"], core=fake, trials=Here(fake))
    kept, entry = cache_directory(artifacts), artifacts.package("g0")
    (model_path(kept, entry) / "c64").unlink()
    programs = CoreMLPrograms.open(artifacts, ["g0"], core=fake, trials=Here(fake))
    assert programs.number("g0") is None
    assert "does not load" in (programs.reports["g0"].cold or "")
    trials = Here(fake)
    assert CoreMLPrograms.open(artifacts, ["g0"], core=fake, trials=trials).number("g0") == 0
    assert trials.asked == ["g0"]


def test_the_first_load_is_of_the_model_that_is_kept_and_holds_the_directory(
    artifacts: Manifest, tmp_path: Path
) -> None:
    kept, entry = cache_directory(artifacts), artifacts.package("g0")
    tried: list[Any] = []

    class Watching(Here):
        def request(self, request: dict[str, Any]) -> dict[str, Any]:
            reply = super().request(request)
            handle = os.open(kept, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(handle)
            tried.append((request["compiled"], report_path(kept, entry).exists()))
            return reply

    fake = fake_core(tmp_path)
    programs = CoreMLPrograms.open(artifacts, ["g0"], core=fake, trials=Watching(fake))
    assert tried == [(programs.executor.loaded[0][0][32][0], False)]


def test_two_that_open_at_once_prepare_a_group_once(artifacts: Manifest, tmp_path: Path) -> None:
    begun, second = threading.Event(), threading.Event()

    class Slow(Here):
        def request(self, request: dict[str, Any]) -> dict[str, Any]:
            begun.set()
            second.wait(1)  # the other one asks for no trial, or here is time for it
            return super().request(request)

    class Second(Here):
        def request(self, request: dict[str, Any]) -> dict[str, Any]:
            second.set()
            return super().request(request)

    fake = fake_core(tmp_path)
    slow, other = Slow(fake), Second(fake)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(CoreMLPrograms.open, artifacts, ["g0"], core=fake, trials=slow)
        assert begun.wait(60)
        again = threads.submit(CoreMLPrograms.open, artifacts, ["g0"], core=fake, trials=other)
        assert first.result().number("g0") == again.result().number("g0") == 0
    assert (slow.asked, other.asked) == (["g0"], [])


def test_what_killed_and_failed_processes_leave_is_removed(
    artifacts: Manifest, tmp_path: Path
) -> None:
    fake, kept = fake_core(tmp_path), cache_directory(artifacts)
    CoreMLPrograms.open(artifacts, ["g1"], core=fake, trials=Here(fake))
    good = sorted(kept.iterdir())
    for name in ("g0.mlmodelc", "gone.mlmodelc", ".g0-123.mlmodelc"):
        (kept / name / "inside").mkdir(parents=True)

    class Crashing(Here):
        def request(self, request: dict[str, Any]) -> dict[str, Any]:
            super().request(request)
            raise MoEError("its first load crashed (SIGSEGV)")

    programs = CoreMLPrograms.open(artifacts, ["g0", "g1"], core=fake, trials=Crashing(fake))
    assert programs.number("g0") is None and programs.number("g1") == 0
    assert sorted(kept.iterdir()) == good


def test_a_group_that_is_not_on_the_neural_engine_is_cold(
    artifacts: Manifest, tmp_path: Path
) -> None:
    fake = fake_core(tmp_path, coreml_placement=lambda path, name: SPLIT if name == "c64" else ON)
    programs = CoreMLPrograms.open(artifacts, ["g0"], core=fake, trials=Here(fake))
    assert programs.number("g0") is None and not programs.executor.loaded
    assert programs.summary() == (
        "Core ML prefers the Neural Engine for 0 of 1 groups; 1 are computed cold (g0: at capacity "
        "64 Core ML prefers, of 6 convolutions, 2 for the GPU)"
    )


def test_without_a_compute_plan_nothing_is_said_of_the_neural_engine(
    artifacts: Manifest, tmp_path: Path
) -> None:
    def none(path: str, name: str) -> Any:
        raise InvalidArgument("a compute plan takes macOS 14.4 or newer")

    fake = fake_core(tmp_path, coreml_placement=none)
    programs = CoreMLPrograms.open(artifacts, ["g0"], core=fake, trials=Here(fake))
    assert programs.number("g0") == 0
    text = "Core ML prefers the Neural Engine for 0 of 1 groups; it does not say for 1"
    assert programs.summary() == text


@pytest.mark.parametrize("lacks", ["a convolution's unit", "all units", "a capacity's plan"])
def test_a_plan_that_names_less_than_all_is_no_claim(
    artifacts: Manifest, tmp_path: Path, lacks: str
) -> None:
    def some(path: str, name: str) -> Any:
        if name == "c32":
            return ON
        if lacks == "a capacity's plan":
            raise MoEError("has no compute plan")
        return ON | {"ane": [8, 5] if lacks == "a convolution's unit" else [3, 0]}

    fake = fake_core(tmp_path, coreml_placement=some)
    for _ in range(2):  # made, and kept
        programs = CoreMLPrograms.open(artifacts, ["g0"], core=fake, trials=Here(fake))
        assert programs.number("g0") == 0
        text = "Core ML prefers the Neural Engine for 0 of 1 groups; it does not say for 1"
        assert programs.summary() == text
        text = "Neural Engine preferred for 0 of 1 groups, not known for 1"
        assert programs.placement(["g0"]) == text


def test_two_matrices_an_expert_are_two_convolutions(artifacts: Manifest) -> None:
    glu = artifacts.package("g0")
    mlp = replace(glu, kind="mlp", tensors=tuple(replace(e, gate=None) for e in glu.tensors))
    for entry, count in ((glu, 6), (mlp, 4)):
        for found in (count, count - 1):
            placement = {c: {"ane": (9, found)} for c in entry.functions}
            assert prefers_neural_engine(placement, entry) == (found == count)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("when", ["tried", "loaded"])
def test_no_part_of_a_group_is_loaded_that_has_a_cold_part(
    artifacts: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture, first: bool, when: str
) -> None:
    parts = ["p0", "p1"] if first else ["p1", "p0"]
    packages = [replace(artifacts.package("g0"), id=id, path=f"{id}.mlpackage") for id in parts]
    split = replace(artifacts, packages=[*packages, artifacts.package("g1")])
    split.save()
    fake = fake_core(tmp_path)
    if when == "loaded":
        CoreMLPrograms.open(split, parts, core=fake, trials=Here(fake))
        (model_path(cache_directory(split), split.package("p0")) / "c64").unlink()
    trials = Here(fake, {"p0": "it crashed"} if when == "tried" else {})
    programs = CoreMLPrograms.open(split, [*parts, "g1"], core=fake, trials=trials)
    # What fails only when it is loaded here comes too late for the parts before it.
    assert (programs.number("p1") is None) == (first or when == "tried")
    assert programs.number("p0") is None and programs.number("g1") is not None
    assert len(programs.executor.loaded) == (1 if first or when == "tried" else 2)
    assert caplog.text.count("is computed cold") == 1
    if programs.number("p1") is None:
        assert programs.reports["p1"].cold == "its part p0 is computed cold"


def test_demotion_needs_every_convolution_on_the_neural_engine() -> None:
    assert demotion({32: ON, 64: ON}) is None  # type: ignore[dict-item]
    assert demotion({}) is None
    assert "2 for the GPU" in (demotion({32: SPLIT}) or "")  # type: ignore[dict-item]


@pytest.mark.skipif(not core.coreml_missing(), reason="Core ML is here")
def test_without_core_ml_it_is_said(artifacts: Manifest) -> None:
    with pytest.raises(MissingDependency, match="part of macOS.*backend='host' runs anywhere"):
        CoreMLPrograms.open(artifacts, ["g0"])


def test_a_first_prediction_that_fails_fails_the_package(tmp_path: Path) -> None:
    class Failing(Executor):
        def submit(self, tiles: Any) -> Any:
            return SimpleNamespace(wait=lambda: ["a prediction failed: Error (com.apple.CoreML 5)"])

    fake = fake_core(tmp_path, CoreMLExecutor=Failing)
    with pytest.raises(MoEError, match="the first prediction failed: a prediction failed"):
        try_package(request(tmp_path), fake)


def request(tmp_path: Path, capacities: tuple[int, ...] = (32,)) -> dict[str, Any]:
    package, compiled = tmp_path / "g0.mlpackage", tmp_path / ".g0"
    return trial_request(package, compiled, functions(capacities, 15), 2, 4, "x", "y")


def script(body: str) -> list[str]:
    return [sys.executable, "-c", "import json, os, sys, time\nfor line in sys.stdin:\n  " + body]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("os.kill(os.getpid(), 11)", r"g0.mlpackage: its first load crashed \(SIGSEGV\)"),
        ("sys.exit('ANE said no')", r"crashed \(exit code 1\): ANE said no"),
        ("time.sleep(60)", "took more than 1 second"),
        ("print(json.dumps({'error': 'it does not compile'}), flush=True)", "it does not compile"),
    ],
)
def test_a_crash_a_hang_and_an_error_of_the_process_are_errors(
    tmp_path: Path, body: str, said: str
) -> None:
    trials = Trials(script(body), seconds=1 if "sleep" in body else 60)  # Python starts slowly
    for _ in range(2):  # it is started again
        with pytest.raises(MoEError, match=said):
            trials.request(request(tmp_path))
    trials.close()


def test_the_process_answers_request_after_request(tmp_path: Path) -> None:
    trials = Trials(
        script("print(json.dumps({'pid': os.getpid(), **json.loads(line)}), flush=True)")
    )
    replies = [trials.request(request(tmp_path)) for _ in range(3)]
    trials.close()
    assert {r["pid"] for r in replies} != {os.getpid()} and len({r["pid"] for r in replies}) == 1
    assert replies[0]["width"] == 4


@pytest.mark.skipif(not core.coreml_missing(), reason="Core ML is here")
def test_the_real_process_says_that_there_is_no_core_ml(tmp_path: Path) -> None:
    trials = Trials()
    with pytest.raises(MoEError, match="there is no Core ML here"):
        trials.request(request(tmp_path))
    trials.close()


def test_a_trial_runs_every_function_on_zeros(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Watching(Executor):
        def submit(self, tiles: Any) -> Any:
            seen.append((tiles[0][1].shape, tiles[0][1].dtype, float(np.abs(tiles[0][1]).max())))
            return super().submit(tiles)

    fake = fake_core(tmp_path, CoreMLExecutor=Watching)
    reply = try_package(request(tmp_path, (32, 64)), fake)
    assert reply == {"placement": {"32": ON, "64": ON}}
    assert seen == [((2, 32, 4), np.float16, 0.0), ((2, 64, 4), np.float16, 0.0)]
