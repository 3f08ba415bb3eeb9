"""Calibration files: what is written is read again, and nothing else is."""

import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_moe import Calibration, InvalidArgument
from mlx_moe.calibration import (
    ARRAYS,
    LayerFacts,
    LayerStatistics,
    SharedFacts,
    Source,
    WeightFacts,
    read_npz,
    write_npz,
)
from mlx_moe.errors import CorruptFile, DiskFull, IdentityMismatch
from mlx_moe.identity import ModelIdentity
from mlx_moe.skew import cold, gini, top_share

EXPERTS, CHUNKS = 6, 3
IDENTITY = ModelIdentity("some/model", layers="ab" * 32)
FACTS = LayerFacts(
    name="model.layers.3.mlp.switch_mlp",
    family="qwen2_moe",
    kind="glu",
    experts=EXPERTS,
    top_k=2,
    hidden=64,
    inner=128,
    activation="SwiGLU",
    biases=False,
    weights=WeightFacts("affine", 4, 64, "bfloat16"),
    shared=SharedFacts("model.layers.3.mlp.shared_expert", 32),
)


def calibration() -> Calibration:
    rng = np.random.default_rng(0)
    loads = rng.integers(0, 5, (CHUNKS, EXPERTS)).astype(np.uint32)
    together = rng.integers(0, 3, (EXPERTS, EXPERTS)).astype(np.uint64)
    together += together.T
    np.fill_diagonal(together, loads.sum(0))
    quantiles = np.sort(rng.random((EXPERTS, 5)).astype(np.float32), axis=1)
    nothing = np.full((EXPERTS, 5), np.nan, np.float32)
    plain = replace(FACTS, name="last", shared=None, weights=WeightFacts(None, None, None, "f"))
    statistics = [
        LayerStatistics(loads, together, quantiles, quantiles),
        LayerStatistics(loads, together, nothing, quantiles),
    ]
    sources = [Source("text.jsonl", 40, "cd" * 32)]
    return Calibration(IDENTITY, 16, [16, 16, 15], [FACTS, plain], statistics, sources)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    calibration().save(tmp_path / "c.npz")
    return tmp_path / "c.npz"


def test_what_was_saved_is_loaded(path: Path) -> None:
    expected, found = calibration(), Calibration.load(path)
    for name in ("identity", "chunk", "chunk_tokens", "layers", "sources", "quantiles", "tokens"):
        assert getattr(found, name) == getattr(expected, name)
    for i in range(2):
        np.testing.assert_array_equal(found.loads(i), expected.loads(i))
        np.testing.assert_array_equal(found.coactivation(i), expected.coactivation(i))
        np.testing.assert_array_equal(found.score_quantiles(i), expected.score_quantiles(i))
        np.testing.assert_array_equal(found.norm_quantiles(i), expected.norm_quantiles(i))
        assert found.popularity(i).sum() == pytest.approx(1)
    assert found.index("last") == 1
    with pytest.raises(InvalidArgument, match="no layer 'first'"):
        found.index("first")
    again = path.with_name("again.npz")
    found.save(again)
    assert again.read_bytes() == path.read_bytes()
    assert sorted(p.name for p in path.parent.iterdir()) == ["again.npz", "c.npz"]


def test_another_model_is_refused(path: Path) -> None:
    found = Calibration.load(path)
    found.check_model(IDENTITY)
    with pytest.raises(IdentityMismatch, match="'some/model'.*'other'"):
        found.check_model(ModelIdentity("other", layers="00"), "c.npz")


def test_every_byte_that_is_cut_is_missed(path: Path) -> None:
    data = path.read_bytes()
    for cut in (*range(0, len(data), 97), len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(CorruptFile, match=r"c\.npz"):
            Calibration.load(path)


def test_changed_bytes_are_never_another_calibration(path: Path) -> None:
    """Each byte in turn: an error that names the file, or (bytes that say nothing) the same."""
    data, expected = path.read_bytes(), calibration()
    refused = 0
    for at in range(0, len(data), 5):
        changed = bytearray(data)
        changed[at] ^= 0x5A
        path.write_bytes(changed)
        try:
            found = Calibration.load(path)
        except CorruptFile as error:
            assert "c.npz" in str(error)
            refused += 1
            continue
        assert found.layers == expected.layers and found.identity == IDENTITY
        for a, b in zip(found.statistics, expected.statistics, strict=True):
            for name in ARRAYS:
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert refused > len(data) / 5 / 2  # of so small a file, much is zip's dates and attributes


def _meta(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda meta, arrays: meta.update(changes)


def _layer(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda meta, arrays: meta["layers"][0].update(changes)


def _array(name: str, change: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    return lambda meta, arrays: arrays.update({name: change(arrays[name])})


def _set(at: Any, value: Any) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array[at] = value
        return array

    return change


CHANGES: list[tuple[Callable[[Any, Any], Any], str]] = [
    (_meta(format="mlx_moe.plan"), "is not a mlx_moe.calibration"),
    (_meta(version=2), "version 2"),
    (_meta(identity={"name": 5}), "identity"),
    (_meta(chunk=0), "chunk: .* found 0"),
    (_meta(chunk="16"), "chunk: .* found '16'"),
    (_meta(chunk=10**400), "chunk: .* found 1000"),
    (_meta(chunk_tokens=[]), "chunk_tokens"),
    (_meta(chunk_tokens=[16, 16, 17]), "between 1 and 16"),
    (_meta(chunk_tokens=[16, 16]), r"loads\.0 is .* \[3, 6\]; expected uint32 \[2, 6\]"),
    (_meta(chunk_tokens=[1, 1, 1]), "more than 2 for each token"),
    (_meta(quantiles=[0.5, 0.1, 0.6, 0.7, 0.8]), "quantiles: expected ascending"),
    (_meta(quantiles=[0.5]), r"score_quantiles\.0 .*expected float32 \[6, 1\]"),
    (_meta(layers=[]), "at least one layer"),
    (_meta(layers=[{}, {}]), r"layers\[0\].weights is missing"),
    (_meta(sources=None), "sources"),
    (_meta(sources=[{"path": "a"}]), "source"),
    (_layer(experts=7), r"expected uint32 \[3, 7\]"),
    (_layer(top_k=9), "top_k: .* found 9"),
    (_layer(top_k=True), "top_k: .* found True"),
    (_layer(hidden=-1), r"layers\[0\].hidden: .* found -1"),
    (_layer(inner=10**400), r"layers\[0\].inner: .* found 1000"),
    (_layer(kind="moe"), "kind: .* found 'moe'"),
    (_layer(biases="no"), "biases: .* found 'no'"),
    (_layer(weights=None), "weights: expected an object"),
    (_layer(shared={"name": "x"}), "shared.inner is missing"),
    (lambda meta, arrays: arrays.pop("loads.1"), r"\['loads.1'\]"),
    (lambda meta, arrays: arrays.update({"loads.2": arrays["loads.1"]}), r"\['loads.2'\]"),
    (_array("loads.0", lambda a: a.astype(np.int64)), r"loads\.0 is int64"),
    (_array("coactivation.0", _set((0, 1), 10**6)), "coactivation of .* does not go"),
    (_array("coactivation.1", _set((2, 2), 0)), "coactivation of last"),
    (_array("norm_quantiles.0", _set((1, 0), 10**6)), "norm_quantiles of .* ascend"),
    (_array("score_quantiles.0", _set((1, 0), -1)), "score_quantiles of .* negative"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_numbers_that_cannot_be_are_named(path: Path, change: Any, message: str) -> None:
    meta, lazy = read_npz(path, "mlx_moe.calibration", 1)
    arrays = dict(lazy)
    change(meta, arrays)
    write_npz(path, meta, arrays)
    with pytest.raises(CorruptFile, match=rf"c\.npz.*{message}"):
        Calibration.load(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    with pytest.raises(InvalidArgument, match="no file"):
        Calibration.load(path)
    path.mkdir()
    with pytest.raises(CorruptFile):
        Calibration.load(path)
    other = tmp_path / "README.md"
    other.write_text("# Not a calibration\n")
    with pytest.raises(CorruptFile, match=r"^\S+ is not a \S+ file: it is no .npz"):
        Calibration.load(other)
    for number, write in enumerate(
        (
            lambda p: p.write_text(json.dumps({"format": "mlx_moe.calibration"})),
            lambda p: np.save(p.open("wb"), np.zeros(3)),
            lambda p: np.savez(p, meta=np.array({"a": 1}, dtype=object)),  # would be unpickled
            lambda p: np.savez(p, meta=np.array("[]")),
            lambda p: np.savez(p, loads=np.zeros(3)),
            lambda p: zipfile.ZipFile(p, "w").close(),
        )
    ):
        other = tmp_path / f"{number}.npz"
        write(other)
        with pytest.raises(CorruptFile, match=rf"{number}\.npz"):
            Calibration.load(other)


def test_a_full_disk_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(DiskFull, match=r"cannot write .*c\.npz"):
        calibration().save(path)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


def test_a_read_only_file_system_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    for name in ("open", "unlink"):
        monkeypatch.setattr(Path, name, read_only)
    with pytest.raises(InvalidArgument, match=r"cannot write .*c\.npz: .*Read-only"):
        calibration().save(path)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([1, 1, 1, 1], (0, 0.25, 0)),
        ([8, 0, 0, 0], (0.75, 1, 3)),
        ([0, 0, 0, 0], (0, 0, 0)),
        ([1, 2, 3, 4, 5, 0, 0, 9], (None, 14 / 24, 2)),
    ],
)
def test_skew(loads: list[int], expected: tuple[Any, ...]) -> None:
    array = np.array(loads, np.uint32)
    differences = np.abs(array[:, None].astype(float) - array).sum()  # Gini by its definition
    brute = differences / (2 * len(loads) * max(array.sum(), 1))
    assert gini(array) == pytest.approx(brute)
    assert expected[0] is None or brute == pytest.approx(expected[0])
    assert top_share(array) == pytest.approx(expected[1]) and cold(array) == expected[2]
