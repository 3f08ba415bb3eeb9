"""A process that writes packages: `python -m mlx_moe.compile_worker`, and its client.

It publishes nothing itself.
"""

import errno
import os
import shutil
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from . import errors
from .activations import Activation
from .child import Child, serve
from .coreml import write_package
from .durable import file_sha256, sync_directory
from .errors import CorruptArtifact, DiskFull, MoEError
from .experts_weights import ExpertWeights
from .mil_program import Stored, StoredExpert, operation_name
from .package import Blob, Package, convolution_blobs
from .package_entry import ExpertTensors, File, Tensor
from .package_form import Function, container, functions

COPIES = 2  # of a package beside those of each function: merged, and its weights as read
STAGED = "weights.npz"
WRITTEN = "package"  # the stem of what is written


def stage_weights(directory: Path, experts: list[ExpertWeights]) -> None:
    """Write what a worker is to read."""
    arrays = {f"{g}.{key}": a for g, e in enumerate(experts) for key, a in e.arrays().items()}
    np.savez(directory / STAGED, **arrays)  # type: ignore[arg-type]


def staged_weights(directory: Path) -> list[ExpertWeights]:
    """Read it and remove it."""
    found: dict[int, dict[str, np.ndarray]] = {}
    with np.load(directory / STAGED) as arrays:
        for name in arrays.files:
            g, _, key = name.partition(".")
            found.setdefault(int(g), {})[key] = arrays[name]
    (directory / STAGED).unlink()
    return [
        ExpertWeights(**{"gate": None, **arrays})  # type: ignore[arg-type]
        for _, arrays in sorted(found.items())
    ]


def build(request: dict[str, Any]) -> dict[str, Any]:
    """Write the package of a request in its directory; the reply says where its weights are.

    Raises:
        DiskFull: there was too little space.
        CorruptArtifact: what was written does not hold the weights, bit for bit.
        MoEError: the program cannot be written.
    """
    directory = Path(request["directory"])
    macos = request["macos"]
    path = directory / container(WRITTEN, macos)
    copies = len(request["capacities"]) + COPIES
    needed = (directory / STAGED).stat().st_size * copies
    try:
        experts = staged_weights(directory)
        stored = write_package(
            path,
            experts,
            Activation(**request["activation"]),
            request["capacities"],
            request["weights"],
            macos,
        )
        places = functions(request["capacities"], macos)
        tensors, blob = read_back(path, stored, request["experts"], places)
        return {
            "blob": blob,
            "tensors": [asdict(t) for t in tensors],
            "files": {name: asdict(file) for name, file in settle(path).items()},
        }
    except Exception as error:
        free = shutil.disk_usage(directory).free
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or free < needed:  # coremltools' own writer does not always say so
            raise DiskFull(
                f"the disk is full: {free / 1e6:.0f} MB are free in {directory.parent}, writing "
                f"group {request['id']!r} takes more; finished packages are kept, so make room "
                "and compile again"
            ) from error
        raise


def read_back(
    path: Path, stored: list[StoredExpert], experts: list[int], places: dict[int, Function]
) -> tuple[list[ExpertTensors], str]:
    """Where each weight is in what was written at `path`, and in which file of it; every bit is
    compared, in every package.

    Raises CorruptArtifact if a value differs, or if the functions of a package do not share the
    weights, or packages have them at different places.
    """
    packages = {place.package: Package(path / place.package) for place in places.values()}
    found = [convolution_blobs(packages[p.package], p.defined) for p in places.values()]
    if any(blobs != found[0] for blobs in found):
        raise CorruptArtifact(f"{path}: the functions do not share their weights")
    for name in packages:
        tensors, file = _compared(path / name, found[0], stored, experts)
    return tensors, (Path(name) / file).as_posix()


def _compared(
    path: Path,
    found: dict[str, dict[str, Blob]],
    stored: list[StoredExpert],
    experts: list[int],
) -> tuple[list[ExpertTensors], str]:
    """The places of the weights in one package, and their file, compared with what is stored."""
    tensors, files = [], set()
    for g, (expert, expected) in enumerate(zip(experts, stored, strict=True)):
        places: dict[str, Tensor | None] = {"gate": None}
        for key, matrix in expected.matrices.items():
            blobs = found[operation_name(g, key, len(stored))]
            places[key] = _matrix(path, blobs, matrix)
            files |= {blob.file for blob in blobs.values()}
            if key in expected.biases:
                _compare(path, blobs["bias"], expected.biases[key])
                places[f"{key}_bias"] = _tensor(blobs["bias"])
        tensors.append(ExpertTensors(expert, **places))  # type: ignore[arg-type]
    if len(files) != 1:
        raise CorruptArtifact(f"{path}: weights in {len(files)} files, expected one")
    return tensors, files.pop()


def _matrix(path: Path, blobs: dict[str, Blob], matrix: Stored) -> Tensor:
    values = blobs["weight" if matrix.scales is None else "data"]
    _compare(path, values, matrix.values)
    if matrix.scales is None:
        return _tensor(values)
    _compare(path, blobs["scale"], matrix.scales)
    return _tensor(values, blobs["scale"].offset)


def _tensor(blob: Blob, scale_offset: int | None = None) -> Tensor:
    shape = tuple(n for n in blob.shape[:2])
    return Tensor(blob.offset, blob.dtype, shape, scale_offset)


def _compare(path: Path, blob: Blob, expected: np.ndarray) -> None:
    found = blob.read(path).reshape(expected.shape)
    if found.dtype != expected.dtype or found.tobytes() != expected.tobytes():
        raise CorruptArtifact(
            f"{path / blob.file} does not hold what was written, at {blob.offset}"
        )


def settle(path: Path) -> dict[str, File]:
    """Have a package reach the disk; its files by path, sizes and hashes."""
    files = {}
    for directory, _, names in os.walk(path):
        for name in names:
            file = Path(directory, name)
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
            relative = file.relative_to(path).as_posix()
            files[relative] = File(file.stat().st_size, file_sha256(file))
        sync_directory(Path(directory))
    return dict(sorted(files.items()))


class Worker(Child):
    """A worker process, started at the first request. Any thread may close it, for good."""

    def __init__(self) -> None:
        super().__init__([sys.executable, "-m", __name__], TQDM_DISABLE="1")
        self._closed, self._lock = False, threading.Lock()

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have one package built; raises what `build` does, or MoEError if the process ended."""
        with self._lock:  # or it would start just after it was closed, and work to the end
            if self._closed:
                raise MoEError("the worker is closed")
            if self._process is None:
                self._start()
        reply, _ = self._exchange(request)
        if reply is None:
            raise MoEError(self._ended(request["id"]))
        if "error" not in reply:
            return dict(reply)
        raise getattr(errors, reply["error"], MoEError)(reply["message"])

    def close(self) -> None:
        with self._lock:
            self._closed = True
        super().close()

    def _ended(self, group: str) -> str:
        how, last = self._how_it_ended()
        return (
            f"a worker ended ({how}) while it wrote group {group!r}: "
            f"{last or 'nothing was logged'}; if memory was short, compile with fewer workers: "
            "what is finished is kept"
        )


def answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return build(request)
    except MoEError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception as error:
        what = f"writing group {request['id']!r} failed: {type(error).__name__}: {error}"
        return {"error": "MoEError", "message": what}


if __name__ == "__main__":
    serve(answer)
