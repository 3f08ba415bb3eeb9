"""How fast the store reads, against `dd`-like reading of the same file.

The file is read a layer at a time, a pass after the other, and each layer of a pass is the turn of
another side. So what a host keeps of the disk helps no side more than others.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from store_checkpoint import EXPERTS, LAYERS, drop_cache, open_store, touch_memory

SEQUENTIAL = {"dd direct, 1 MiB": (True, 1 << 20), "dd direct, 4 MiB": (True, 4 << 20)}
CACHED = {"dd cached, 1 MiB": (False, 1 << 20)}
LEAST = 0.8  # of what dd reaches


def sequential(path: Path, direct: bool, block: int) -> Callable[[int], float]:
    """Reads the part of the file where a layer is; bytes a second."""
    file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    buffer, part = mmap.mmap(-1, block), path.stat().st_size // LAYERS

    def run(layer: int) -> float:
        first, begun = part * layer // block * block, time.perf_counter()
        for at in range(first, first + part - block, block):
            os.preadv(file, [buffer], at)
        return len(range(first, first + part - block, block)) * block / since(begun)

    return run


def since(begun: float) -> float:
    return time.perf_counter() - begun


def stored(path: Path, inner: int, direct: bool) -> Callable[[int], float]:
    """Has the store read all experts of a layer, into slots that had others before."""
    everything = np.arange(EXPERTS, dtype=np.int32)
    store = open_store(path, inner, path.stat().st_size // 8, direct=direct, prefetch=False)
    for layer in range(LAYERS - LAYERS // 6, LAYERS):
        store._core.acquire(layer, everything).release()

    def run(layer: int) -> float:
        before, begun = store.stats()["bytes_read"], time.perf_counter()
        store._core.acquire(layer, everything).release()
        return float((store.stats()["bytes_read"] - before) / since(begun))

    return run


def measure_reads(path: Path, inner: int, results: dict[str, Any]) -> list[str]:
    """Prints the rates; returns what missed its mark."""
    touch_memory(path.stat().st_size // 3)
    sides = {name: sequential(path, *how) for name, how in (SEQUENTIAL | CACHED).items()}
    sides |= {f"store {k}": stored(path, inner, k == "direct") for k in ("direct", "cached")}
    names = list(sides)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(len(names)):
        for layer in range(LAYERS):
            name = names[(layer + turn) % len(names)]
            drop_cache(path)
            rates[name].append(sides[name](layer))
    # Bytes over time: the parts are of one size.
    mean = {name: statistics.harmonic_mean(found) for name, found in rates.items()}
    missed = []
    for name, rivals in (("store direct", SEQUENTIAL), ("store cached", CACHED)):
        base = max(mean[rival] for rival in rivals)
        if mean[name] < LEAST * base:
            missed.append(f"{name}: {mean[name] / base:.2f} x dd, expected {LEAST}")
        for side in (*rivals, name):
            low, _, high = statistics.quantiles(rates[side], n=4)
            print(
                f"read, {side:<17} {mean[side] / 1e9:5.2f} GB/s ({low / 1e9:.2f}-{high / 1e9:.2f})"
                f"  {mean[side] / base:.2f} x dd"
            )
    results["read"] = rates
    return missed
