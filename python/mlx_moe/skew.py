"""How unevenly a layer's tokens spread over its experts."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLD = 0.25  # of the mean: an expert with less is cold


def gini(totals: NDArray[Any]) -> float:
    """The Gini coefficient of loads [E]: 0 where all are equal, 1 - 1/E where one has all."""
    ordered = np.sort(np.asarray(totals, np.float64))
    count, everything = len(ordered), ordered.sum()
    if not everything:
        return 0.0
    ranks = np.arange(1, count + 1)
    return max(0.0, float((2 * ranks - count - 1) @ ordered / (count * everything)))


def top_share(totals: NDArray[Any], part: float = 0.25) -> float:
    """The share of the load that the fullest `part` of the experts (rounded up) has."""
    ordered = np.sort(np.asarray(totals, np.float64))[::-1]
    everything = ordered.sum()
    return (
        float(ordered[: math.ceil(part * len(ordered))].sum() / everything) if everything else 0.0
    )


def cold(totals: NDArray[Any], part: float = COLD) -> int:
    """How many experts have less than `part` of the mean load."""
    totals = np.asarray(totals, np.float64)
    return int(np.count_nonzero(totals < part * totals.mean()))
