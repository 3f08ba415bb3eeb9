"""Files that are wrong, or change under the store: an error by name or the right result."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_model import forward_for, found_experts, inputs, make_layers, resident, write_checkpoint
from test_store import assert_same, opened, run_all

from mlx_moe import core
from mlx_moe.errors import (
    CorruptFile,
    FileChanged,
    ModelNotFound,
    ReadFailed,
    UnsupportedLayer,
)
from mlx_moe.store_files import Checkpoint

IDS = np.array([0, 1], np.int32)


def edit_header(shard: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a shard with another header over the same bytes."""
    data = shard.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def tensor(header: dict[str, Any]) -> dict[str, Any]:
    return next(v for k, v in sorted(header.items()) if "weight" in k)


def overlap(header: dict[str, Any]) -> None:
    first, second = [v for k, v in sorted(header.items()) if "weight" in k][:2]
    length = second["data_offsets"][1] - second["data_offsets"][0]
    begin = first["data_offsets"][0]
    second["data_offsets"] = [begin, begin + length]


def beyond(header: dict[str, Any]) -> None:
    begin, end = tensor(header)["data_offsets"]
    tensor(header)["data_offsets"] = [begin + (1 << 30), end + (1 << 30)]


def lengthen(header: dict[str, Any]) -> None:
    tensor(header)["data_offsets"][1] += 4


@pytest.mark.parametrize(
    ("change", "says"),
    (
        (overlap, "overlap"),
        (beyond, "cut short"),
        (lengthen, "shape and dtype"),
        (lambda h: tensor(h).pop("dtype"), "lacks"),
        (lambda h: tensor(h).update(shape=[1 << 40, 1 << 40]), "shape and dtype"),
    ),
    ids=("overlap", "beyond", "length", "dtype", "overflow"),
)
def test_wrong_headers_are_refused(tmp_path: Path, change: Any, says: str) -> None:
    folder = write_checkpoint(tmp_path, make_layers(1))
    shard = sorted(folder.glob("*.safetensors"))[0]
    edit_header(shard, change)
    with pytest.raises(CorruptFile, match=says) as error:
        Checkpoint.open(folder)
    assert shard.name in str(error.value)


@pytest.mark.parametrize("length", (0, 7, 20, -1, -100))
def test_cut_files_are_refused(tmp_path: Path, length: int) -> None:
    folder = write_checkpoint(tmp_path, make_layers(1))
    shard = sorted(folder.glob("*.safetensors"))[0]
    os.truncate(shard, length if length >= 0 else shard.stat().st_size + length)
    with pytest.raises(CorruptFile, match=shard.name):
        Checkpoint.open(folder)


@pytest.mark.parametrize("size", (0, 1, 5, 1 << 40, (1 << 64) - 1))
def test_wrong_header_lengths_are_refused(tmp_path: Path, size: int) -> None:
    folder = write_checkpoint(tmp_path, make_layers(1))
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    shard.write_bytes(size.to_bytes(8, "little") + data[8:])
    with pytest.raises(CorruptFile, match=shard.name):
        Checkpoint.open(folder)


def test_indexes_that_do_not_fit_the_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, make_layers(1))
    index = folder / "model.safetensors.index.json"
    first, second = sorted(path.name for path in folder.glob("*.safetensors"))
    for weight_map, says in (
        ({"nowhere": first}, "and is not"),
        ({"odd": second}, "not where it is"),
        ([1], "no index"),
        (None, "no index"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CorruptFile, match=says):
            Checkpoint.open(folder)
    index.write_text(json.dumps({"weight_map": {"odd": first}}))
    Checkpoint.open(folder)
    shutil.copy(folder / first, folder / "model-00003-of-00003.safetensors")
    with pytest.raises(CorruptFile, match=f"{first} and in"):
        Checkpoint.open(folder)
    with pytest.raises(ModelNotFound):
        Checkpoint.open(tmp_path / "none")


def test_checkpoints_that_a_loader_transforms_are_refused_by_name(tmp_path: Path) -> None:
    layers = make_layers(1)
    folder = write_checkpoint(tmp_path, layers)
    checkpoint = Checkpoint.open(folder)
    ((name, layer),) = layers.items()
    with pytest.raises(UnsupportedLayer, match=r"elsewhere.*mlx_lm\.convert"):
        found_experts(checkpoint, {"elsewhere": layer})
    other = make_layers(1, "affine 3")[name]
    with pytest.raises(UnsupportedLayer, match=r"its loader transforms it.*mlx_lm\.convert"):
        found_experts(checkpoint, {name: other})


@pytest.mark.parametrize("direct", (False, True), ids=("cached", "direct"))
@pytest.mark.parametrize("how", ("overwritten", "cut", "replaced", "deleted"))
def test_files_that_change_while_open(tmp_path: Path, how: str, direct: bool) -> None:
    layers = make_layers(1)
    folder = write_checkpoint(tmp_path / "a", layers)
    other = write_checkpoint(tmp_path / "b", make_layers(1, seed=2))
    ((_, layer),) = layers.items()
    with opened(folder, layers, 4, direct=direct) as store:
        (stored,) = store.layers.values()
        forward = forward_for(stored.experts, layer)
        x, ids, _ = inputs(1)
        expected = resident(layer, stored.experts, forward, x, ids, None)
        time.sleep(0.02)  # file times are kept to some milliseconds
        for shard in folder.glob("*.safetensors"):
            if how == "overwritten":
                shard.write_bytes((other / shard.name).read_bytes())
            elif how == "cut":
                os.truncate(shard, 5000)
            elif how == "replaced":
                os.replace(other / shard.name, shard)
            else:
                shard.unlink()
        with pytest.raises(FileChanged):
            store.check_files()
        if how in ("overwritten", "cut"):
            with pytest.raises(FileChanged, match="written to while it was in use"):
                stored.run(x, ids, None, forward)
        else:  # what is open stays what it was
            assert_same(stored.run(x, ids, None, forward), expected)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ReadFailed, match="not a regular file"):
        Checkpoint.open(tmp_path)
    with pytest.raises(ReadFailed, match="cannot be opened"):
        core.safetensors(str(tmp_path / "nothing"))


def test_a_store_survives_what_is_done_to_it_in_threads(tmp_path: Path) -> None:
    """Closed and dropped while forwards run: an error by name or the right result, and no hang."""
    from mlx_moe.errors import MoEError

    layers = make_layers()
    folder = write_checkpoint(tmp_path, layers)
    for _ in range(5):
        store = opened(folder, layers, 4)
        ended: list[str] = []

        def work(store: Any = store, ended: Any = ended) -> None:
            try:
                run_all(store, layers, (1,) * 200)
                ended.append("whole")
            except MoEError as error:
                ended.append(type(error).__name__)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        store.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert len(ended) == 2 and set(ended) <= {"whole", "StoreClosed"}


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
from mlx_moe import core
path, layer = sys.argv[1:]
store = core.Store([path], [("a", [("dense", 0, 0, [[layer], [], [], [], []])])], 2 * 4096)
held = store.acquire(0, np.array([0, 1], np.int32))
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    store.acquire(0, np.array([2, 3], np.int32))
except KeyboardInterrupt:
    held.release()
    store.acquire(0, np.array([2, 3], np.int32)).release()
    print("interrupted")
"""


def test_ctrl_c_ends_a_wait(tmp_path: Path) -> None:
    import mlx.core as mx

    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"a": mx.zeros((6, 8, 128))})
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(path), "a"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout == "interrupted\n", ran.stderr
    assert ran.returncode != -signal.SIGINT


NO_MEMORY = """
import json, resource, sys
import numpy as np
from mlx_moe import core
from mlx_moe.errors import MemoryLimit
path, name = sys.argv[1:]
store = core.Store([path], [("a", [("dense", 0, 0, [[name], [], [], [], []])])], 1 << 40)
pages = int(open("/proc/self/statm").read().split()[0])
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (16 << 20), before[1]))
for _ in range(2):
    try:
        store.acquire(0, np.array([0, 1], np.int32))
    except MemoryLimit as error:
        print(error, flush=True)
resource.setrlimit(resource.RLIMIT_AS, before)
store.acquire(0, np.array([0, 1], np.int32)).release()
print("there", store.resident(0))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="others do not limit a process's addresses")
def test_a_system_without_memory_for_a_slot(tmp_path: Path) -> None:
    """What fails half way lets go of what it holds, under the lock that it has."""
    path, shape = tmp_path / "model.safetensors", [4, 4096, 4096]
    header = {"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * math.prod(shape)]}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + 4 * math.prod(shape))  # 64 MB an expert, none on the disk
    ran = subprocess.run(
        [sys.executable, "-c", NO_MEMORY, str(path), "x"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, second, there = ran.stdout.splitlines() or [ran.stderr, "", ""]
    assert first == second and "the system has no memory for a slot of 67108864 bytes" in first
    assert there == "there [0, 1]"
