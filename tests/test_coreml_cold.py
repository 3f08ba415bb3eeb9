"""Which compiled groups are computed cold, by what Core ML's stand-in says of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coreml_stand_in import ON, SPLIT, Here, fake_core, two_groups

from mlx_moe.coreml_load import (
    CoreMLPrograms,
    cache_directory,
    demotion,
    model_path,
    prefers_neural_engine,
)
from mlx_moe.errors import InvalidArgument, MoEError
from mlx_moe.manifest import Manifest


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    return two_groups(tmp_path, monkeypatch)


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
