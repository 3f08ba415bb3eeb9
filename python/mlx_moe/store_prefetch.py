"""Reading ahead, and whether it is worth it."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .store_counts import ExpertCounts

log = logging.getLogger(__name__)

LIKELY = 0.3  # probability from which an expert is read ahead
MOST = 2  # times a token's experts, that are guessed at most
WINDOW = 24  # tokens with reads ahead, then as many without
WINDOWS = 4  # of each before a judgement
GAIN = 0.02  # of the stall that reading ahead must save to stay
GUESSES, RIGHT = 128, 0.4  # from so many guesses on, fewer right ones than this are not tried on


class Trial:
    """Reads ahead by turns with not, until it is known which stalls less.

    Attributes:
        decided: None while it is tried, then whether to go on.
        needless: nothing had to be read of late; so nothing is guessed, and nothing learnt.
    """

    def __init__(self, stats: Callable[[], dict[str, Any]]):
        """stats: as of `core.Store`."""
        self.decided: bool | None = None
        self.needless = False
        self._stats = stats
        self._steps = 0
        self._first: dict[str, Any] = {}
        self._before: dict[str, Any] = {}  # as of when the window began
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    @property
    def on(self) -> bool:
        """Whether to read ahead now."""
        if self.needless:
            return False
        if self.decided is not None:
            return self.decided
        return self._steps // WINDOW % 2 == 0

    def step(self) -> None:
        """A token was decoded."""
        if self.decided is False:
            return
        if not self._steps:
            self._first = self._before = self._stats()
        on = self.on
        self._steps += 1
        if self._steps % WINDOW:
            return
        before, self._before = self._before, self._stats()
        now, paused = self._before, self.needless
        self.needless = now["bytes_read"] == before["bytes_read"]
        if self.needless or paused or self.decided:
            self._steps -= WINDOW  # as if it had not been
            return
        self._seconds[on].append(now["stall_seconds"] - before["stall_seconds"])
        issued, useful = (now[k] - self._first[k] for k in ("prefetch_issued", "prefetch_useful"))
        if issued >= GUESSES and useful < RIGHT * issued:
            self.decided = False
            log.info(
                "reading experts ahead does not help here (%d of %d guesses were right): it is "
                "off now",
                useful,
                issued,
            )
        elif len(self._seconds[False]) == WINDOWS:
            self._decide()

    def _decide(self) -> None:
        # The first window of each fills the slots.
        with_it, without = (float(np.median(self._seconds[on][1:])) for on in (True, False))
        self.decided = with_it < (1 - GAIN) * without
        if not self.decided:
            log.info(
                "reading experts ahead does not help here (%.1f ms of waiting a token with it, "
                "%.1f without): it is off now",
                1e3 * with_it / WINDOW,
                1e3 * without / WINDOW,
            )


@dataclass
class _Token:
    """What one thread's single token was routed to so far, layer by layer from `first` on."""

    first: int
    ids: list[NDArray[Any]]


class Ahead:
    """Counts what is used, and guesses from it what the next layer will need.

    A single token is counted when it has passed all layers: a few calls of numpy then, not some
    at every layer.
    """

    def __init__(self, counts: ExpertCounts, trial: Trial, read: Callable[[int, Any], None]):
        """read: begins to read experts of a layer."""
        self.counts, self.trial, self._read = counts, trial, read
        self._last: dict[int, tuple[int, NDArray[Any]]] = {}  # of each thread: layer, ids of some
        self._tokens: dict[int, _Token] = {}  # of each thread
        self.lock = threading.Lock()

    def routed(self, layer: int, ids: NDArray[Any]) -> None:
        """A forward of a layer has its experts, ids [T, k]."""
        thread = threading.get_ident()
        with self.lock:
            if len(ids) != 1:
                self._flush(thread)
                last, before = self._last.get(thread, (-1, None))
                self.counts.add(layer, ids, before if last == layer - 1 else None)
                self._last[thread] = layer, ids
                return
            if layer == 0:
                self.trial.step()
            token = self._tokens.get(thread)
            if token is None or layer == 0 or layer != token.first + len(token.ids):
                self._flush(thread)
                token = self._tokens[thread] = _Token(layer, [])
            token.ids.append(ids[0])
            if layer + 1 == len(self.counts.layers):
                self._flush(thread)

    def save(self, path: Path) -> None:
        """Add the counts to a file, with what tokens on their way passed so far. Nothing that
        counts meanwhile waits for the file."""
        with self.lock:
            for thread in list(self._tokens):
                self._flush(thread)
        self.counts.save(path, self.lock)

    def _flush(self, thread: int) -> None:
        token = self._tokens.pop(thread, None)
        if token is None:
            return
        self.counts.add_token(token.first, token.ids)
        if len(token.ids) == len(self.counts.layers):
            self.counts.decoded(token.ids)

    def guess(self, layer: int, ids: NDArray[Any]) -> None:
        """Begin to read what the layer after this one is likely to need."""
        if not self.trial.on or len(ids) != 1 or layer + 1 >= len(self.counts.layers):
            return
        with self.lock:
            experts, chances = self.counts.likely_next(layer, ids[0])
        likely = experts[chances * ids.shape[1] >= LIKELY][: MOST * ids.shape[1]]
        if len(likely):
            self._read(layer + 1, likely.astype(np.int32))
