"""Discrete events: tasks that wait for each other and for the unit that does them."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from .errors import InvalidArgument


@dataclass(frozen=True)
class Unit:
    """Something that does one task at a time, in the order in which they are ready.

    Attributes:
        watts: beyond idle, while it works; None if unknown. Of the host 0: its cores count apart.
    """

    name: str
    watts: float | None = None


@dataclass(frozen=True)
class Task:
    """One piece of work.

    Attributes:
        unit: that does it.
        seconds: that the unit is taken.
        after: numbers of the tasks that must be done before.
        working: seconds of these that the unit works, and does not wait for the host; None: all.
        cpu_seconds: of all cores together that the task takes of the host.
    """

    unit: str
    seconds: float
    after: tuple[int, ...] = ()
    working: float | None = None
    cpu_seconds: float = 0.0


@dataclass
class Timeline:
    """What happened.

    Attributes:
        seconds: when the last task was done.
        working: seconds that each unit worked.
        tasks: that each unit did.
        cpu_seconds: of all cores together.
        ends: of each task.
    """

    seconds: float
    working: dict[str, float]
    tasks: dict[str, int]
    cpu_seconds: float
    ends: list[float] = field(repr=False)


def run(tasks: Sequence[Task], units: Mapping[str, Unit]) -> Timeline:
    """Do all tasks; of those ready for a unit the one that is ready first, then the first listed.

    Raises InvalidArgument where a task waits for itself or for one that there is not, takes a time
    that cannot be, or is of no unit.
    """
    for number, task in enumerate(tasks):
        if task.unit not in units:
            raise InvalidArgument(f"task {number} is of unit {task.unit!r}, which there is not")
        if not 0 <= task.seconds < inf:
            raise InvalidArgument(
                f"task {number} takes {task.seconds} s on {task.unit}: a number of the device is "
                "out of range"
            )
    waiting = [len(set(task.after)) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for before in set(task.after):
            if not 0 <= before < len(tasks):
                raise InvalidArgument(f"task {number} waits for task {before}, which there is not")
            followers[before].append(number)

    ready: dict[str, list[tuple[float, int]]] = {name: [] for name in units}
    free = dict.fromkeys(units, True)
    events: list[tuple[float, int]] = []  # (end, task)
    ends = [-1.0] * len(tasks)

    def start(name: str, now: float) -> None:
        if free[name] and ready[name]:
            _, number = heapq.heappop(ready[name])
            free[name] = False
            heapq.heappush(events, (now + tasks[number].seconds, number))

    for number, count in enumerate(waiting):
        if not count:
            heapq.heappush(ready[tasks[number].unit], (0.0, number))
    for name in units:
        start(name, 0.0)
    done, now = 0, 0.0
    while events:
        now = events[0][0]
        touched = []
        while events and events[0][0] == now:  # all that end now, before anything starts
            _, number = heapq.heappop(events)
            ends[number] = now
            done += 1
            free[tasks[number].unit] = True
            touched.append(tasks[number].unit)
            for follower in followers[number]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    heapq.heappush(ready[tasks[follower].unit], (now, follower))
                    touched.append(tasks[follower].unit)
        for name in touched:
            start(name, now)
    if done != len(tasks):
        raise InvalidArgument(f"{len(tasks) - done} of {len(tasks)} tasks wait for each other")
    return _summed(tasks, units, now, ends)


def _summed(
    tasks: Sequence[Task], units: Mapping[str, Unit], seconds: float, ends: list[float]
) -> Timeline:
    timeline = Timeline(seconds, dict.fromkeys(units, 0.0), dict.fromkeys(units, 0), 0.0, ends)
    for task in tasks:
        timeline.working[task.unit] += task.seconds if task.working is None else task.working
        timeline.tasks[task.unit] += 1
        timeline.cpu_seconds += task.cpu_seconds
    return timeline


def joules(timeline: Timeline, units: Mapping[str, Unit], core_watts: float | None) -> float | None:
    """Of the units' work and of the host's cores, idling aside; None where one that worked has no
    watts."""
    parts = [(working, units[name].watts) for name, working in timeline.working.items()]
    total = 0.0
    for seconds, watts in [*parts, (timeline.cpu_seconds, core_watts)]:
        if seconds and watts is None:
            return None
        total += seconds * (watts or 0.0)
    return total
