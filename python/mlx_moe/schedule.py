"""Place a layer's experts on units so that none waits for another, and re-plan when routing shifts.

Needs numpy and the C++ core only: no MLX. How the parts go together: docs/schedule.md.

    units = [Unit("gpu", 2e-6, dispatch=2e-5), Unit("cpu", 8e-6, memory=2e9)]
    scheduler = Scheduler(units, Experts(128, nbytes=2.5e6))
    scheduler.plan(counts)                  # [128] assignments, of calibration say
    if replan := scheduler.observe(counts): # of each forward
        move_weights(scheduler.placement)   # yours
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _core
from .errors import InvalidArgument
from .schedule_numbers import allowed_of, checked_ids, counted_of, loads_of, real_of, whole_of

SPLIT_GAIN = 0.001
# Those of a Scheduler that its core takes.
NUMBERS = ("shift", "noise", "hysteresis", "horizon", "minimum", "split_gain", "spread")


@dataclass(frozen=True)
class Unit:
    """What computes: a device, some cores, a rank.

    A whole expert with n > 0 assignments takes it
    `dispatch + nbytes / bandwidth + n * (seconds + row_nbytes / link)`, and a shard of it that is
    1/s of an expert `dispatch + nbytes / bandwidth / s + n * (seconds / s + row_nbytes / link)`:
    every shard is dispatched, sees every row, and sends a partial sum of every row. An expert that
    is expected less than once, n < 1, is dispatched and read n times.

    Attributes:
        name: for people.
        seconds: that one assignment of a whole expert computes.
        dispatch: seconds for each expert, or shard of one, that has work.
        bandwidth: bytes a second at which the weights of an expert with work are read; inf where
            they are there, or `seconds` has it.
        memory: bytes of expert weights that it can hold.
        link: bytes a second at which rows go there and results come back; inf where they are.
        load: bytes a second at which weights arrive that it did not hold, inf if that is free.
        holds_all: it has the weights of every expert anyway: nothing moves to it.
    """

    name: str
    seconds: float
    dispatch: float = 0.0
    bandwidth: float = inf
    memory: float = inf
    link: float = inf
    load: float = inf
    holds_all: bool = False

    def _numbers(self) -> tuple[Any, ...]:
        names = ("seconds", "dispatch", "bandwidth", "memory", "link", "load")
        return *(real_of(name, getattr(self, name)) for name in names), bool(self.holds_all)


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, which are all of one size.

    Attributes:
        count: how many.
        nbytes: of the weights of one.
        row_nbytes: that an assignment moves over a unit's `link`: its input and its result.
        shards: equal parts along ff that an expert can be cut into; 1 keeps every expert whole.
        allowed: for each expert, whether it may be on each unit; None: every one on every unit.
            With shards, memory and sets that leave little choice, a placement in pieces may not
            be found though there is one; whole experts are always placed if they can be.
    """

    count: int
    nbytes: float = 0.0
    row_nbytes: float = 0.0
    shards: int = 1
    allowed: Sequence[Sequence[bool]] | None = None

    def _numbers(self) -> tuple[Any, ...]:
        count, shards = whole_of("count", self.count), whole_of("shards", self.shards)
        sizes = real_of("nbytes", self.nbytes), real_of("row_nbytes", self.row_nbytes)
        return count, *sizes, shards, allowed_of(self.allowed, self.count)


@dataclass(frozen=True, eq=False)
class Placement:
    """Which units have which experts.

    Attributes:
        parts: uint32 [experts, units], how many of an expert's shards a unit has; rows sum to
            `shards`. Which shards is free.
        shards: parts of a whole expert.
    """

    parts: NDArray[np.uint32]
    shards: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return self.shards == other.shards and np.array_equal(self.parts, other.parts)

    @property
    def shares(self) -> NDArray[np.float64]:
        """float64 [experts, units]: of each expert's weights and work."""
        return self.parts / self.shards

    @property
    def owner(self) -> NDArray[np.int64]:
        """int64 [experts]: the unit that has an expert whole, -1 where several share it."""
        most = self.parts.argmax(axis=1)
        return np.where(self.parts.max(axis=1) == self.shards, most, -1)

    @property
    def split(self) -> list[int]:
        """The experts that several units share."""
        return [int(e) for e in np.flatnonzero(self.owner < 0)]

    def experts_of(self, unit: int) -> list[int]:
        """The experts of which a unit has some part."""
        return [int(e) for e in np.flatnonzero(self.parts[:, unit])]


def place(
    histogram: ArrayLike,
    units: Sequence[Unit],
    experts: Experts,
    *,
    split_gain: float = SPLIT_GAIN,
    noise: float = 0.0,
    counting: float = 1.0,
    serial: bool = False,
) -> Placement:
    """A placement whose slowest unit takes little longer than it must.

    Longest first: the busiest expert goes to the unit that is done with it first, and so on. Then
    experts move or trade places as long as that relieves the slowest unit. Then, if `shards` > 1,
    experts are split: the busiest over all units, or a part of one to a unit that would wait.

    Args:
        histogram: [count] assignments of each expert in one forward; means are fine.
        units, experts: what they can do, and their sizes.
        split_gain: share of the makespan that each split must save at least.
        noise: standard deviations by which the next forward's loads are taken to push a unit
            above the others; the more, the more experts are split. 0: the loads will be those.
        counting: assignments of a forward over those counted for the histogram, which adds that
            share to the variance.
        serial: the units take turns, such as two forms of an expert on one processor: their sum
            is made small, and no expert is split.

    Returns:
        The `Placement`; the same for the same input.

    Raises:
        InvalidArgument: a histogram of another length or with negative or infinite values, a
            unit with numbers that cannot be, or units that cannot hold all experts.
    """
    parts = _core.schedule_place(
        loads_of(histogram),
        [unit._numbers() for unit in units],
        experts._numbers(),
        split_gain=real_of("split_gain", split_gain),
        noise=real_of("noise", noise),
        counting=real_of("counting", counting),
        serial=bool(serial),
    )
    return Placement(parts, experts.shards)


def unit_seconds(
    histogram: ArrayLike, units: Sequence[Unit], experts: Experts, placement: Placement
) -> NDArray[np.float64]:
    """float64 [units]: seconds of each unit for these loads; the makespan is their maximum.

    Raises:
        InvalidArgument: as `place`, or the placement is not one of these experts and units.
    """
    seconds = _core.schedule_seconds(
        loads_of(histogram),
        [unit._numbers() for unit in units],
        experts._numbers(),
        np.ascontiguousarray(placement.parts, np.uint32),
    )
    return np.array(seconds)


def makespan(
    histogram: ArrayLike, units: Sequence[Unit], experts: Experts, placement: Placement
) -> float:
    """Seconds of the slowest unit; see `unit_seconds`."""
    return float(unit_seconds(histogram, units, experts, placement).max())


def round_robin(units: int, experts: Experts) -> Placement:
    """Expert e whole on unit e modulo units: static expert parallelism, which knows no loads."""
    if units < 1 or experts.count < 1:
        raise InvalidArgument(f"{experts.count} experts on {units} units; expected some of both")
    parts = np.zeros((experts.count, units), np.uint32)
    parts[np.arange(experts.count), np.arange(experts.count) % units] = experts.shards
    return Placement(parts, experts.shards)


@dataclass(frozen=True)
class Replan:
    """A change of placement, as it was decided.

    Attributes:
        forward: forwards observed when it was.
        assignments: counted for it since routing last shifted.
        shift: total variation (0 to 1) between what was counted and what was planned for; 1 where
            the placement was made for nothing that was counted.
        threshold: that it passed.
        before, after: predicted seconds of a forward by the old and by the new placement.
        bytes_moved: of weights that change units.
        moving_seconds: that takes, all units at once.
    """

    forward: int
    assignments: float
    shift: float
    threshold: float
    before: float
    after: float
    bytes_moved: float
    moving_seconds: float

    @property
    def gain(self) -> float:
        """Predicted share of a forward's time that is saved."""
        return 1 - self.after / self.before

    def __str__(self) -> str:
        return (
            f"forward {self.forward}: routing shifted by {self.shift:.3f} "
            f"(over {self.threshold:.3f}, {self.assignments:.0f} assignments); "
            f"{self.gain:.1%} faster for {self.bytes_moved / 2**20:.1f} MiB moved"
        )


@dataclass
class Scheduler:
    """The placement of one layer's experts, kept up with routing as it shifts.

    `plan` places the experts for a histogram; `observe` is told what each forward routed, and
    re-plans when all of this holds:

    - the total variation between what was counted and what was planned for exceeds
      `shift` + `noise` times the variation that samples of these sizes have anyway;
    - the predicted makespan falls by `hysteresis` of it or more;
    - over `horizon` forwards that saves more than moving the weights takes.

    What was counted begins anew when routing is found to have changed, so that old traffic does
    not hide new. The defaults were chosen on gpt-oss-20b's routing in 291 domains
    (benchmarks/schedule.py). Use from one thread at a time.

    Attributes:
        units, experts: as for `place`.
        shift, noise, hysteresis, horizon: see above.
        minimum: assignments for each expert on average before anything is decided; smaller
            forwards, such as decoding, are added up until then.
        split_gain: as for `place`.
        spread, serial: `noise` and `serial` of `place` in the placements that are made here.
        log: the re-plans, oldest first.

    Raises:
        InvalidArgument: a number that cannot be, or units that cannot hold all experts.
    """

    units: Sequence[Unit]
    experts: Experts
    shift: float = 0.02
    noise: float = 1.5
    hysteresis: float = 0.02
    horizon: float = 16.0
    minimum: float = 4.0
    split_gain: float = SPLIT_GAIN
    spread: float = 1.0
    serial: bool = False
    log: list[Replan] = field(default_factory=list, init=False)
    _core: Any = field(init=False, repr=False, compare=False)
    _placement: Placement | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.units = tuple(self.units)
        self._core = _core.LayerScheduler(
            self.experts._numbers(),
            [unit._numbers() for unit in self.units],
            **{name: real_of(name, getattr(self, name)) for name in NUMBERS},
            serial=bool(self.serial),
        )

    @property
    def placement(self) -> Placement | None:
        """The one in force; None before the first `plan`, `adopt` or enough observed."""
        if self._placement is None:
            parts = self._core.placement
            self._placement = None if parts is None else Placement(parts, self.experts.shards)
        return self._placement

    def plan(self, histogram: ArrayLike, counted: float | None = None) -> Placement:
        """Place the experts for a histogram, whatever was before. No re-plan in the statistics.

        Args:
            histogram: [count] assignments of each expert in one forward; means are fine.
            counted: assignments that were counted for it; the histogram's sum if None, inf for
                exact shares. The fewer, the less is made of a difference later.

        Raises:
            InvalidArgument: as `place`.
        """
        loads = loads_of(histogram)
        self._core.plan(loads, counted_of(counted, loads))
        return self._changed()

    def adopt(
        self, placement: Placement, histogram: ArrayLike, counted: float | None = None
    ) -> None:
        """Start from a placement made elsewhere for this histogram; arguments as `plan`."""
        loads = loads_of(histogram)
        parts = np.ascontiguousarray(placement.parts, np.uint32)
        self._core.adopt(parts, loads, counted_of(counted, loads))
        self._changed()

    def observe(self, histogram: ArrayLike) -> Replan | None:
        """Count a forward's assignments [count]; the re-plan if there was one, and then
        `placement` is another. Without a placement, the first enough assignments make one."""
        found = self._core.observe(loads_of(histogram))
        if found is None:
            return None
        self._changed()
        self.log.append(Replan(**found))
        return self.log[-1]

    def observe_ids(self, ids: Any) -> Replan | None:
        """`observe` for a forward's expert ids, integers of any shape."""
        chosen = checked_ids(ids, self.experts.count)
        return self.observe(np.bincount(chosen, minlength=self.experts.count))

    def makespan(self, histogram: ArrayLike) -> float:
        """Seconds of the slowest unit (of all, if they are `serial`) for a forward's loads."""
        if self.placement is None:
            raise InvalidArgument("nothing is placed yet: call plan, adopt or observe first")
        seconds = unit_seconds(histogram, self.units, self.experts, self.placement)
        return float(seconds.sum() if self.serial else seconds.max())

    def stats(self) -> dict[str, float]:
        """Counts since it was made.

        forwards observed; decisions (histograms compared); shifts found in routing; replans;
        declined (past the threshold, too little to gain); bytes_moved by re-plans.
        """
        return dict(self._core.counts)

    def _changed(self) -> Placement:
        self._placement = None
        assert self.placement is not None
        return self.placement
