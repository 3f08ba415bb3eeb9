"""Parts of simulate_check.py: the disk of the expert store, and the ring of two local ranks."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import store
from common import timed

from mlx_moe.simulate_engine import Task, Unit, run
from mlx_moe.simulate_spread import Link

SIZES = (384 << 20, 768 << 20)  # of the files; the first is fitted on
COUNTS = (1, 2, 4, 8, 16, 32)  # experts read at once; the first and the last are fitted on
RING_BYTES = (1 << 13, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 22)  # likewise
RING_CALLS, RING_TIMEOUT = 31, 120
MOST_ROUNDS = 8

RANK = """
import json, statistics, sys, time
import mlx.core as mx
group = mx.distributed.init(strict=True, backend="ring")
found = {}
for size in json.loads(sys.argv[1]):
    x = mx.zeros(size // 4)
    mx.eval(x)
    seconds = []
    for _ in range(int(sys.argv[2])):
        mx.eval(mx.distributed.all_sum(mx.zeros(1)))  # both are there
        begun = time.perf_counter()
        mx.eval(mx.distributed.all_sum(x))
        seconds.append(time.perf_counter() - begun)
    found[size] = statistics.median(seconds)
if group.rank() == 0:
    print(json.dumps(found))
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
    """Reads of so many experts of a layer past the page cache, by the store."""
    found: list[dict[str, Any]] = []
    link: Link | None = None
    for size in SIZES:
        inner = store.inner_for(size)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            store.write_model(path, inner)
            measured = _reads(path, inner)
        each = path_bytes(inner)
        if link is None:
            few, many = COUNTS[0], COUNTS[-1]
            link = line("disk", (few * each, measured[few]), (many * each, measured[many]))
            measured = {n: s for n, s in measured.items() if n not in (few, many)}
        for count, seconds in measured.items():
            found.append(
                {
                    "part": "disk",
                    "case": f"{count} experts of {each / 1e6:.1f} MB",
                    "measured": seconds,
                    "predicted": over(link, count * each),
                }
            )
    return found


def path_bytes(inner: int) -> float:
    return 3 * inner * store.WIDTH * (0.5 + 4 / store.GROUP)


def _reads(path: Path, inner: int) -> dict[int, float]:
    seconds: dict[int, list[float]] = {count: [] for count in COUNTS}
    with store.open_store(
        path, inner, path.stat().st_size // 4, direct=True, prefetch=False
    ) as opened:
        core_store = opened._core
        for layer in range(store.LAYERS // 3):  # slots that were used before
            core_store.acquire(layer, np.arange(store.EXPERTS, dtype=np.int32)).release()
        turn = 0
        for _ in range(MOST_ROUNDS):
            for count in COUNTS:
                layer, turn = turn % store.LAYERS, turn + 1
                chosen = np.arange(count, dtype=np.int32)
                before = opened.stats()["bytes_read"]
                taken = timed(lambda at=layer, e=chosen: core_store.acquire(at, e).release())
                if opened.stats()["bytes_read"] - before >= count * path_bytes(inner):
                    seconds[count].append(taken)  # else some were there
    return {count: statistics.median(s) for count, s in seconds.items() if s}


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
