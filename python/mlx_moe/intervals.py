"""Confidence intervals (95 %) of means and of paired proportions."""

import math
from dataclasses import dataclass

import numpy as np

Z = 1.959963984540054  # standard normal quantile of 0.975
RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % confidence interval; NaN bounds where too few data give none."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Interval":
        return Interval(self.value * factor, self.low * factor, self.high * factor)

    def as_dict(self) -> dict[str, float | None]:
        """JSON has no NaN: null."""
        return {name: None if math.isnan(v) else v for name, v in vars(self).items()}


def proportion(successes: int, count: int) -> Interval:
    """The share of successes; Wilson's score interval."""
    if count == 0:
        return Interval(math.nan, math.nan, math.nan)
    share = successes / count
    centre = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * math.sqrt(share * (1 - share) / count + (Z / count / 2) ** 2)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def paired_difference(gained: int, lost: int, count: int) -> Interval:
    """The second side's share of successes less the first's, on the same `count` items.

    Args:
        gained, lost: items that only the second, only the first side got right.

    Bonett and Price's adjusted Wald interval (2012): it keeps a width where nothing differs,
    which resampling the items would not.
    """
    if count == 0:
        return Interval(math.nan, math.nan, math.nan)
    up, down = (gained + 1) / (count + 2), (lost + 1) / (count + 2)
    half = Z * math.sqrt((up + down - (up - down) ** 2) / (count + 2))
    centre = up - down
    return Interval((gained - lost) / count, max(-1.0, centre - half), min(1.0, centre + half))


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p-value that items change equally often in both directions."""
    changed = gained + lost
    # Logarithms: 2**-changed is no float from some thousand on.
    logs = [
        math.lgamma(changed + 1) - math.lgamma(i + 1) - math.lgamma(changed - i + 1)
        for i in range(min(gained, lost) + 1)
    ]
    tail = sum(math.exp(value - changed * math.log(2)) for value in logs)
    return min(1.0, 2 * tail)


def bootstrap_mean(
    sums: np.ndarray, counts: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """The mean over all tokens, resampling whole windows of text: tokens of one depend.

    Args:
        sums: [W] sum of the values in each window.
        counts: [W] number of values in each.
    """
    sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    if not len(sums):
        return Interval(math.nan, math.nan, math.nan)
    mean = float(sums.sum() / counts.sum())
    if len(sums) < 2:
        return Interval(mean, math.nan, math.nan)
    weights = np.random.default_rng(seed).multinomial(
        len(sums), np.full(len(sums), 1 / len(sums)), size=resamples
    )
    low, high = np.percentile(weights @ sums / (weights @ counts), (2.5, 97.5))
    return Interval(mean, float(low), float(high))
