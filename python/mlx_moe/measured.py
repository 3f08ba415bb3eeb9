"""Times that were measured on a device, and what they say of other loads and groups."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .json_fields import Fields

Array = NDArray[np.float64]
PATHS = ("static", "cold")


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        path: "static" (one dispatch) or "cold" (one call).
        hidden, inner: features outside and inside an expert.
        experts: in the group, or that had a load.
        rows: capacity, or load of each expert.
        seconds: the median.
    """

    path: str
    hidden: int
    inner: int
    experts: int
    rows: int
    seconds: float

    @property
    def size(self) -> int:
        return self.hidden * self.inner


@dataclass(frozen=True)
class Measurements:
    """What a profile's numbers were fitted to.

    Attributes:
        date: "2026-01-31".
        overlap: share of the shorter path's time that is saved when both run at once: 1 where
            they are units of their own, 0 where they share one; None if not measured.
        samples: at least one of each path that was measured.
    """

    date: str
    overlap: float | None
    samples: tuple[Sample, ...]

    def has(self, path: str) -> bool:
        return any(sample.path == path for sample in self.samples)

    def static_seconds(
        self, hidden: int, inner: int, experts: int, capacity: Array | float
    ) -> Array:
        """Of one dispatch."""
        near = self._nearest("static", hidden * inner)
        counts = sorted({sample.experts for sample in near})
        each = [_over_rows((s for s in near if s.experts == n), capacity) for n in counts]
        if experts <= counts[0]:
            seconds = each[0]
        elif experts >= counts[-1]:
            seconds = each[-1] * experts / counts[-1]
        else:
            after = next(i for i, n in enumerate(counts) if n > experts)
            low, high = np.log(counts[after - 1]), np.log(counts[after])
            share = (np.log(experts) - low) / (high - low)
            seconds = each[after - 1] ** (1 - share) * each[after] ** share
        return seconds * (hidden * inner / near[0].size)

    def cold_seconds(self, hidden: int, inner: int, loads: Array) -> Array:
        """Of each expert by its load; none for no load.

        In proportion to its size; between two sizes measured, on the line through them.
        """
        size = hidden * inner
        sizes = sorted({sample.size for sample in self.samples if sample.path == "cold"})
        low = max((s for s in sizes if s <= size), default=sizes[0])
        high = min((s for s in sizes if s >= size), default=sizes[-1])
        seconds = self._cold_of(low, loads)
        if high > low:
            share = (size - low) / (high - low)
            seconds = seconds * (1 - share) + self._cold_of(high, loads) * share
        else:
            seconds = seconds * size / low
        return np.where(loads > 0, seconds, 0.0)

    def _cold_of(self, size: int, loads: Array) -> Array:
        """Of each expert, as measured at one size."""
        own = [sample for sample in self.samples if sample.path == "cold" and sample.size == size]
        most = max(sample.experts for sample in own)
        return _over_rows((s for s in own if s.experts == most), loads) / most

    def _nearest(self, path: str, size: int) -> list[Sample]:
        """The samples of the size of expert that is nearest."""
        own = [sample for sample in self.samples if sample.path == path]
        best = min(own, key=lambda s: abs(np.log(s.size / size))).size
        return [sample for sample in own if sample.size == best]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"samples": [asdict(sample) for sample in self.samples]}

    @staticmethod
    def from_dict(data: Any, where: str) -> "Measurements":
        """Check what `as_dict` gave; CorruptFile, which names `where`, for anything else."""
        take = Fields(data, where, {"date", "overlap", "samples"})
        overlap = take.optional("overlap", partial(take.number, most=1))
        samples = take.each("samples", {f.name for f in fields(Sample)})
        if not samples:
            raise take.wrong("samples", "some")
        return Measurements(take.text("date"), overlap, tuple(map(_sample, samples)))


def _over_rows(samples: Iterable[Sample], rows: Array | float) -> Array:
    """Seconds at other numbers of rows: as few take as long as the fewest measured, more than
    the most in proportion, between along a line of both logarithms."""
    ordered = sorted((s.rows, s.seconds) for s in samples)
    known, seconds = np.array(ordered, np.float64).T
    wanted = np.maximum(np.asarray(rows, np.float64), known[0])
    between = np.exp(np.interp(np.log(wanted), np.log(known), np.log(seconds)))
    return np.asarray(between * np.maximum(wanted / known[-1], 1.0))


def _sample(take: Fields) -> Sample:
    hidden, inner = take.count("hidden", 1), take.count("inner", 1)
    experts, rows = take.count("experts", 1), take.count("rows", 1)
    seconds = take.number("seconds", most=1e6)
    if not seconds:
        raise take.wrong("seconds", "a time above 0")
    return Sample(take.one_of("path", PATHS), hidden, inner, experts, rows, seconds)
