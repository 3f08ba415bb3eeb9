"""Full disks and workers that die while a plan is compiled: named errors."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("coremltools")


from mlx_moe import compile as compiling
from mlx_moe import compile_worker, errors
from mlx_moe.compile import compile_plan
from mlx_moe.experts_weights import ExpertWeights
from mlx_moe.manifest import Manifest
from mlx_moe.plan import Plan


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
        **{"id": "g", "directory": str(tmp_path), "experts": [0], "weights": "fp16", "macos": 15},
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
    request = {
        "id": "g7",
        "directory": str(tmp_path),
        "experts": [0],
        "weights": "fp16",
        "macos": 15,
    }
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
        request = {
            "id": "g7",
            "directory": str(tmp_path),
            "experts": [0],
            "weights": "fp16",
            "macos": 15,
        }
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
