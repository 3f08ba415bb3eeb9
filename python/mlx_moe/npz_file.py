"""Arrays with a JSON object beside them in one file that others may have changed."""

import errno
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .durable import whole
from .errors import CorruptFile, DiskFull, InvalidArgument


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


def read_npz(path: str | Path, form: str, version: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """`meta` and the arrays of a file that `write_npz` wrote; CorruptFile if it is none."""
    if Path(path).is_file() and not zipfile.is_zipfile(path):  # numpy would speak of pickles
        raise CorruptFile(f"{path} is not a {form} file: it is no .npz, or is cut short")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(str(arrays.pop("meta")))
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
