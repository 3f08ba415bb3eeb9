"""The machine's floor: memory read bandwidth and arithmetic peak.

    python benchmarks/floor.py [--threads 1 2] [--json F]

Bandwidth is measured: threads read disjoint parts of an array larger than the last-level cache. It
is what numpy reaches; kernels that ask memory ahead, as ours do, can go a little beyond.
The arithmetic peak is computed, cores x FLOP a cycle x the clock that the system reports; FLOP a
cycle by instruction set (Intel's optimisation manual, Sapphire Rapids; one tile product of
16 x 16 x 32 bf16 every 16 cycles): amx 1024 in bf16; vnni 128 (two products of 8 bits for one of
16); avx512 64 and avx2 32 in f32.
"""

from __future__ import annotations

import argparse
import os
import re
import threading
import time
from functools import lru_cache
from pathlib import Path

for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import numpy as np  # noqa: E402  (after the limits that it reads when it loads)
from common import last_level_cache_bytes, print_machine, write_json  # noqa: E402

from mlx_moe.tables import table  # noqa: E402

FLOP_PER_CYCLE = {"amx": 1024, "vnni": 128, "avx512": 64, "avx2": 32, "neon": 32, "scalar": 4}
DEFAULT_GHZ = 2.6


@lru_cache
def bandwidth(threads: int, repeats: int = 5) -> float:
    """Bytes a second that so many threads read, the best of some tries."""
    size = min(max(2 * last_level_cache_bytes(), 256 << 20), 2 << 30)
    parts = np.array_split(np.ones(size // 4, np.float32), threads)
    best = min(_read_all(parts) for _ in range(repeats))
    return size / best


def _read_all(parts: list[np.ndarray]) -> float:
    readers = [threading.Thread(target=np.dot, args=(part, part)) for part in parts]
    start = time.perf_counter()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return time.perf_counter() - start


def clock_ghz() -> float:
    """The clock of the first core in /proc/cpuinfo."""
    try:
        found = re.search(r"cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return float(found.group(1)) / 1000 if found else DEFAULT_GHZ


def peak_flops(isa: str, threads: int) -> float:
    """FLOP a second at most."""
    return threads * FLOP_PER_CYCLE[isa] * clock_ghz() * 1e9


def floor_seconds(read_bytes: float, flops: float, isa: str, threads: int) -> float:
    """No kernel is faster: every byte read once, or every operation at peak."""
    return max(read_bytes / bandwidth(threads), flops / peak_flops(isa, threads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json")
    options = parser.parse_args()
    print_machine()
    results = {
        threads: {
            "read_gb_per_s": bandwidth(threads) / 1e9,
            **{
                f"{isa}_gflops": peak_flops(isa, threads) / 1e9
                for isa in ("amx", "vnni", "avx512", "avx2")
            },
        }
        for threads in options.threads
    }
    header = ["threads", *next(iter(results.values()))]
    print(table(header, [[t, *(f"{v:.1f}" for v in row.values())] for t, row in results.items()]))
    write_json(options.json, results)


if __name__ == "__main__":
    main()
