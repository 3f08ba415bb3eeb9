"""What the replaced layers did: counters per layer, and one log line per cause."""

import logging
import threading
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

logger = logging.getLogger("mlx_moe")


class Counters:
    """Counts of one layer; safe to use from several threads.

    Attributes:
        calls: forwards asked of the layer.
        tokens: rows of input over all of them.
        kernel_calls: C++ calls made.
        small: forwards left to stock code because they are too small to gain from a kernel.
        fallbacks: forwards that stock code ran, by reason.
    """

    def __init__(self, name: str, logged: set[str]):
        """`logged` is shared by the layers of a model: each reason is logged once."""
        self.name = name
        self._logged = logged
        self._lock = threading.Lock()
        self.calls = self.tokens = self.kernel_calls = self.small = 0
        self.fallbacks: dict[str, int] = {}

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
            return {
                "calls": self.calls,
                "tokens": self.tokens,
                "kernel_calls": self.kernel_calls,
                "small": self.small,
                "fallbacks": dict(self.fallbacks),
            }

    def __deepcopy__(self, memo: dict) -> "Counters":
        return Counters(self.name, set())
