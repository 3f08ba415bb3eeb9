"""Arrays with a JSON object beside them in one file that others may have changed."""

import errno
import json
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .durable import whole
from .errors import CorruptFile, DiskFull, InvalidArgument

MOST_META = 256 << 20  # bytes
MOST_UNPACKED, MOST_RATIO = 256 << 20, 100  # of what unpacks to more bytes: times its own size
Header = tuple[tuple[int, ...], np.dtype[Any]]


def write_npz(
    path: str | Path, meta: dict[str, Any], arrays: dict[str, NDArray[Any]], compress: bool = True
) -> None:
    """Write `meta` as JSON and the arrays, in place of `path` only once all is written."""
    save: Any = np.savez_compressed if compress else np.savez
    try:
        with whole(Path(path)) as scratch, scratch.open("wb") as file:
            save(file, meta=np.array(json.dumps(meta)), **arrays)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise (DiskFull if full else InvalidArgument)(f"cannot write {path}: {error}") from error


class Arrays(Mapping[str, NDArray[Any]]):
    """The arrays of a file: their headers are known, and each is read when it is asked for."""

    def __init__(self, path: str | Path, headers: dict[str, Header]):
        self.path, self.headers = path, headers

    def __len__(self) -> int:
        return len(self.headers)

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self.headers:
            raise KeyError(name)
        try:
            with zipfile.ZipFile(self.path) as file, file.open(f"{name}.npy") as entry:
                return np.asarray(np.lib.format.read_array(entry, allow_pickle=False))
        except _UNREADABLE as error:
            raise CorruptFile(f"{name} cannot be read: {error}") from error

    def check(self, name: str, dtype: Any, shape: Sequence[int | None]) -> None:
        """CorruptFile unless there is an array of this dtype and shape (None: any); reads none."""
        if name not in self.headers:
            raise CorruptFile(f"{name} is missing")
        found, kind = self.headers[name]
        fits = len(found) == len(shape) and all(
            wanted in (None, size) for wanted, size in zip(shape, found, strict=True)
        )
        if not fits or kind != np.dtype(dtype):
            raise CorruptFile(
                f"{name} is {kind} {list(found)}; expected {np.dtype(dtype)} {list(shape)}"
            )

    def take(self, name: str, dtype: Any, shape: Sequence[int | None]) -> NDArray[Any]:
        """The array, if it is as `check` wants it."""
        self.check(name, dtype, shape)
        return self[name]


def read_npz(path: str | Path, form: str, version: int) -> tuple[dict[str, Any], Arrays]:
    """`meta` and the arrays of a file that `write_npz` wrote; CorruptFile if it is none.

    What a file claims to hold is checked before it is read: a small file cannot take much memory.
    """
    if Path(path).is_file() and not zipfile.is_zipfile(path):  # numpy would speak of pickles
        raise CorruptFile(f"{path} is not a {form} file: it is no .npz, or is cut short")
    try:
        with zipfile.ZipFile(path) as file:
            headers = {entry.filename[:-4]: _header(file, entry) for entry in _entries(file)}
        arrays = Arrays(path, headers)
        if (size := math.prod(headers["meta"][0]) * headers["meta"][1].itemsize) > MOST_META:
            raise ValueError(f"meta takes {size} bytes")
        meta = json.loads(str(arrays["meta"]))
        del headers["meta"]
    except FileNotFoundError as error:
        raise InvalidArgument(f"there is no file {path}") from error
    except _UNREADABLE as error:
        raise CorruptFile(f"{path} is not a {form} file, or is cut short: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != form:
        raise CorruptFile(f"{path} is not a {form} file")
    if meta.get("version") != version:
        raise CorruptFile(
            f"{path} is version {meta.get('version')!r} of {form}; this mlx_moe reads {version}"
        )
    return meta, arrays


def _entries(file: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """What the directory lists; ValueError where it would unpack to much more than there is."""
    entries = file.infolist()
    unpacked, packed = (
        sum(getattr(e, key) for e in entries) for key in ("file_size", "compress_size")
    )
    if unpacked > max(MOST_UNPACKED, MOST_RATIO * packed):
        raise ValueError(f"{packed} bytes would unpack to {unpacked}")
    return entries


def _header(file: zipfile.ZipFile, info: zipfile.ZipInfo) -> Header:
    """Shape and dtype of an entry; ValueError unless its size is theirs."""
    with file.open(info) as entry:
        version = np.lib.format.read_magic(entry)
        read = {(1, 0): np.lib.format.read_array_header_1_0}.get(
            version, np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(entry)
        size = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or any(n < 0 for n in shape) or entry.tell() + size != info.file_size:
            raise ValueError(f"{info.filename} is {dtype} {list(shape)} in {info.file_size} bytes")
    return shape, dtype


# What numpy and zipfile raise for files that are none of theirs, or damaged.
_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    OverflowError,
    zipfile.BadZipFile,
    zlib.error,
)
