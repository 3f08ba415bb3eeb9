"""Files that are whole or not there, and their digests."""

import hashlib
import json
import os
from contextlib import suppress
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
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        with scratch.open("w") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        with suppress(OSError):  # as on a file system that cannot be written
            scratch.unlink()
    sync_directory(path.parent)
    return path


def sync_directory(path: Path) -> None:
    """Have renames in a directory reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
