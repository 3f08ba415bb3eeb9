"""Slots of experts in MLX's own arrays, for layers that MLX's operations compute (on a GPU).

The memory of Apple's GPU is the CPU's too: experts are read from the files straight into the
arrays, behind MLX's back. So nothing is read into a slot before the graphs that use it have run.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .errors import FileChanged, ReadFailed
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
    """An open file that must stay as it was."""

    path: Path
    handle: int
    state: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.state = self._now()

    def _now(self) -> tuple[int, ...]:
        facts = os.fstat(self.handle)
        return facts.st_size, facts.st_mtime_ns

    def check(self, path_too: bool = False) -> None:
        """Raise FileChanged if it was written to, or if its path is another file's by now."""
        same = self._now() == self.state
        if same and path_too:
            here, there = os.fstat(self.handle), self.path.stat() if self.path.exists() else None
            same = there is not None and (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
        if not same:
            raise FileChanged(f"{self.path} was written to or replaced while it was in use")

    def read(self, into: memoryview, at: int) -> None:
        while into:
            try:
                count = os.preadv(self.handle, [into], at)
            except OSError as error:
                raise ReadFailed(f"cannot read {self.path}: {error}") from error
            if not count:
                raise ReadFailed(f"{self.path} ends before byte {at + len(into)}")
            into, at = into[count:], at + count


class BankFiles:
    """Reads experts of a checkpoint into slots."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.files: list[File] = []
        self._threads = ThreadPoolExecutor(READERS, "mlx_moe bank")
        try:
            for path in checkpoint.paths:
                self.files.append(File(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)))
        except OSError as error:
            self.close()
            raise ReadFailed(f"cannot open {path}: {error}") from error

    def check(self, path_too: bool = False) -> None:
        for file in self.files:
            file.check(path_too)

    def read(self, wanted: Sequence[tuple[StoredExperts, int, Bank, int]]) -> None:
        """(layer, expert, bank, slot) of each; raises ReadFailed or FileChanged."""
        self.check()
        parts = [part for one in wanted for part in self._parts(*one)]
        done = [self._threads.submit(file.read, into, at) for file, into, at in parts]
        errors = [future.exception() for future in done]  # all of them: the slots are ours again
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
        self._threads.shutdown()
        for file in self.files:
            os.close(file.handle)
        self.files = []
