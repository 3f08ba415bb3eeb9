"""Reading ahead by counts: what is read, and when it ends."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_model import EXPERTS, forward_for, inputs, make_layers, write_checkpoint
from test_store import opened

from mlx_moe.store_prefetch import WINDOW, WINDOWS, Trial


def settle(store: Any) -> None:
    until = time.monotonic() + 30
    while not store._core.idle:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_what_the_next_layer_needs_is_read_ahead(tmp_path: Path) -> None:
    """Layer 1 uses what layer 0 used: once that is learnt, layer 1 finds its experts there."""
    import mlx.core as mx

    layers = make_layers()
    folder = write_checkpoint(tmp_path, layers)
    rng = np.random.default_rng(5)
    with opened(folder, layers, 8) as store:
        runs = list(zip(store.layers.values(), layers.values(), strict=True))
        forwards = [forward_for(stored.experts, layer) for stored, layer in runs]
        x = inputs(1)[0]
        for _ in range(WINDOW - 2):
            ids = mx.array([sorted(rng.choice(EXPERTS, 2, replace=False).tolist())])
            for (stored, _), forward in zip(runs, forwards, strict=True):
                stored.run(x, ids, None, forward)
                settle(store)
        stats = store.stats()
        assert stats["prefetch_useful"] > 5
        assert stats["prefetch_useful"] > stats["prefetch_wasted"]


@pytest.mark.parametrize("helps", (True, False))
def test_reading_ahead_stays_only_where_it_helps(
    helps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stats = {"stall_seconds": 0.0, "prefetch_issued": 1000, "prefetch_useful": 0, "bytes_read": 0}
    trial = Trial(lambda: dict(stats))
    sides = []
    with caplog.at_level(logging.INFO, logger="mlx_moe"):
        for _ in range(2 * WINDOWS * WINDOW + 100):
            sides.append(trial.on)
            stats["stall_seconds"] += 0.001 if trial.on == helps else 0.002
            stats["bytes_read"] += 1
            trial.step()
    assert trial.decided is helps and trial.on is helps
    tried = sides[: 2 * WINDOWS * WINDOW]
    assert sum(tried) == WINDOWS * WINDOW
    assert caplog.text.count("does not help") == (not helps)


def test_wrong_guesses_end_reading_ahead_early(caplog: pytest.LogCaptureFixture) -> None:
    for useful, goes_on in ((10, False), (100, True)):
        stats = {"stall_seconds": 0, "prefetch_issued": 0, "prefetch_useful": 0, "bytes_read": 0}
        trial = Trial(lambda stats=stats: dict(stats))
        with caplog.at_level(logging.INFO, logger="mlx_moe"):
            for _ in range(WINDOW):
                stats["prefetch_issued"] += 6
                stats["bytes_read"] += 1
                trial.step()
                stats["prefetch_useful"] = useful
        assert trial.decided is (None if goes_on else False)
    assert "10 of 138 guesses were right" in caplog.text


def test_nothing_is_guessed_while_nothing_has_to_be_read() -> None:
    stats = {"stall_seconds": 0.0, "prefetch_issued": 0, "prefetch_useful": 0, "bytes_read": 0}
    trial = Trial(lambda: dict(stats))

    def decode(tokens: int, read: int) -> list[bool]:
        sides = []
        for _ in range(tokens):
            sides.append(trial.on)
            stats["bytes_read"] += read
            stats["stall_seconds"] += read * (0.001 if trial.on else 0.002)
            trial.step()
        return sides

    assert all(decode(WINDOW, 0)) and not any(decode(40 * WINDOW, 0))
    assert trial.decided is None
    # Reads again: after the window that shows it, the trial begins.
    assert not any(decode(WINDOW, 1))
    assert sum(decode(2 * WINDOWS * WINDOW, 1)) == WINDOWS * WINDOW
    assert trial.decided is True and all(decode(2 * WINDOW, 1))
    decode(WINDOW, 0)
    assert not any(decode(WINDOW, 0)) and trial.decided is True
