"""Times of a static executor on this machine: dispatches, groups by size and capacity, overlap."""

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from . import core
from .measured import Sample
from .tune_cold import Shape, timed, timed_once

SMALL = 32  # features and capacity of a program that costs next to nothing but its dispatch
AT_ONCE = (1, 2, 4, 8)
SCALE = 0.1  # of weights: outputs of small and of large experts are within float16's range


class Programs(Protocol):
    """Makes programs of random experts for an executor."""

    executor: Any

    def load(self, hidden: int, inner: int, experts: int, capacities: Sequence[int]) -> int: ...
    def close(self) -> None: ...


class HostPrograms:
    """For the executor that computes static programs on the CPU."""

    def __init__(self, directory: Path):
        self.executor = core.HostExecutor()
        self._directory = directory
        self._count = 0

    def load(self, hidden: int, inner: int, experts: int, capacities: Sequence[int]) -> int:
        size = 2 * hidden * inner
        self._count += 1
        blob = self._directory / f"{self._count}.bin"
        values = np.random.default_rng(0).standard_normal(3 * hidden * inner, np.float32) * SCALE
        with blob.open("wb") as file:
            for _ in range(experts):
                file.write(values.astype(np.float16).tobytes())
        tensors: list[Any] = [  # gate, up, down, and no biases
            (*(((3 * expert + matrix) * size, None) for matrix in range(3)), None, None, None)
            for expert in range(experts)
        ]
        loaded = self.executor.load(str(blob), hidden, inner, "swiglu", sorted(capacities), tensors)
        return int(loaded)

    def close(self) -> None: ...


class StaticPath:
    """Dispatches of programs; `close` deletes their files."""

    def __init__(self, make: Callable[[Path], Programs] = HostPrograms):
        self._directory = tempfile.TemporaryDirectory(prefix="mlx-moe-tune-")
        self.programs = make(Path(self._directory.name))

    def close(self) -> None:
        self.programs.close()
        self._directory.cleanup()

    def dispatch(self, repeats: int) -> tuple[float, float]:
        """(dispatch_seconds, sync_seconds): of each further program, and of the wait for all."""
        program = self.programs.load(SMALL, SMALL, 1, [SMALL])
        tile, out = tiles(1, SMALL, SMALL)
        seconds = [timed(partial(self._run, [(program, tile, out)] * n), repeats) for n in AT_ONCE]
        each, once = np.polyfit(AT_ONCE, seconds, 1)
        return max(float(each), 1e-7), max(float(once), 1e-7)

    def samples(
        self, shape: Shape, experts: int, capacities: Sequence[int], repeats: int
    ) -> list[Sample]:
        """Of one group size, at every capacity."""
        program = self.programs.load(shape.hidden, shape.inner, experts, capacities)
        found = []
        for capacity in capacities:
            tile, out = tiles(experts, capacity, shape.hidden)
            seconds = timed(partial(self._run, [(program, tile, out)]), repeats)
            sizes = (shape.hidden, shape.inner, experts, capacity)
            found.append(Sample("static", *sizes, seconds))
        return found

    def overlap(
        self, shape: Shape, experts: int, capacity: int, cold: Callable[[], None], repeats: int
    ) -> float:
        """The share of the shorter path's time that is saved when both run at once."""
        program = self.programs.load(shape.hidden, shape.inner, experts, [capacity])
        submitted = [(program, *tiles(experts, capacity, shape.hidden))]
        alone = timed(lambda: self._run(submitted), 1)
        calls = max(1, round(alone / timed(cold, 1)))  # about as long: less would be noise

        def beside() -> None:
            for _ in range(calls):
                cold()

        def both() -> None:
            pending = self.programs.executor.submit(submitted)
            beside()
            pending.wait()

        return saved_share([lambda: self._run(submitted), beside, both], repeats)

    def _run(self, submitted: list[tuple[int, Any, Any]]) -> None:
        if errors := [e for e in self.programs.executor.submit(submitted).wait() if e]:
            raise RuntimeError(errors[0])


def saved_share(calls: Sequence[Callable[[], None]], repeats: int) -> float:
    """Of two calls and both at once, in turns: what of the shorter one's time both save."""
    taken = [[timed_once(call) for call in calls] for _ in range(repeats)]
    first, second, both = (median(times) for times in zip(*taken, strict=True))
    return min(max((first + second - both) / min(first, second), 0.0), 1.0)


def tiles(experts: int, capacity: int, hidden: int) -> tuple[Any, Any]:
    """An input [G, C, d] fp16, and room for the output."""
    values = np.random.default_rng(2).standard_normal((experts, capacity, hidden), np.float32)
    return (0.1 * values).astype(np.float16), np.zeros((experts, capacity, hidden), np.float16)


def read_bandwidth(size: int, threads: int, repeats: int) -> float:
    """Bytes a second that so many threads read of memory, the best of some tries."""
    parts = np.array_split(np.ones(size // 4, np.float32), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = perf_counter()
            list(pool.map(lambda part: float(part.sum()), parts))
            best = max(best, size / (perf_counter() - start))
    return best
