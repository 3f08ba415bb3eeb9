"""What compiling will take: space from the plan, time from small packages written here and now."""

import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .activations import Activation
from .compile_directory import writing
from .compile_tasks import Task, WeightSource
from .compile_worker import COPIES, Worker, stage_weights
from .experts_weights import ExpertWeights
from .package_form import MACOS

# (experts, functions, hidden = inner): the smallest, one of much text, one of many bytes.
PROBES = ((1, 1, 32), (8, 2, 32), (1, 1, 1024))


@dataclass(frozen=True)
class Estimate:
    """What compiling takes.

    Attributes:
        packages, missing: groups in all, and those that are still to be written.
        bytes: of all finished packages.
        shared_bytes: what they take where capacities share their weights, as for macOS 15.
        largest: bytes of the largest package.
        space: bytes that must be free, for what is missing and while it is written.
        free: bytes that are.
        seconds: for what is missing.
    """

    packages: int
    missing: int
    bytes: int
    shared_bytes: int
    largest: int
    space: int
    free: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate_tasks(
    tasks: list[Task], missing: list[Task], source: WeightSource, root: Path, workers: int
) -> Estimate:
    """The estimate for `tasks`, of which `missing` are still to be written."""
    return Estimate(
        packages=len(tasks),
        missing=len(missing),
        bytes=sum(task.bytes for task in tasks),
        shared_bytes=sum(replace(task, macos=MACOS[0]).bytes for task in tasks),
        largest=max(task.package_bytes for task in tasks),
        space=space_needed(missing, workers),
        free=shutil.disk_usage(root).free,
        seconds=estimate_seconds(missing, source, root, workers),
    )


def space_needed(tasks: list[Task], workers: int) -> int:
    """Bytes for the packages of `tasks`, and for what workers write on the way."""
    if not tasks:
        return 0
    workers = min(workers, len(tasks))
    each = max(task.package_bytes * (len(task.capacities) + COPIES) for task in tasks)
    staged = max(task.raw_bytes for task in tasks)
    return sum(task.bytes for task in tasks) + workers * each + (workers + 1) * staged


def estimate_seconds(
    tasks: list[Task], source: WeightSource, directory: Path, workers: int
) -> float:
    """Seconds for the packages of `tasks`, from a measurement of a few seconds."""
    if not tasks:
        return 0.0
    workers = min(workers, len(tasks))
    start, fixed, text, byte = _writing_costs(directory, tasks[0], workers)
    layer, value = _reading_costs(tasks[0], source)
    read = layer * len({task.layer for task in tasks})
    read += value * sum(task.raw_bytes for task in tasks)
    write = sum(
        fixed + len(task.capacities) * (text * len(task.experts) + byte * task.raw_bytes)
        for task in tasks
    )
    return start + max(read, write / workers) + min(read, write / workers) / len(tasks)


def _writing_costs(directory: Path, task: Task, workers: int) -> tuple[float, float, float, float]:
    """Seconds to start a worker, for a group, for an expert and a byte in each function.

    Of as many workers at once as there will be: they share processors, memory and disk.
    """
    with (
        writing(directory),
        tempfile.TemporaryDirectory(dir=directory) as scratch,
        ThreadPoolExecutor(workers) as threads,
    ):
        stages = [Path(scratch, str(number)) for number in range(workers)]
        all_times = list(threads.map(partial(_probe, task), stages))
    first, small, many, large = np.mean(all_times, axis=0).tolist()
    text = max(many - small, 0.0) / (8 * 2 - 1)
    byte = max(large - small, 0.0) / (3 * 2 * (1024**2 - 32**2))
    return first - small, max(small - text, 0.0), text, byte


def _probe(task: Task, directory: Path) -> list[float]:
    """Seconds for the first package of a worker, and for each of PROBES after it."""
    times, worker = [], Worker()
    try:
        for number, probe in enumerate((PROBES[0], *PROBES)):
            stage = directory / str(number)
            stage.mkdir(parents=True)
            times.append(_timed(partial(_write, worker, stage, task, *probe)))
    finally:
        worker.close()
    return times


def _write(worker: Worker, stage: Path, like: Task, count: int, functions: int, d: int) -> None:
    matrix = np.random.default_rng(0).standard_normal((d, d)).astype(np.float16)
    stage_weights(stage, [ExpertWeights(matrix, matrix + 1, matrix + 2) for _ in range(count)])
    worker.request(
        {
            "id": "estimate",
            "directory": str(stage),
            "experts": list(range(count)),
            "activation": asdict(Activation("swiglu")),
            "capacities": [32 * (i + 1) for i in range(functions)],
            "weights": like.weights,
            "macos": like.macos,
        }
    )


def _reading_costs(task: Task, source: WeightSource) -> tuple[float, float]:
    """Seconds to read a layer, and to dequantise a byte of an expert."""

    def first() -> None:
        next(source.experts(task))

    before, again = _timed(first), _timed(first)
    return max(before - again, 0.0), again * len(task.experts) / task.raw_bytes


def _timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
