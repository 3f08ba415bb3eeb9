"""Files of arrays that claim more than they hold are refused before memory is taken for them."""

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_data import skewed

from mlx_moe import npz_file
from mlx_moe.calibration import Calibration
from mlx_moe.errors import CorruptFile
from mlx_moe.npz_file import read_npz, write_npz

FORM = {"format": "test", "version": 1}
MOST = 320 << 20  # bytes: more than any file may unpack to at such a ratio


def header(shape: tuple[int, ...], dtype: str = "<u4") -> bytes:
    out = io.BytesIO()
    described = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, described)
    return out.getvalue()


def write(path: Path, arrays: dict[str, bytes], meta: Any = FORM) -> Path:
    text = io.BytesIO()
    np.save(text, np.array(json.dumps(meta)))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in {"meta": text.getvalue(), **arrays}.items():
            file.writestr(f"{name}.npy", data)
    return path


def test_what_is_asked_for_is_read_and_nothing_else(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.zeros(0, np.uint16)}
    write_npz(tmp_path / "x.npz", FORM, arrays)
    meta, found = read_npz(tmp_path / "x.npz", "test", 1)
    assert meta == FORM and list(found) == ["a", "b"]
    assert np.array_equal(found.take("a", np.int32, (None, 3)), arrays["a"])
    for dtype, shape in ((np.int64, (2, 3)), (np.int32, (3, 2)), (np.int32, (6,))):
        with pytest.raises(CorruptFile, match=r"a is int32 \[2, 3\]; expected"):
            found.check("a", dtype, shape)
    with pytest.raises(CorruptFile, match="c is missing"):
        found.take("c", np.int32, ())


@pytest.mark.parametrize(
    "data",
    [
        header((1 << 40,)) + bytes(8),
        header((4,)) + bytes(8),
        header((1,)) + bytes(8),
        header((-2,)) + bytes(8),
        header((1,), "|O") + bytes(8),
        b"no array",
        b"",
    ],
)
def test_a_header_must_fit_its_entry(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CorruptFile, match=r"x\.npz"):
        read_npz(write(tmp_path / "x.npz", {"a": data}), "test", 1)


def test_what_unpacks_to_far_more_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(npz_file, "MOST_UNPACKED", 1 << 20)
    file = write(tmp_path / "x.npz", {"a": header((1 << 19,)) + bytes(1 << 21)})
    with pytest.raises(CorruptFile, match="would unpack to"):
        read_npz(file, "test", 1)
    random = np.random.default_rng(0).integers(0, 1 << 30, 1 << 19, np.uint32)
    write_npz(file, FORM, {"a": random})
    assert np.array_equal(read_npz(file, "test", 1)[1]["a"], random)


def test_a_calibration_of_many_zeros_takes_no_memory(tmp_path: Path) -> None:
    """As an attacker would: 320 MiB of zeros in 320 KB, its header and its size honest."""
    good, bad = tmp_path / "good.npz", tmp_path / "bad.npz"
    skewed(1).save(good)
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(bad, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if name != "loads.0.npy":
                new.writestr(name, old.read(name))
        with new.open("loads.0.npy", "w", force_zip64=True) as entry:
            entry.write(header((MOST // 4,)))
            for _ in range(64):
                entry.write(bytes(MOST // 64))
    assert Calibration.load(good)
    code = (
        "import resource, sys; from mlx_moe.calibration import Calibration\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: Calibration.load(sys.argv[1])\n"
        "except Exception as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(bad)], capture_output=True, text=True, check=True
    )
    message, grown = done.stdout.splitlines()
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    assert "bad.npz" in message and "would unpack to" in message
    assert int(grown) * unit < 64 << 20
