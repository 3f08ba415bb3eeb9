"""The numbers that schedule.py takes from its users, as the core takes them."""

from math import inf
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import InvalidArgument

MOST_LOAD = 1e100  # sums of many stay finite


def real_of(name: str, value: Any) -> float:
    if not isinstance(value, Real):
        raise InvalidArgument(f"{name} is {value!r}, expected a number")
    return float(value)


def whole_of(name: str, value: Any) -> int:
    if not isinstance(value, Integral) or not 0 <= int(value) < 1 << 32:
        raise InvalidArgument(f"{name} is {value!r}, expected a whole number of at least 0")
    return int(value)


def allowed_of(allowed: Any, experts: int) -> list[int]:
    """0 or 1 by expert, for each unit; empty for None."""
    if allowed is None:
        return []
    try:
        found = np.asarray(allowed, bool)
    except ValueError:  # rows of several lengths
        found = np.zeros(0, bool)
    if found.ndim != 2 or len(found) != experts:
        raise InvalidArgument(f"allowed is not a row of units for each of {experts} experts")
    numbers: list[int] = found.astype(int).ravel().tolist()
    return numbers


def checked_ids(ids: Any, experts: int) -> NDArray[np.int64]:
    """Expert ids in a row; InvalidArgument for any that is none of so many."""
    chosen = np.asarray(ids).reshape(-1)
    if not chosen.size:
        return np.zeros(0, np.int64)
    if chosen.dtype.kind not in "iu" or not 0 <= chosen.min() <= chosen.max() < experts:
        raise InvalidArgument(
            f"expert ids are whole numbers from 0 to {experts - 1}, found {chosen.min()} to "
            f"{chosen.max()}"
        )
    return chosen.astype(np.int64)


def loads_of(histogram: ArrayLike) -> NDArray[np.float64]:
    try:
        found = np.asarray(histogram)
        if found.dtype.kind in "cmM":  # numpy would drop imaginary parts, and count seconds
            raise TypeError(f"its dtype is {found.dtype}")
        loads = np.ascontiguousarray(found, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"the histogram is no array of numbers: {error}") from error
    if np.any((loads > MOST_LOAD) & (loads < inf)):
        raise InvalidArgument(f"the histogram has {loads.max()} assignments of an expert")
    return loads


def counted_of(given: float | None, loads: NDArray[np.float64]) -> float:
    return float(loads.sum()) if given is None else real_of("counted", given)
