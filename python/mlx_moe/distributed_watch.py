"""A rank that dies or hangs ends the others too: a thread that listens and watches the clock."""

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .distributed_peers import BEAT, DONE, FAILED, Line, addresses, listen, meet
from .ready import readable

GRACE = 3.0  # seconds in which an error of the backend may end this rank before we do
ENDED = 1  # exit code


class Watchdog(threading.Thread):
    """Watches how long this rank waits, and whether the others are alive.

    Every rank has a line to rank 0 and sends a sign of life over it; rank 0 tells all of a rank
    that is gone. What ends the process is `os._exit`: a collective cannot be interrupted.
    """

    def __init__(self, rank: int, size: int, timeout: float):
        super().__init__(name="mlx_moe ranks", daemon=True)
        self.rank, self.size, self.timeout = rank, size, timeout
        self.tick = min(0.5, timeout / 8)
        self._waits: tuple[str, float, float] | None = None  # for what, since when, how long
        self._gone: tuple[str, float] | None = None  # who went, and when
        self._left: tuple[str, float] | None = None  # who is done, and since when
        self._lines: dict[int, Line] = {}
        self._wake, self._woken = socket.socketpair()
        self._closed = False

    # --- called by the thread that computes -------------------------------------------------

    @contextmanager
    def waiting(self, what: str, patience: float = 1.0) -> Iterator[None]:
        self._waits = (what, time.monotonic(), patience * self.timeout)
        try:
            yield
        finally:
            self._waits = None

    def connect(self, gather: Callable[[Any], list[Any]]) -> None:
        """Open the lines; where that fails, on any rank, only this rank's clock is watched."""
        listener = listen() if self.rank == 0 else None
        port = listener.getsockname()[1] if listener else 0
        offer = gather([addresses(), port, secrets.token_hex(16)])[0]
        lines = meet(self.rank, self.size, listener, offer, min(10.0, self.timeout))
        complete = all(gather(len(lines) == (self.size - 1 if self.rank == 0 else 1)))
        if not complete:
            for line in lines.values():
                line.close()
            return
        self._lines = lines
        self._wake.send(b"!")

    def close(self, failure: str | None = None) -> None:
        """Say goodbye. Nothing is watched from then on."""
        if self._closed:
            return
        text = b"" if failure is None else f"rank {self.rank}: {failure}".encode()
        for line in list(self._lines.values()):  # the thread may drop one meanwhile
            line.send(DONE if failure is None else FAILED, text)
        self._closed = True  # only now: the thread then closes the lines
        with suppress(OSError):
            self._wake.send(b"!")

    @property
    def closed(self) -> bool:
        return self._closed

    def lost(self, what: str, error: str) -> str:
        """What to say of an error in a collective."""
        if self._gone is None:  # the line may tell within a moment who it was
            time.sleep(min(0.5, 2 * self.tick))
        known = self._gone or self._left
        who = known[0] if known else "another rank ended or was cut off"
        return f"rank {self.rank} of {self.size}: {who}, seen in {what} ({error})"

    # --- the thread ---------------------------------------------------------------------------

    def run(self) -> None:
        last = time.monotonic()
        while not self._closed:
            watched: list[Any] = [self._woken, *self._lines.values()]
            ready = readable(watched, self.tick)
            now = time.monotonic()
            if now - last > self.timeout / 2:  # it was us who slept
                self._forgive(now)
            last = now
            if self._woken in ready:
                self._woken.recv(16)
            for rank, line in list(self._lines.items()):
                line.send(BEAT)
                self._hear(rank, line, line in ready, now)
            self._judge(now)
        self._woken.close()
        for line in self._lines.values():
            line.close()

    def _forgive(self, now: float) -> None:
        for line in self._lines.values():
            line.heard = now
        if (waits := self._waits) is not None:
            self._waits = (waits[0], now, waits[2])

    def _hear(self, rank: int, line: Line, ready: bool, now: float) -> None:
        for kind, text in line.receive(now) if ready else []:
            if kind == FAILED:
                self._goes(text.decode(errors="replace"), now)
            elif kind == DONE:
                self._drop(rank)
                self._left = (f"rank {rank} ended", now)
                return
        if line.broken:
            self._drop(rank)
            self._goes(f"rank {rank} ended without a word: it was killed, or crashed", now)
        elif now - line.heard > self.timeout:
            self._drop(rank)
            self._goes(
                f"rank {rank} has given no sign of life for {self.timeout:g} s: it was stopped, or "
                "its machine is gone",
                now - GRACE,
            )

    def _drop(self, rank: int) -> None:
        self._lines.pop(rank).close()

    def _goes(self, who: str, now: float) -> None:
        if self._gone is None:
            self._gone = (who, now)
            for line in self._lines.values():  # rank 0 tells the others
                line.send(FAILED, who.encode())

    def _judge(self, now: float) -> None:
        left, waits = self._left, self._waits
        if left is not None and waits is not None and now - max(left[1], waits[1]) >= GRACE:
            self._end(left[0])  # it will not come
        if self._gone is not None and now - self._gone[1] >= GRACE:
            self._end(self._gone[0])
        later = self.timeout / 2 if self._lines else 0.0  # a line may tell who it is, until then
        if waits is not None and now - waits[1] > waits[2] + later:
            self._end(
                f"the others did not come to {waits[0]} within {waits[2]:g} s: one of them hangs, "
                "failed, or runs another program"
            )

    def _end(self, why: str) -> None:
        if self._closed:
            return
        for line in self._lines.values():
            line.send(FAILED, f"rank {self.rank}: {why}".encode())
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        # Unbuffered, whatever the main thread holds, and beneath a text that was cut off.
        os.write(2, f"\nmlx_moe: error: rank {self.rank} of {self.size}: {why}; ending\n".encode())
        os._exit(ENDED)
