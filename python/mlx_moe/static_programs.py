"""A plan's programs in the executor that runs them: each package a number, or none."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from . import core
from .errors import CorruptArtifact, InvalidArgument
from .manifest import Manifest
from .package_entry import TENSORS, PackageEntry


class Programs(Protocol):
    """Packages that were opened for an executor."""

    executor: Any

    def number(self, id: str) -> int | None:
        """The executor's number for a package; None for one whose experts are cold."""

    def summary(self) -> str | None:
        """A sentence for users about all of them."""

    def placement(self, ids: Sequence[str]) -> str | None:
        """Where some of them run, in the few words of a table's cell."""


def open_programs(backend: str, manifest: Manifest, ids: Sequence[str]) -> Programs:
    """The packages `ids` of a manifest in the executor of a backend, "host" or "coreml"."""
    if backend == "host":
        return HostPrograms(manifest, ids)
    from .coreml_load import CoreMLPrograms

    return CoreMLPrograms.open(manifest, ids)


class HostPrograms:
    """Packages run from their weight files, on the CPU."""

    def __init__(self, manifest: Manifest, ids: Sequence[str]):
        self.executor = core.HostExecutor()
        self._numbers = {
            id: load_program(self.executor, manifest.directory, manifest.package(id)) for id in ids
        }

    def number(self, id: str) -> int:
        return self._numbers[id]

    def summary(self) -> None:
        return None

    def placement(self, ids: Sequence[str]) -> None:
        return None


def load_program(executor: Any, directory: Path, entry: PackageEntry) -> int:
    """The host executor's number for a package."""

    def place(tensor: Any) -> tuple[int, int | None] | None:
        return None if tensor is None else (tensor.offset, tensor.scale_offset)

    try:
        return int(
            executor.load(
                str(directory / entry.path / entry.blob),
                entry.hidden,
                entry.inner,
                entry.activation,
                sorted(entry.functions),
                [tuple(place(getattr(e, key)) for key in TENSORS) for e in entry.tensors],
                entry.activation_parameters,
            )
        )
    except InvalidArgument as error:
        raise CorruptArtifact(f"{entry.layer}: group {entry.id!r}: {error}") from error
