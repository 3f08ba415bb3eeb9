"""Manifests that somebody changed: a named error or the same meaning, never a crash."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_moe.errors import CorruptArtifact
from mlx_moe.identity import ModelIdentity
from mlx_moe.manifest import Manifest
from mlx_moe.package_entry import ExpertTensors, File, PackageEntry, Tensor
from mlx_moe.package_form import Function, container, functions

BLOB = "Data/com.apple.CoreML/weights/weight.bin"


def tensors(expert: int, at: int, dtype: str = "fp16") -> ExpertTensors:
    """hidden 4, inner 2: 16 bytes each."""
    gate = Tensor(at, dtype, (2, 4), at + 8 if dtype == "int8" else None)
    return ExpertTensors(
        expert, gate, Tensor(at + 16, "fp16", (2, 4)), Tensor(at + 32, "fp16", (4, 2))
    )


def entry(id: str = "g0") -> PackageEntry:
    return PackageEntry(
        id=id,
        path=f"{id}.mlpackage",
        layer="model.layers.0.mlp",
        kind="glu",
        experts=(3, 1),
        split=(0, 2),
        hidden=4,
        inner=2,
        activation="swiglu_oai",
        activation_parameters={"alpha": 1.5, "limit": 7.0},
        functions=functions((32, 64), 15),
        tier=64,
        input="x",
        output="y",
        files={BLOB: File(96, "0" * 64), "Manifest.json": File(2, "1" * 64)},
        blob=BLOB,
        tensors=(tensors(3, 0), tensors(1, 48, "int8")),
        recipe="2" * 64,
    )


def manifest(directory: Path) -> Manifest:
    identity = ModelIdentity("tiny", layers="3" * 64)
    return Manifest(directory, "4" * 64, identity, "fp16", [entry("g0"), entry("g1")])


def test_it_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = manifest(tmp_path)
    saved.save()
    assert Manifest.load(tmp_path) == saved
    assert saved.package("g1") == entry("g1") and saved.bytes == 2 * 98
    assert saved.package_path("g1") == tmp_path / "g1.mlpackage"
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
    with pytest.raises(CorruptArtifact, match="no package for the plan's group 'g9'"):
        saved.package("g9")


PLACE = {"package": ".", "name": "c32"}


def separate(id: str = "g0") -> PackageEntry:
    """As `entry`, for macOS 14: the capacities are packages, each with the weights."""
    shared = entry(id)
    packages = [f"c{capacity}.mlpackage" for capacity in shared.functions]
    return replace(
        shared,
        path=container(id, 14),
        functions=functions((32, 64), 14),
        blob=f"{packages[1]}/{BLOB}",
        files={f"{p}/{name}": file for p in packages for name, file in shared.files.items()},
    )


def test_packages_for_each_capacity_come_back_too(tmp_path: Path) -> None:
    saved = replace(manifest(tmp_path), packages=[separate("g0"), separate("g1")], macos=14)
    saved.save()
    loaded = Manifest.load(tmp_path)
    assert loaded == saved and loaded.macos == loaded.package("g0").macos == 14
    assert loaded.package("g0").functions[64] == Function("c64.mlpackage", None)
    assert loaded.package("g0").packages == ["c32.mlpackage", "c64.mlpackage"]
    assert loaded.bytes == 2 * 2 * 98
    mixed = replace(saved, packages=[entry("g0"), separate("g1")])
    mixed.save()
    with pytest.raises(CorruptArtifact, match="not all packages are for macOS 14"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda v: v["functions"]["32"].update(package="c64.mlpackage"), "not in its packages"),
        (lambda v: v["functions"]["32"].update(name="c32"), "not in its packages"),
        (lambda v: v["functions"].pop("32"), "not in its packages"),
        (lambda v: v.update(path="g0.mlpackage"), "not in its packages"),
        (lambda v: v.update(blob=BLOB), "not among its files"),
    ],
)
def test_packages_for_each_capacity_are_checked(change: Any, message: str) -> None:
    value = json.loads(json.dumps(separate().to_json()))
    change(value)
    with pytest.raises(CorruptArtifact, match=message):
        PackageEntry.from_json(value, "the file")


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("format",), "mlx_moe.plan", "'mlx_moe.plan' version 2"),
        (("version",), 1, "version 1; .* version 2"),
        (("weights",), "int3", "weights: .* found 'int3'"),
        (("identity",), {"name": 3}, "identity"),
        (("packages",), {}, "packages: expected a list"),
        (("packages", 1), entry("g0").to_json(), "same id"),
        (("packages", 0, "id"), "../../elsewhere", "id: expected a file's name"),
        (("packages", 0, "path"), "../elsewhere", "'g0': path"),
        (("packages", 0, "path"), ".", "its path is '.'"),
        (("packages", 0, "path"), "g1.mlpackage", "its path is 'g1.mlpackage'"),
        (
            ("packages", 0, "files"),
            {"a\0b": {"bytes": 1, "sha256": "x"}},
            r"'g0': files\.a.*expected a path",
        ),
        (("packages", 0, "blob"), "/etc/passwd", "'g0': blob"),
        (("packages", 0, "blob"), "Manifest.txt", "not among its files"),
        (("packages", 0, "experts"), [3, 2], "not its experts'"),
        (("packages", 0, "split"), [0, 3], "split and inner"),
        (("packages", 0, "functions"), {"32": PLACE}, "its tier is no function"),
        (("packages", 0, "functions"), {"wide": PLACE}, r"functions\.wide: expected a number"),
        (("packages", 0, "functions"), {"64": "c64"}, r"functions\.64: expected an object"),
        (("packages", 0, "functions", "64", "package"), "../p", r"functions\.64\.package: exp"),
        (("packages", 0, "functions", "64", "package"), "c64.mlpackage", "not in its packages"),
        (("packages", 0, "functions", "64", "name"), None, "not in its packages"),
        (("macos",), 14, "not all packages are for macOS 14"),
        (("macos",), 13, "macOS 13"),
        (("packages", 0, "kind"), "mlp", "kind and gates"),
        (("packages", 0, "files", BLOB, "bytes"), 95, "ends past its blob"),
        (("packages", 0, "tensors", 0, "up", "offset"), -2, r"tensors\[0\]\.up\.offset"),
        (("packages", 0, "tensors", 0, "up", "offset"), 82, "ends past its blob"),
        (("packages", 0, "tensors", 0, "up", "offset"), 1 << 70, "offset: expected a whole"),
        (("packages", 0, "tensors", 1, "gate", "scale_offset"), 95, "ends past its blob"),
        (("packages", 0, "tensors", 1, "gate", "scale_offset"), None, "scale_offset None"),
        (("packages", 0, "tensors", 0, "down", "shape"), [], "down.shape: expected one or two"),
        (("packages", 0, "tensors", 0, "down", "shape"), [2, 4], "another shape"),
        (("packages", 0, "tensors", 0, "down"), None, "no up or down"),
        (("packages", 0, "activation_parameters"), {"alpha": "x"}, r"activation_parameters\.alpha"),
        (
            ("packages", 0, "activation_parameters"),
            {"alpha": 10**400},
            r"activation_parameters\.alpha",
        ),
    ],
)
def test_what_cannot_be_is_named(path: Any, value: Any, message: str, tmp_path: Path) -> None:
    manifest(tmp_path).save()
    changed = json.loads((tmp_path / "manifest.json").read_text())
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "manifest.json").write_text(json.dumps(changed))
    with pytest.raises(CorruptArtifact, match=message):
        Manifest.load(tmp_path)


def test_sizes_do_not_wrap() -> None:
    assert Tensor(0, "fp16", (1 << 32, 1 << 32)).end == 1 << 65


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 200), st.text(max_size=3), st.just([]), st.just({})
)


@given(st.data())
def test_any_change_is_an_error_or_the_same_kind_of_entry(data: st.DataObject) -> None:
    made = data.draw(st.sampled_from([entry, separate]))
    value = copy.deepcopy(json.loads(json.dumps(made().to_json())))
    place: Any = value
    while True:
        key = data.draw(
            st.sampled_from(list(place) if isinstance(place, dict) else range(len(place)))
        )
        inner = place[key]
        if not (isinstance(inner, dict | list) and inner) or data.draw(st.booleans()):
            break
        place = inner
    if isinstance(place, dict) and data.draw(st.booleans()):
        del place[key]
    else:
        place[key] = data.draw(VALUES)
    try:
        found = PackageEntry.from_json(value, "the file")
    except CorruptArtifact as error:
        assert str(error).startswith("the file")
    else:
        size = found.files[found.blob].bytes
        assert all(0 <= t.offset <= t.end <= size for e in found.tensors for t in (e.up, e.down))


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CorruptArtifact, match="there is no artifacts directory"):
        Manifest.load(tmp_path / "none")
    with pytest.raises(CorruptArtifact, match="writes last"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 100_000])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(CorruptArtifact, match="manifest.json"):
        Manifest.load(tmp_path)
