"""From measured times to the numbers of the cost model."""

from collections.abc import Sequence

import numpy as np

from .measured import Sample

LEAST = 1e-6  # seconds; no path starts faster than a call


def cold_numbers(samples: Sequence[Sample], flops: float, expert_bytes: float) -> dict[str, float]:
    """cold_flops, cold_bandwidth and cold_seconds of samples of one size of expert.

    The start is what one expert takes beyond its share of many at the same rows; bandwidth is of
    the fewest rows, where the path waits for weights, FLOP/s the most at any number.

    Args:
        flops: of one row of one expert.
        expert_bytes: of its weights as the model keeps them.
    """
    most = max(sample.experts for sample in samples)
    fewest = min(sample.rows for sample in samples)
    many = {s.rows: s.seconds for s in samples if s.experts == most}
    one = next((s.seconds for s in samples if s.experts == 1 and s.rows == fewest), None)
    start = LEAST
    if one is not None and most > 1:
        start = max(one - (many[fewest] - one) / (most - 1), LEAST)
    working = {rows: max(s - start, s / 2) for rows, s in many.items()}
    return {
        "cold_seconds": start,
        "cold_bandwidth": most * expert_bytes / working[fewest],
        "cold_flops": max(most * rows * flops / seconds for rows, seconds in working.items()),
    }


def static_numbers(
    samples: Sequence[Sample], flops: float, expert_bytes: float, dispatch: float
) -> dict[str, float]:
    """static_flops, static_efficiency and static_bandwidth of samples of one size of expert.

    FLOP/s are the most that any group reached; the efficiency is the median share of it among
    groups at the largest capacity; bandwidth is of the fewest rows: at least that much, since
    computing takes its time too.

    Args:
        flops, expert_bytes: of one slot and of one expert's fp16 weights.
        dispatch: seconds of one program, taken off.
    """
    working = [(s, max(s.seconds - dispatch, s.seconds / 2)) for s in samples]
    rate = {s: s.experts * s.rows * flops / seconds for s, seconds in working}
    best, largest = max(rate.values()), max(s.rows for s in samples)
    share = float(np.median([rate[s] / best for s in samples if s.rows == largest]))
    fewest = min(s.rows for s in samples)
    read = max(s.experts * expert_bytes / seconds for s, seconds in working if s.rows == fewest)
    return {"static_flops": best, "static_efficiency": share, "static_bandwidth": read}
