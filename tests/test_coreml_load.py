"""Opening compiled groups: the first load and the cache.

Core ML itself is a stand-in here; what it really does is seen on a Mac alone.
"""

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coreml_stand_in import Here, fake_core, two_groups
from test_manifest import separate

from mlx_moe import core, coreml_load
from mlx_moe.coreml_load import CoreMLPrograms, cache_directory, model_path, report_path
from mlx_moe.errors import InvalidArgument, MissingDependency, MoEError
from mlx_moe.manifest import Manifest


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    return two_groups(tmp_path, monkeypatch)


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


@pytest.mark.skipif(not core.coreml_missing(), reason="Core ML is here")
def test_without_core_ml_it_is_said(artifacts: Manifest) -> None:
    with pytest.raises(MissingDependency, match="part of macOS.*backend='host' runs anywhere"):
        CoreMLPrograms.open(artifacts, ["g0"])
