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
from .custom import CannotEvaluate, evaluate
from .devices import Device
from .errors import MoEError
from .plan import LayerPlan
from .schedule import Placement, Scheduler
from .schedule_numbers import checked_ids

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
        now: what a change that failed left in force.

    Attributes:
        failed: changes that could not be made; the forward runs with what is there.
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        tokens: int,
        items: Ints,
        change: Callable[[Placement, Ints], None],
        in_force: Callable[[], bool],
        now: Callable[[], Placement],
    ):
        self.name, self.scheduler = name, scheduler
        self._tokens, self._items = tokens, items
        self._change, self._in_force, self._now = change, in_force, now
        self._first = self.placement
        self.failed = 0
        self._lock = threading.Lock()  # a scheduler is for one thread at a time

    def seen(self, ids: mx.array) -> None:
        """A forward is about to run: ids [..., k], evaluated here if it counts."""
        if ids.size // ids.shape[-1] < self._tokens or not self._in_force():
            return
        evaluate(ids)
        chosen = self._items[checked_ids(np.array(ids), len(self._items))]
        loads = np.bincount(chosen, minlength=self.scheduler.experts.count)
        with self._lock:
            if (replan := self.scheduler.observe(loads)) is not None:
                logger.info("%s: %s", self.name, replan)
                self._put(self.placement, loads)

    def restore(self) -> None:
        """Back to the first placement, if another one of ours is in force."""
        with self._lock:
            if self._in_force() and self.placement != self._first:
                self._put(self._first, np.zeros(self.scheduler.experts.count, np.int64))

    def _put(self, placement: Placement, loads: Ints) -> None:
        """Change; if that fails, go on from what is there until routing shifts again."""
        try:
            self._change(placement, loads)
        except (MoEError, MemoryError, CannotEvaluate) as error:
            self.scheduler.adopt(self._now(), loads)
            self.failed += 1
            if self.failed == 1:
                reason = str(error) or type(error).__name__
                logger.warning("%s: experts could not change places: %s", self.name, reason)

    def stats(self) -> dict[str, float]:
        """`Scheduler.stats()`, and the changes that failed."""
        return {**self.scheduler.stats(), "failed": self.failed}

    @property
    def placement(self) -> Placement:
        assert self.scheduler.placement is not None
        return self.scheduler.placement

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model is not followed."""


def placement_of(first: list[bool]) -> Placement:
    """Each item on the first of two units, or on the second."""
    return Placement(np.array([[on, not on] for on in first], np.uint32), 1)


def start(scheduler: Scheduler, first: list[bool], items: Ints, loads: Array | None) -> None:
    """The plan's own placement, made for `loads` of each expert or for nothing that is known."""
    of_expert = np.ones(len(items)) if loads is None else loads
    histogram = np.bincount(items, of_expert, minlength=len(first))
    scheduler.adopt(placement_of(first), histogram, counted=inf)


def cold_costs(device: Device, planned: LayerPlan, speedup: float = 1.0) -> tuple[float, float]:
    """Seconds of an expert that has work at all, and of each assignment more."""
    expert = expert_of(planned.facts)
    one, few, many = cold_seconds(device, expert, np.array([1.0, FEW, MANY]), speedup)
    slope = (many - few) / (MANY - FEW)
    return max(float(one - slope), 0.0), float(slope)
