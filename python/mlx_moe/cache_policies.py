"""What a bank of expert slots would do under a policy: the store's own rules, without reading.

Experts of all layers are numbered one after the other, as in `core.Store`, whose decisions
`Simulation` repeats exactly (csrc/store/policy.h, csrc/store/residency.h). `Belady` knows the
future: no policy misses less often (L. A. Belady, IBM Systems Journal 5(2), 1966).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidArgument, MemoryLimit

Ints = NDArray[np.int64]
NEVER = np.iinfo(np.int64).max
ONE = 256  # of a count, so that halves are not lost


class Policy(Protocol):
    """Which of some experts goes when a slot is needed."""

    def used(self, expert: int) -> None:
        """A forward asks for the expert, whether it is there or not."""

    def first(self, candidates: Ints) -> int:
        """The place, among the candidates, of the one that goes first."""
        ...


class Lru:
    """The one whose last use is longest ago."""

    def __init__(self, experts: int):
        self.uses = 0
        self.last = np.zeros(experts, np.int64)

    def used(self, expert: int) -> None:
        self.uses += 1
        self.last[expert] = self.uses

    def first(self, candidates: Ints) -> int:
        last = self.last[candidates]
        oldest = np.flatnonzero(last == last.min())  # several where never used
        return int(oldest[candidates[oldest].argmin()])


class Lfu(Lru):
    """The one used least often; all counts are halved every `period` uses. Then as LRU."""

    def __init__(self, experts: int, period: int, counts: Ints | None = None):
        """counts: what they begin with, in 256ths of a use."""
        super().__init__(experts)
        if period < 1:
            raise InvalidArgument(f"lfu's period is {period}; expected at least 1 use")
        self.period = period
        self.counts = np.zeros(experts, np.int64) if counts is None else counts.astype(np.int64)

    def used(self, expert: int) -> None:
        super().used(expert)
        self.counts[expert] += ONE
        if self.uses % self.period == 0:
            self.counts //= 2

    def first(self, candidates: Ints) -> int:
        counts = self.counts[candidates]
        rarest = np.flatnonzero(counts == counts.min())
        return int(rarest[super().first(candidates[rarest])])


class Pinned(Lru):
    """As LRU, but a fixed set goes last."""

    def __init__(self, experts: int, pinned: Iterable[int]):
        super().__init__(experts)
        self.pinned = np.zeros(experts, bool)
        self.pinned[list(pinned)] = True

    def first(self, candidates: Ints) -> int:
        free = np.flatnonzero(~self.pinned[candidates])
        if not len(free):
            return super().first(candidates)
        return int(free[super().first(candidates[free])])


class Belady:
    """The one that is not needed for longest, by knowing every use in advance."""

    def __init__(self, experts: int, uses: Ints):
        """uses: the experts in the order in which they will be used."""
        self.at = 0
        self.following = next_uses(uses)
        self.next = np.full(experts, NEVER, np.int64)

    def used(self, expert: int) -> None:
        self.next[expert] = self.following[self.at]
        self.at += 1

    def first(self, candidates: Ints) -> int:
        return int(self.next[candidates].argmax())


def next_uses(uses: Ints) -> Ints:
    """For each use, the place of the same expert's next one, NEVER after the last."""
    following = np.full(len(uses), NEVER, np.int64)
    order = np.lexsort((np.arange(len(uses)), uses))
    same = uses[order[1:]] == uses[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


@dataclass
class Outcome:
    """Counts of uses by whether the expert was there, and what that cost.

    Attributes:
        hits, misses: experts that a forward asked for, each once a forward.
        bytes_read, evictions: of all misses.
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


class Simulation:
    """A bank under a budget. `access` is one acquire: its experts are held at the same time."""

    def __init__(self, sizes: Sequence[int] | Ints, budget: int, policy: Policy):
        """sizes: bytes of each expert's slot."""
        self.sizes = np.asarray(sizes, np.int64)
        self.budget, self.policy = budget, policy
        self.used = 0
        self.there = np.zeros(len(self.sizes), bool)
        self.total = Outcome()

    def access(self, experts: Sequence[int] | Ints) -> Outcome:
        """Distinct experts, rising; MemoryLimit if the budget cannot hold all of them."""
        wanted = np.asarray(experts, np.int64)
        if int(self.sizes[wanted].sum()) > self.budget:
            raise MemoryLimit(
                f"{len(wanted)} experts of {int(self.sizes[wanted].sum())} bytes do not fit a "
                f"budget of {self.budget}"
            )
        for expert in wanted.tolist():
            self.policy.used(expert)
        missing = wanted[~self.there[wanted]]
        outcome = Outcome(len(wanted) - len(missing), len(missing))
        if len(missing):
            self._load(wanted, missing, outcome)
        for name in ("hits", "misses", "bytes_read", "evictions"):
            setattr(self.total, name, getattr(self.total, name) + getattr(outcome, name))
        return outcome

    def _load(self, wanted: Ints, missing: Ints, outcome: Outcome) -> None:
        free = self.there.copy()
        free[wanted] = False
        candidates = np.flatnonzero(free)
        for expert in missing.tolist():
            size = int(self.sizes[expert])
            while self.used + size > self.budget:
                place = self.policy.first(candidates)
                victim = int(candidates[place])
                candidates = np.delete(candidates, place)
                self.there[victim] = False
                self.used -= int(self.sizes[victim])
                outcome.evictions += 1
            self.used += size
            outcome.bytes_read += size
        self.there[missing] = True


def waves(wanted: Ints, there: NDArray[np.bool_], most: int) -> list[Ints]:
    """The experts of one forward in parts that fit the budget together, as the store runs them.

    One part where all fit; else parts of half of what fits, so that the next part can be read while
    one is computed: what is in memory first, then the others, each in rising order.
    """
    if len(wanted) <= most:
        return [wanted]
    order = np.concatenate([wanted[there], wanted[~there]])
    size = max(1, most // 2)
    return [np.sort(order[i : i + size]) for i in range(0, len(order), size)]
