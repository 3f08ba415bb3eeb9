"""What mlx_moe keeps for a user between runs, and where; all of it can be made again."""

import os
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import InvalidArgument, MoEError

VARIABLE = "MLX_MOE_CACHE"
KINDS = {
    "compiled": "Core ML models as this system compiled them",
    "counts": "how often each expert was used",
    "profiles": "what `mlx_moe tune` measured",
}
LOCK = ".lock"  # how files end that processes hold each other off with: they stay
SETTLED = 3600.0  # seconds; a hidden entry that has not changed for so long is nobody's work


@dataclass(frozen=True)
class Entry:
    """A file or directory of the cache.

    Attributes:
        bytes: of the files in it; links are not followed.
        modified: seconds since the epoch, of the newest thing in it.
        finished: false for what is being written, or was when a program ended.
    """

    kind: str
    name: str
    path: Path
    bytes: int
    modified: float
    finished: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def cache_dir(kind: str | None = None) -> Path:
    """The user's cache directory, or that of one of KINDS in it; not made by this.

    $MLX_MOE_CACHE, else ~/Library/Caches/mlx_moe on macOS, else mlx_moe in $XDG_CACHE_HOME or
    ~/.cache.
    """
    if kind is not None and kind not in KINDS:
        raise InvalidArgument(f"no kind of cache {kind!r}; expected one of {', '.join(KINDS)}")
    if given := os.environ.get(VARIABLE):
        root = Path(given).expanduser().absolute()
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches" / "mlx_moe"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # The XDG specification has relative paths ignored.
        root = (base if base.is_absolute() else Path.home() / ".cache") / "mlx_moe"
    return root if kind is None else root / kind


def make_cache_dir(kind: str) -> Path:
    """As `cache_dir`, made if need be; write to a hidden name in it and rename.

    Raises MoEError where there can be no such directory.
    """
    path = cache_dir(kind)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MoEError(
            f"cannot make the cache directory {path} ({error.strerror}); set {VARIABLE} to a "
            "directory that can be written to"
        ) from error
    return path


def entries(kinds: Iterable[str] = tuple(KINDS)) -> list[Entry]:
    """What is there, by kind and name; a kind that has no directory has no entries."""
    found = []
    for kind in kinds:
        directory = cache_dir(kind)
        try:
            paths = sorted(directory.iterdir())
        except FileNotFoundError:
            continue
        except OSError as error:
            raise MoEError(f"cannot read the cache {directory}: {error.strerror}") from error
        shown = (path for path in paths if not path.name.endswith(LOCK))
        found += [entry for path in shown if (entry := _entry(kind, path)) is not None]
    return found


def clear(chosen: Iterable[Entry]) -> list[Entry]:
    """Delete entries; those that somebody may be writing just now stay. Returns the deleted.

    Each is renamed first, so that nobody ever opens half of one.

    Raises MoEError for one that cannot be deleted; those before it are gone.
    """
    deleted = []
    for entry in chosen:
        if not entry.finished and time.time() - entry.modified < SETTLED:
            continue
        going = entry.path.with_name(f".deleted-{os.getpid()}-{entry.name}")
        try:
            entry.path.rename(going)
            if going.is_dir() and not going.is_symlink():
                shutil.rmtree(going)
            else:
                going.unlink()
        except FileNotFoundError:  # another process was faster
            continue
        except OSError as error:
            raise MoEError(f"cannot delete {entry.path}: {error.strerror}") from error
        deleted.append(entry)
    return deleted


def _entry(kind: str, path: Path) -> Entry | None:
    try:
        states = [found.lstat() for found in _all_in(path)]
    except FileNotFoundError:  # deleted meanwhile
        return None
    return Entry(
        kind,
        path.name,
        path,
        sum(state.st_size for state in states if not stat.S_ISDIR(state.st_mode)),
        max(state.st_mtime for state in states),
        not path.name.startswith("."),
    )


def _all_in(path: Path) -> Iterator[Path]:
    """`path`, then all files in it if it is a directory."""
    yield path
    if path.is_dir() and not path.is_symlink():
        for root, _, files in os.walk(path):
            yield from (Path(root, name) for name in files)
