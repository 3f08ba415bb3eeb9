"""Slots of experts in MLX's own arrays, for layers that MLX's operations compute (on a GPU).

The memory of Apple's GPU is the CPU's too: experts are read from the files straight into the
arrays, behind MLX's back. So nothing is read into a slot before the graphs that use it have run.
"""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .errors import FileChanged, ReadFailed, StoreClosed
from .store_files import PARTS, Checkpoint, StoredExperts

READERS = 4  # threads
Place = tuple[str, str]  # projection and part
Shapes = dict[Place, tuple[tuple[int, ...], mx.Dtype]]


class Bank:
    """Slots for experts of the same shapes.

    Attributes:
        arrays: [slots, ...] by projection and part.
        slots: how many there are.
        slot: bytes of one.
        free: slots that hold nothing.
    """

    def __init__(self, shapes: Shapes, slots: int):
        self.slots, self.free = slots, list(range(slots))[::-1]
        self.arrays = {place: mx.zeros((slots, *s), dtype) for place, (s, dtype) in shapes.items()}
        mx.eval(self.arrays)
        self._memory = {place: _bytes(array) for place, array in self.arrays.items()}
        self.slot = sum(memory.shape[1] for memory in self._memory.values())

    def part(self, place: Place, slot: int) -> memoryview:
        """The memory of one part of a slot."""
        return memoryview(self._memory[place][slot])


def _bytes(array: mx.array) -> NDArray[np.uint8]:
    """The memory of an evaluated array [n, ...] as [n, bytes], writable."""
    return np.array(array.reshape(len(array), -1).view(mx.uint8), copy=False)


@dataclass
class File:
    """An open file that must stay as it was; its path is still watched when it is closed."""

    path: Path
    handle: int | None
    state: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.state = self._now()

    def _now(self) -> tuple[int, ...]:
        return _state(self.path if self.handle is None else self.handle)

    def check(self, path_too: bool = False) -> None:
        """Raise FileChanged if it was written to, or if its path is another file's by now."""
        places: list[Path | int] = [] if self.handle is None else [self.handle]
        if path_too:
            places.append(self.path)
        try:
            same = all(_state(place) == self.state for place in places)
        except OSError:
            same = False
        if not same:
            raise FileChanged(f"{self.path} was written to or replaced while it was in use")

    def read(self, into: memoryview, at: int) -> None:
        assert self.handle is not None
        while into:
            try:
                count = os.preadv(self.handle, [into], at)
            except OSError as error:
                raise ReadFailed(f"cannot read {self.path}: {error}") from error
            if not count:
                raise ReadFailed(f"{self.path} ends before byte {at + len(into)}")
            into, at = into[count:], at + count


def _state(place: Path | int) -> tuple[int, ...]:
    facts = os.stat(place)
    return facts.st_size, facts.st_mtime_ns, facts.st_dev, facts.st_ino


class BankFiles:
    """Reads experts of a checkpoint into slots."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint, self.closed = checkpoint, False
        self.files: list[File] = []
        self._threads = ThreadPoolExecutor(READERS, "mlx_moe bank")
        self._lock = threading.RLock()  # closing waits for a read
        try:
            for path in checkpoint.paths:
                self.files.append(File(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)))
        except OSError as error:
            self.close()
            raise ReadFailed(f"cannot open {path}: {error}") from error

    def check_open(self) -> None:
        if self.closed:
            raise StoreClosed("the expert store is closed")

    def check(self, path_too: bool = False) -> None:
        for file in self.files:
            file.check(path_too)

    def read(self, wanted: Sequence[tuple[StoredExperts, int, Bank, int]]) -> None:
        """(layer, expert, bank, slot) of each; raises ReadFailed, FileChanged or StoreClosed.

        Nothing writes to a slot any more when this ends, however it does.
        """
        with self._lock:
            self.check_open()
            self.check()
            reads = Reads()
            try:
                done = [
                    self._threads.submit(reads.run, file, into, at)
                    for file, into, at in [part for one in wanted for part in self._parts(*one)]
                ]
                errors = [future.exception() for future in done]
            except RuntimeError as none:  # the system starts no thread
                raise ReadFailed(f"cannot begin to read: {none}") from none
            finally:
                reads.settle()
            for error in errors:
                if error is not None:
                    raise error
            self.check()

    def _parts(self, experts: StoredExperts, expert: int, bank: Bank, slot: int) -> list[Any]:
        found = []
        for child, projection in experts.projections.items():
            for part, names in zip(PARTS, projection.names, strict=True):
                if not names:
                    continue
                into = bank.part((child, part), slot)
                facts = self.checkpoint.tensors[names[expert] if len(names) > 1 else names[0]]
                at = facts.begin + (0 if len(names) > 1 else expert * len(into))
                found.append((self.files[facts.file], into, at))
        return found

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._threads.shutdown()
            for file in self.files:
                if file.handle is not None:
                    os.close(file.handle)
                    file.handle = None


class Reads:
    """Those of one call, known from when they begin: an interrupt can come before whoever asked
    for one has a handle of it."""

    def __init__(self) -> None:
        self._change, self._running, self._over = threading.Condition(), 0, False

    def run(self, file: File, into: memoryview, at: int) -> None:
        with self._change:
            if self._over:
                return
            self._running += 1
        try:
            file.read(into, at)
        finally:
            with self._change:
                self._running -= 1
                self._change.notify_all()

    def settle(self) -> None:
        """Let none begin any more and wait for the rest, through any further interrupt."""
        while True:
            try:
                with self._change:
                    self._over = True
                    self._change.wait_for(lambda: not self._running)
                return
            except KeyboardInterrupt:  # the first one is raised after this
                continue
