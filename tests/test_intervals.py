"""Confidence intervals against published values, brute force and their own promise."""

from fractions import Fraction
from math import comb, isnan, sqrt

import numpy as np
import pytest

from mlx_moe.intervals import Interval, bootstrap_mean, mcnemar, paired_difference, proportion


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17:857-872, table I, method 3.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_proportion(successes: int, count: int, low: float, high: float) -> None:
    found = proportion(successes, count)
    assert found.value == successes / count
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 9), (9, 1), (5, 5), (3, 17), (400, 470)])
def test_mcnemar_is_the_exact_binomial_test(gained: int, lost: int) -> None:
    n = gained + lost
    tail = sum(Fraction(comb(n, i), 2**n) for i in range(min(gained, lost) + 1))
    assert mcnemar(gained, lost) == pytest.approx(float(min(Fraction(1), 2 * tail)), rel=1e-9)


def test_mcnemar_of_many_changes_is_finite() -> None:
    assert mcnemar(5000, 5000) == 1.0
    assert 0 <= mcnemar(4000, 6000) < 1e-80


@pytest.mark.parametrize(("up", "down"), [(0.02, 0.02), (0.1, 0.02), (0.3, 0.1), (0.0, 0.05)])
def test_paired_difference_covers_the_truth(up: float, down: float) -> None:
    """The probability, over all outcomes, that the interval holds the true difference."""
    count, covered = 60, 0.0
    for gained in range(count + 1):
        for lost in range(count + 1 - gained):
            interval = paired_difference(gained, lost, count)
            if interval.low <= up - down <= interval.high:
                ways = comb(count, gained) * comb(count - gained, lost)
                covered += (
                    ways * up**gained * down**lost * (1 - up - down) ** (count - gained - lost)
                )
    assert 0.94 <= covered <= 0.9995  # few changes: on the safe side


def test_paired_difference_of_many_items_is_the_normal_one() -> None:
    found = paired_difference(60, 80, 2400)
    error = sqrt(140 / 2400 - (20 / 2400) ** 2) / sqrt(2400)
    assert found.value == -20 / 2400
    assert (found.low, found.high) == pytest.approx(
        (found.value - 1.96 * error, found.value + 1.96 * error), abs=1e-4
    )


def test_nothing_changed_is_not_nothing_known() -> None:
    assert paired_difference(0, 0, 100).low < -0.01
    assert isnan(proportion(0, 0).low) and isnan(paired_difference(0, 0, 0).value)


def test_bootstrap_is_of_windows_not_tokens() -> None:
    rng = np.random.default_rng(0)
    windows, tokens = 200, 64
    values = np.repeat(rng.normal(3, 1, windows), tokens).reshape(windows, tokens)
    found = bootstrap_mean(values.sum(axis=1), np.full(windows, tokens))
    error = values[:, 0].std(ddof=1) / sqrt(windows)  # tokens of a window are alike here
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(found.value - 1.96 * error, rel=0.01)
    assert found.high == pytest.approx(found.value + 1.96 * error, rel=0.01)
    assert found == bootstrap_mean(values.sum(axis=1), np.full(windows, tokens))


def test_bootstrap_weighs_windows_by_their_tokens() -> None:
    found = bootstrap_mean(np.array([10.0, 0.0]), np.array([1, 9]))
    assert found.value == 1.0 and (found.low, found.high) == (0.0, 10.0)


def test_one_window_has_no_interval() -> None:
    found = bootstrap_mean(np.array([6.0]), np.array([3]))
    assert found.value == 2.0 and isnan(found.low) and isnan(found.high)
    assert found.as_dict() == {"value": 2.0, "low": None, "high": None}
    assert Interval(0.5, 0.25, 1).scaled(100) == Interval(50, 25, 100)
