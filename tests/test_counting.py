"""The counters of one layer: histograms, pairs, and what is put off."""

import numpy as np
import pytest
from routing_record import assert_quantiles

from mlx_moe.calibration import QUANTILES
from mlx_moe.counting import PENDING, LayerCounts, LogHistograms, log_bins


def test_quantiles_are_within_the_promised_error() -> None:
    rng = np.random.default_rng(1)
    experts, values = 5, np.exp(rng.normal(0, 4, 20000)).astype(np.float32)
    ids = rng.integers(0, experts - 1, len(values))  # the last expert gets none
    histograms = LogHistograms(experts)
    for part in np.array_split(np.arange(len(values)), 7):
        histograms.add(ids[part], log_bins(values[part]))
    sample = [values[ids == e].astype(float).tolist() for e in range(experts)]
    assert_quantiles(histograms.quantiles(QUANTILES), sample, 0)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, np.inf, np.nan, -2.0])
def test_values_out_of_range_are_counted(value: float) -> None:
    histograms = LogHistograms(1)
    histograms.add(np.array([0, 0]), log_bins(np.array([value, 1.0], np.float32)))
    assert histograms.counts.sum() == 2
    assert histograms.counts.size <= 64 * 64 and np.isfinite(histograms.quantiles((0.5,))).all()


def test_many_chunks_are_counted_together() -> None:
    rng = np.random.default_rng(4)
    counts = LayerCounts(6)
    calls = []
    for tokens in (PENDING // 4, 3, PENDING // 2, 50):
        ids = rng.permuted(np.tile(np.arange(6), (tokens, 1)), axis=1)[:, :3]
        call = {"ids": ids, "norms": np.ones(tokens), "scores": rng.random(ids.shape) + 0.1}
        counts.stage(ids, call["norms"], call["scores"])
        counts.discard()  # what is not committed leaves no trace
        counts.stage(ids, call["norms"], call["scores"])
        counts.commit()
        calls.append(call)
    loads = np.stack([np.bincount(call["ids"].ravel(), minlength=6) for call in calls])
    every = np.concatenate([call["ids"] for call in calls])
    onehot = (every[:, :, None] == np.arange(6)).sum(1)
    np.testing.assert_array_equal(counts.loads, loads)
    np.testing.assert_array_equal(counts.coactivation(), onehot.T @ onehot)
    assert counts.norms.counts.sum() == counts.scores.counts.sum() == every.size


def test_assignments_of_weight_zero_do_not_count() -> None:
    counts = LayerCounts(3)
    ids = np.array([[0, 1], [1, 2], [2, 3]])  # 3 stands for no expert
    scores = np.array([[0.5, 0.0], [0.25, 0.75], [-0.0, 1.0]])
    counts.stage(ids, np.array([1.0, 2.0, 4.0]), scores)
    counts.commit()
    np.testing.assert_array_equal(counts.loads, [[1, 1, 1]])
    np.testing.assert_array_equal(counts.coactivation(), [[1, 0, 0], [0, 1, 1], [0, 1, 1]])
    assert_quantiles(counts.norms.quantiles(QUANTILES), [[1.0], [2.0], [2.0]])
    assert_quantiles(counts.scores.quantiles(QUANTILES), [[0.5], [0.25], [0.75]])
