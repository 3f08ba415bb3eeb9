"""Ctrl-C that waits while something must not be left half done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """While open, Ctrl-C raises KeyboardInterrupt at once outside of `held`, and after it inside.

    Does nothing in other threads than the main one, nor where someone handles Ctrl-C already.
    """

    def __init__(self) -> None:
        self._held = self._waiting = self._ours = False

    def __enter__(self) -> "Interrupts":
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupted)
            self._ours = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._ours = False

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if not self._held:
            raise KeyboardInterrupt
        self._waiting = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Not for long: Ctrl-C waits for the end."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if self._waiting:
                self._waiting = False
                raise KeyboardInterrupt
