"""A directory that is compiled into: going on after a stop, damage, and who may write."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifacts import group
from commands import INTERRUPTIBLE
from compiled import INNER, LAYERS, stamps
from test_manifest import entry, separate

pytest.importorskip("coremltools")


from mlx_moe import compile as compiling
from mlx_moe import errors
from mlx_moe.compile import compile_plan
from mlx_moe.manifest import Manifest
from mlx_moe.plan import Plan


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


def test_another_form_takes_a_packages_place_even_if_it_stops_there(tmp_path: Path) -> None:
    directory = compiling.CompileDirectory(tmp_path)
    for before, after in ((entry("g0"), separate("g0")), (separate("g0"), entry("g0"))):
        (tmp_path / before.path).mkdir(exist_ok=True)
        directory.begin({before.id: before})
        stage = directory.stage(after.id)
        (stage / "written").mkdir()
        directory.publish(stage / "written", after)
        found = {path.name for path in tmp_path.iterdir()}
        assert found == {after.path, ".compiling"}
        assert directory.finished() == {"g0": after}


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
