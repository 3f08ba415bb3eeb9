"""Files that are whole or not there, and their digests."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def write_json(path: Path, value: Any) -> Path:
    """Write JSON that survives a crash whole or not at all."""
    with whole(path) as scratch, scratch.open("w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)
    return path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file beside `path` to write; it takes its place at the end, or goes if something failed."""
    scratch = scratch_path(path)
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        with suppress(OSError):  # as on a file system that cannot be written
            scratch.unlink()


def scratch_path(path: str | Path) -> Path:
    """Where `whole` has a file written; what a kill leaves there is of no use."""
    return Path(path).with_name(f".{Path(path).name}.tmp")


def sync_directory(path: Path) -> None:
    """Have renames in a directory reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory against other processes that ask for it, once they have let it go."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # which unlocks it, as does the end of the process
