"""What counts a layer's routing and changes its forms."""

import logging
import threading
from collections.abc import Callable
from math import inf
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .cost import Array, cold_seconds, expert_of
from .custom import evaluate
from .devices import Device
from .plan import LayerPlan
from .schedule import Placement, Scheduler

Ints = NDArray[np.int64]
OPTIONS = frozenset({"shift", "noise", "hysteresis", "horizon", "minimum"})  # of the scheduler
FEW, MANY = 2048.0, 4096.0  # loads between which a cost is taken to be linear

logger = logging.getLogger("mlx_moe")


class Follower:
    """Counts what one layer routes, and changes its forms when the scheduler says so.

    Args:
        tokens: of a forward from which it counts.
        items: what the scheduler places, for each expert: int [E].
        change: puts a placement into force, for the loads of the items that were seen last.
        in_force: whether it still is; else nothing is counted.
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        tokens: int,
        items: Ints,
        change: Callable[[Placement, Ints], None],
        in_force: Callable[[], bool],
    ):
        self.name, self.scheduler = name, scheduler
        self._tokens, self._items = tokens, items
        self._change, self._in_force = change, in_force
        self._first = self.placement
        self._lock = threading.Lock()  # a scheduler is for one thread at a time

    def seen(self, ids: mx.array) -> None:
        """A forward is about to run: ids [..., k], evaluated here if it counts."""
        if ids.size // ids.shape[-1] < self._tokens or not self._in_force():
            return
        evaluate(ids)
        chosen = self._items[np.array(ids).reshape(-1)]
        loads = np.bincount(chosen, minlength=self.scheduler.experts.count)
        with self._lock:
            if (replan := self.scheduler.observe(loads)) is not None:
                logger.info("%s: %s", self.name, replan)
                self._change(self.placement, loads)

    def restore(self) -> None:
        """Back to the first placement, if ours is in force."""
        with self._lock:
            if self._in_force():
                self._change(self._first, np.zeros(self.scheduler.experts.count, np.int64))

    @property
    def placement(self) -> Placement:
        assert self.scheduler.placement is not None
        return self.scheduler.placement

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model is not followed."""


def start(scheduler: Scheduler, owner: list[int], items: Ints, loads: Array | None) -> None:
    """The plan's own placement, made for `loads` of each expert or for nothing that is known."""
    parts = np.zeros((len(owner), 2), np.uint32)
    parts[np.arange(len(owner)), owner] = 1
    of_expert = np.ones(len(items)) if loads is None else loads
    histogram = np.bincount(items, of_expert, minlength=len(owner))
    scheduler.adopt(Placement(parts, 1), histogram, counted=inf)


def cold_costs(device: Device, planned: LayerPlan, speedup: float = 1.0) -> tuple[float, float]:
    """Seconds of an expert that has work at all, and of each assignment more."""
    expert = expert_of(planned.facts)
    one, few, many = cold_seconds(device, expert, np.array([1.0, FEW, MANY]), speedup)
    slope = (many - few) / (MANY - FEW)
    return max(float(one - slope), 0.0), float(slope)
