"""The file of expert counts between processes: shared, killed, forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from store_model import forward_for, inputs, make_layers, write_checkpoint
from test_store import opened, run_all

from mlx_moe.errors import MoEError
from mlx_moe.store_counts import ExpertCounts, locked

SAVING = """
import sys
import numpy as np
from pathlib import Path
from mlx_moe.store_counts import ExpertCounts
counts = ExpertCounts([("a", 64), ("b", 64)])
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(sys.argv[2])):
    counts.add(0, np.array([[int(sys.argv[3])]]))
    counts.save(Path(sys.argv[1]))
"""


def saver(path: Path, times: int, expert: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", SAVING, str(path), str(times), str(expert)]
    process = subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_processes_that_share_a_file_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "counts.npz"
    processes = [saver(path, 60, expert) for expert in (1, 2)]
    for process in processes:
        begin(process)
    for process in processes:
        assert process.wait(120) == 0
    uses = ExpertCounts.load(path).uses[0]
    assert uses[1] == uses[2] == 60 and uses.sum() == 120


def test_a_kill_while_saving_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "counts.npz"
    last = 0
    for delay in (0.01, 0.03, 0.06):
        process = saver(path, 100000, 1)
        begin(process)
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        if path.exists():
            found = int(ExpertCounts.load(path).uses[0][1])
            assert found >= last
            last = found
    counts = ExpertCounts([("a", 64), ("b", 64)])
    counts.add(0, np.array([[1]]))
    counts.save(path)
    assert ExpertCounts.load(path).uses[0][1] == last + 1
    assert {p.name for p in tmp_path.iterdir()} == {"counts.npz", ".counts.npz.lock"}


def test_a_forked_child_saves_nothing_of_its_parents(tmp_path: Path) -> None:
    layers, path = make_layers(1), tmp_path / "counts.npz"
    with opened(write_checkpoint(tmp_path / "model", layers), layers, 8, counts=path) as store:
        run_all(store, layers, (1,))
        (stored,), x, ids = store.layers.values(), *inputs(1)[:2]
        mx.eval(x, ids)
        store._keep_at = 0.0
        if not (child := os.fork()):  # where MLX computes nothing any more
            try:
                stored.run(x, ids, None, forward_for(stored.experts, layers[stored.experts.name]))
            except MoEError:
                os._exit(int(store._keep_at != 0.0))
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not path.exists()


def test_a_child_forked_while_the_file_is_held_does_not_keep_it(tmp_path: Path) -> None:
    path = tmp_path / "counts.npz"
    ends, end = os.pipe()
    with locked(path, 0):
        if not (child := os.fork()):
            os.close(end)
            os.read(ends, 1)  # lives until the parent closes its end
            os._exit(0)
    try:
        with locked(path, 0), pytest.raises(TimeoutError), locked(path, 0):
            pass
    finally:
        os.close(end)
        os.close(ends)
        os.waitpid(child, 0)
