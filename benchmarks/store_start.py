"""Seconds to the first token with and without saved counts, and memory beyond the limit."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import format_seconds
from store_checkpoint import (
    EXPERTS,
    LAYERS,
    TOP_K,
    WIDTH,
    decode,
    draws,
    drop_cache,
    open_store,
    slot_bytes,
    touch_memory,
)

from mlx_moe.store_forward import Glu

OTHER = 0.5  # seconds that loading the other weights and the tokenizer takes at least
LEAST, MOST = 1.5, 300e6  # x faster; bytes
CHILD = (
    "import sys; sys.path.insert(0, sys.argv[1]); import store_start\n"
    "from pathlib import Path\n"
    "store_start.memory_child(Path(sys.argv[2]), *map(int, sys.argv[3:]))\n"
)


def quarter(path: Path, inner: int) -> int:
    return LAYERS * EXPERTS * slot_bytes(path, inner) // 4


def first_token(path: Path, inner: int, memory: int, counts: Path, warm: bool) -> float:
    """Seconds that the first token takes once other loading is done."""
    drop_cache(path)
    touch_memory(memory + (256 << 20))
    options = {"direct": True, "counts": counts, "warm": warm}
    begun = time.perf_counter()
    with open_store(path, inner, memory, **options) as store:
        time.sleep(OTHER)
        decode(store, draws(40)[-1:])
        return time.perf_counter() - begun - OTHER


def measure_first(path: Path, inner: int, repeats: int, results: dict[str, Any]) -> list[str]:
    counts, memory = path.with_name("first.npz"), quarter(path, inner)
    with open_store(path, inner, memory, direct=True, counts=counts) as store:
        decode(store, draws(30))
    sides: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(repeats):
        for warm in (True, False) if repeat % 2 else (False, True):
            sides[warm].append(first_token(path, inner, memory, counts, warm))
    cold, warmed = (statistics.median(sides[warm]) for warm in (False, True))
    print(
        f"first token: {format_seconds(cold)} ({min(sides[False]):.2f}-{max(sides[False]):.2f} s), "
        f"with counts {format_seconds(warmed)} ({min(sides[True]):.2f}-{max(sides[True]):.2f} s): "
        f"{cold / warmed:.2f} x faster"
    )
    results["first_token"] = {"cold": sides[False], "warmed": sides[True]}
    if cold / warmed < LEAST:
        return [f"first token: {cold / warmed:.2f} x faster, expected {LEAST}"]
    return []


def measure_memory(path: Path, inner: int, results: dict[str, Any]) -> list[str]:
    limit = quarter(path, inner)
    given = [str(Path(__file__).parent), str(path), str(inner), str(limit), "12"]
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, *given], capture_output=True, text=True, check=True
    )
    beyond = results["memory_beyond_limit"] = int(ran.stdout) - limit
    print(f"memory: limit {limit / 1e6:.0f} MB, peak {beyond / 1e6:+.0f} MB beyond it")
    return [f"memory: {beyond / 1e6:+.0f} MB, at most +300"] if beyond > MOST else []


def memory_child(path: Path, inner: int, memory: int, tokens: int) -> None:
    """Prints the bytes of memory that this process had at most, less before the store."""
    before = most_memory()
    with open_store(path, inner, memory, direct=True) as store:
        decode(store, draws(tokens))
        forward = Glu(store.experts[0])
        x = mx.random.normal((512, WIDTH)).astype(mx.bfloat16)
        ids = mx.argsort(mx.random.uniform(shape=(512, EXPERTS)))[:, :TOP_K].astype(mx.uint32)
        ids = mx.contiguous(ids)
        mx.eval(x, ids)
        for layer in store.layers.values():
            mx.eval(layer.run(x, ids, None, forward))
    print(most_memory() - before)


def most_memory() -> int:
    """Bytes that this process had at most; getrusage would count its parent's, too."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024
