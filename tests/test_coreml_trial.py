"""The process of a package's first load: what it tries, and how it can end."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from coreml_stand_in import ON, Executor, fake_core

from mlx_moe import core
from mlx_moe.coreml_trial import Trials, trial_request, try_package
from mlx_moe.errors import MoEError
from mlx_moe.package_form import functions


def request(tmp_path: Path, capacities: tuple[int, ...] = (32,)) -> dict[str, Any]:
    package, compiled = tmp_path / "g0.mlpackage", tmp_path / ".g0"
    return trial_request(package, compiled, functions(capacities, 15), 2, 4, "x", "y")


def test_a_first_prediction_that_fails_fails_the_package(tmp_path: Path) -> None:
    class Failing(Executor):
        def submit(self, tiles: Any) -> Any:
            return SimpleNamespace(wait=lambda: ["a prediction failed: Error (com.apple.CoreML 5)"])

    fake = fake_core(tmp_path, CoreMLExecutor=Failing)
    with pytest.raises(MoEError, match="the first prediction failed: a prediction failed"):
        try_package(request(tmp_path), fake)


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
