"""What every benchmark here shares: timing in turns, medians and spread, machine facts."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def timed(call: Callable[[], Any]) -> float:
    """Seconds that one call took."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every call, taken a, b, c, a, b, c, ... so that a busy spell hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(timed(call))
    return seconds


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median, extremes and the number of samples, in the unit that came in."""
    return {
        "median": statistics.median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        "samples": len(seconds),
    }


def spread(stats: dict[str, float]) -> str:
    """`min-max` as percentages off the median, e.g. `-3/+12 %`."""
    low = 100 * (stats["min"] / stats["median"] - 1)
    high = 100 * (stats["max"] / stats["median"] - 1)
    return f"{low:+.0f}/{high:+.0f} %"


def format_seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def last_level_cache_bytes() -> int:
    """Size of the last-level cache as Linux reports it; 32 MiB where it does not."""
    sizes = [0]
    for entry in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = entry.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1]])
    return max(sizes) or 32 << 20


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


def machine() -> dict[str, Any]:
    """Facts that a figure means nothing without."""
    return {
        "cpu": _cpu_model() or platform.machine(),
        "cores": os.cpu_count(),
        "last_level_cache_mib": last_level_cache_bytes() >> 20,
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def print_machine() -> None:
    print(", ".join(f"{key} {value}" for key, value in machine().items()))


def write_json(path: str | None, results: Any) -> None:
    """The results with the machine's facts, where a path was given."""
    if path:
        Path(path).write_text(json.dumps({"machine": machine(), "results": results}, indent=2))
