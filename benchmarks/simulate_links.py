"""Parts of simulate_check.py: the disk of the expert store, and the ring of two local ranks."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import store_checkpoint as store
from common import timed

from mlx_moe.simulate_engine import Task, Unit, run
from mlx_moe.simulate_spread import Link

SIZES = (384 << 20, 768 << 20)  # of the files; the first is fitted on
COUNTS = (1, 2, 4, 8, 16, 32)  # experts read at once; the first and the last are fitted on
RING_BYTES = (1 << 13, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 22)  # likewise
RING_CALLS, RING_TIMEOUT = 31, 120
MOST_ROUNDS = 24

RANK = """
import json, statistics, sys, time
import mlx.core as mx
group = mx.distributed.init(strict=True, backend="ring")
arrays = {size: mx.zeros(size // 4) for size in json.loads(sys.argv[1])}
mx.eval(list(arrays.values()))
seconds = {size: [] for size in arrays}
for _ in range(int(sys.argv[2])):
    for size, x in arrays.items():  # in turns
        mx.eval(mx.distributed.all_sum(mx.zeros(1)))  # both are there
        begun = time.perf_counter()
        mx.eval(mx.distributed.all_sum(x))
        seconds[size].append(time.perf_counter() - begun)
if group.rank() == 0:
    print(json.dumps({size: statistics.median(s) for size, s in seconds.items()}))
"""


def line(name: str, first: tuple[float, float], last: tuple[float, float]) -> Link:
    """The link through two measurements of (bytes, seconds)."""
    (few, short), (many, long) = first, last
    bandwidth = (many - few) / max(long - short, 1e-9)
    return Link(name, max(short - few / bandwidth, 0.0), bandwidth)


def over(link: Link, size: float) -> float:
    """Simulated seconds of one message of so many bytes."""
    unit = {link.name: Unit(link.name)}
    return run([Task(link.name, link.seconds + size / link.bandwidth)], unit).seconds


def disk() -> list[dict[str, Any]]:
    """Reads of so many experts of a layer past the page cache, both files in turns."""
    inners = [store.inner_for(size) for size in SIZES]
    with ExitStack() as stack:
        reads = []
        for inner in inners:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            store.write_model(folder / "model.safetensors", inner)
            reads.append(stack.enter_context(_Reads(folder / "model.safetensors", inner)))
        for _ in range(MOST_ROUNDS):
            for count in COUNTS:
                for one in reads:
                    one.read(count)
        measured = [one.medians() for one in reads]
    few, many = COUNTS[0], COUNTS[-1]
    each = path_bytes(inners[0])
    fitted = measured[0].pop(few), measured[0].pop(many)
    link = line("disk", (few * each, fitted[0]), (many * each, fitted[1]))
    return [
        {
            "part": "disk",
            "case": f"{count} experts of {path_bytes(inner) / 1e6:.1f} MB",
            "measured": seconds,
            "predicted": over(link, count * path_bytes(inner)),
        }
        for inner, found in zip(inners, measured, strict=True)
        for count, seconds in found.items()
    ]


def path_bytes(inner: int) -> float:
    return 3 * inner * store.WIDTH * (0.5 + 4 / store.GROUP)


class _Reads:
    """Reads of experts of one file, each of a layer that was let go since."""

    def __init__(self, path: Path, inner: int):
        memory = path.stat().st_size // 4
        self._store = store.open_store(path, inner, memory, direct=True, prefetch=False)
        self._each, self._turn = path_bytes(inner), 0
        self._seconds: dict[int, list[float]] = {count: [] for count in COUNTS}
        for layer in range(store.LAYERS // 3):  # slots that were used before
            self._acquire(layer, store.EXPERTS)

    def __enter__(self) -> _Reads:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def _acquire(self, layer: int, count: int) -> None:
        self._store._core.acquire(layer, np.arange(count, dtype=np.int32)).release()

    def read(self, count: int) -> None:
        layer, self._turn = self._turn % store.LAYERS, self._turn + 1
        before = self._store.stats()["bytes_read"]
        taken = timed(lambda: self._acquire(layer, count))
        if self._store.stats()["bytes_read"] - before >= count * self._each:
            self._seconds[count].append(taken)  # else some were there

    def medians(self) -> dict[int, float]:
        return {count: statistics.median(s) for count, s in self._seconds.items() if s}


def ring() -> list[dict[str, Any]]:
    """Sums over two ranks on this machine."""
    measured = _ranks()
    first, last = RING_BYTES[0], RING_BYTES[-1]
    link = line("ring", (first, measured[first]), (last, measured[last]))
    return [
        {
            "part": "ring",
            "case": f"sum of {size >> 10} KiB",
            "measured": measured[size],
            "predicted": over(link, size),
        }
        for size in RING_BYTES[1:-1]
    ]


def _ranks() -> dict[int, float]:
    hosts = [[f"127.0.0.1:{_free_port()}"] for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        hostfile = Path(folder) / "hosts.json"
        hostfile.write_text(json.dumps(hosts))
        arguments = [sys.executable, "-c", RANK, json.dumps(RING_BYTES), str(RING_CALLS)]
        ranks = [
            subprocess.Popen(
                arguments,
                env={**os.environ, "MLX_HOSTFILE": str(hostfile), "MLX_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [rank.communicate(timeout=RING_TIMEOUT) for rank in ranks]
        except subprocess.TimeoutExpired as error:
            raise OSError("two ranks did not finish") from error
        finally:
            for rank in ranks:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        raise OSError(f"a rank failed: {outputs[0][1][-300:]}{outputs[1][1][-300:]}")
    return {int(size): seconds for size, seconds in json.loads(outputs[0][0]).items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
