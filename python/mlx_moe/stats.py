"""What the replaced layers did: counters per layer, and one log line per cause."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

# Why stock code ran.
DETAILS = {
    "training": "training mode",
    "adapter": "a projection is not a plain switch linear (adapters are)",
    "activation": "the activation has parameters",
    "dtype": "the input is not f32, f16 or bf16, or the indices are not integers",
    "shape": "the input is a vector, or its leading dimensions are not the indices'",
    "arguments": "called with extra arguments",
    "tracing": "called while mx.compile or mx.vmap traces",
    "format": "weight format unknown to the kernels",
}
STAGES = ("bucket", "pack", "submit", "cold", "wait", "combine")

logger = logging.getLogger("mlx_moe")


class Counters:
    """Counts of one layer; safe to use from several threads.

    Attributes:
        calls: forwards asked of the layer.
        tokens: rows of input over all of them.
        kernel_calls: C++ calls made.
        small: forwards left to stock code because they are too small to gain from a kernel.
        fallbacks: forwards that stock code ran, by reason.
        static: what the static path did, None without a plan.
        schedule: gives what following the plan did, None where it is not followed.
        ranks: what sharing the experts over ranks took, None where they are not shared.
    """

    def __init__(self, name: str, logged: set[str]):
        """`logged` is shared by the layers of a model: each reason is logged once."""
        self.name = name
        self._logged = logged
        self._lock = threading.Lock()
        self.calls = self.tokens = self.kernel_calls = self.small = 0
        self.fallbacks: dict[str, int] = {}
        self.static: StaticCounters | None = None
        self.schedule: Callable[[], dict[str, float]] | None = None
        self.ranks: RankCounters | None = None

    def called(self, tokens: int) -> None:
        with self._lock:
            self.calls += 1
            self.tokens += tokens

    def ran(self, kernels: int) -> None:
        with self._lock:
            self.kernel_calls += kernels

    def left_small(self) -> None:
        with self._lock:
            self.small += 1

    def fell_back(self, reason: str, detail: str) -> None:
        with self._lock:
            self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
            first = reason not in self._logged
            self._logged.add(reason)
        if first:
            logger.warning("%s runs stock code (%s): %s", self.name, reason, detail)

    def as_dict(self) -> dict[str, Any]:
        with self._lock:
            counts: dict[str, Any] = {
                "calls": self.calls,
                "tokens": self.tokens,
                "kernel_calls": self.kernel_calls,
                "small": self.small,
                "fallbacks": dict(self.fallbacks),
            }
        if self.static is not None:
            counts["static"] = self.static.as_dict()
        if self.schedule is not None:
            counts["schedule"] = self.schedule()
        if self.ranks is not None:
            counts["ranks"] = self.ranks.as_dict()
        return counts

    def __deepcopy__(self, memo: dict) -> "Counters":
        return Counters(self.name, set())


class RankCounters:
    """What one layer's forwards over ranks took; safe to use from several threads.

    Attributes:
        size: ranks.
        counts: `sums`, `seconds` of forwards (own experts and the sum), `sum_seconds` of them for
            the sum and waiting for it; with `token_` before it, of single tokens among them.
    """

    COUNTS = ("sums", "seconds", "sum_seconds")

    def __init__(self, size: int):
        self.size = size
        self._lock = threading.Lock()
        self.counts: dict[str, float] = dict.fromkeys(
            (*self.COUNTS, *(f"token_{name}" for name in self.COUNTS)), 0
        )

    def add(self, tokens: int, seconds: float, sum_seconds: float) -> None:
        """Of one forward."""
        with self._lock:
            for prefix in ("", "token_") if tokens == 1 else ("",):
                self.counts[f"{prefix}sums"] += 1
                self.counts[f"{prefix}seconds"] += seconds
                self.counts[f"{prefix}sum_seconds"] += sum_seconds

    def as_dict(self) -> dict[str, float]:
        with self._lock:
            return {"size": self.size, **self.counts}


class StaticCounters:
    """Counts of one layer's static path; safe to use from several threads.

    Attributes:
        forwards: that took the static path.
        hot: assignments in tiles. cold: of experts that are not resident. spilled: of hot
            experts, computed cold. pruned: of hot experts, left out.
        padding: empty slots of tiles.
        dispatches: tiles, by the parts of their programs. waits: for all tiles of a forward.
        extra_tiles: beyond the first of a group.
        recomputed_tiles: not finite in float16, or too small. failed_tiles: the executor failed.
        stale: forwards whose weights are no longer those that were compiled.
        without_scores: forwards that should prune by scores and did not see any.
        cold_groups: of the plan, whose programs the executor does not run; of no forward.
        nan_importance: assignments that pruning ranked last because their importance is NaN.
        seconds: by stage, each of STAGES.
    """

    COUNTS = (
        *("forwards", "hot", "cold", "spilled", "pruned", "padding", "dispatches", "waits"),
        *("extra_tiles", "recomputed_tiles", "failed_tiles", "stale", "without_scores"),
        "cold_groups",
        "nan_importance",
    )

    def __init__(self, name: str, logged: set[str], cold_groups: int = 0):
        self.name = name
        self._logged = logged
        self._lock = threading.Lock()
        self.counts = {**dict.fromkeys(self.COUNTS, 0), "cold_groups": cold_groups}
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def add(self, **counts: int) -> None:
        with self._lock:
            for key, count in counts.items():
                self.counts[key] += count

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time inside to a stage."""
        start = perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[stage] += perf_counter() - start

    def log_once(self, cause: str, text: str) -> None:
        """Warn, once for all layers of a model."""
        with self._lock:
            first = cause not in self._logged
            self._logged.add(cause)
        if first:
            logger.warning("%s: %s", self.name, text)

    def as_dict(self) -> dict[str, Any]:
        with self._lock:
            return {**self.counts, "seconds": dict(self.seconds)}
