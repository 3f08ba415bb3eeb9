"""An artifacts directory while it is compiled: a lock, a journal, and what is published."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .durable import sync_directory, write_json
from .errors import CorruptArtifact, DiskFull, MoEError
from .manifest import NAME, Manifest, verify_package
from .package_entry import PackageEntry
from .package_form import MACOS, container

WORK = ".compiling"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class CompileDirectory:
    """Packages appear in it finished; the manifest appears last.

    While a compilation is under way there is no manifest. The journal in DIR/.compiling has the
    entries of finished packages, and a directory for each that is being written.
    """

    def __init__(self, root: Path):
        self.root, self.work = root, root / WORK
        self.stages, self.journal = self.work / "stages", self.work / "journal"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory, made if need be, against other compilations."""
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise MoEError(
                f"another `mlx_moe compile` is writing {self.root}: let it end"
            ) from None
        try:
            yield
        finally:
            os.close(handle)  # which unlocks it, as does the end of the process

    def finished(self) -> dict[str, PackageEntry]:
        """Entries of packages that were finished, by id; not verified."""
        found = {}
        with suppress(CorruptArtifact):
            found = {entry.id: entry for entry in Manifest.load(self.root).packages}
        for path in self.journal.glob("*.json"):
            with suppress(CorruptArtifact, ValueError, RecursionError):
                entry = PackageEntry.from_json(json.loads(path.read_bytes()), str(path))
                found[entry.id] = entry
        return found

    def is_current(self, entry: PackageEntry | None, recipe: str) -> bool:
        """Whether a package is what `recipe` asks for, every byte of it."""
        if entry is None or entry.recipe != recipe:
            return False
        try:
            verify_package(self.root, entry, deep=True)
        except CorruptArtifact:
            return False
        return True

    def begin(self, before: dict[str, PackageEntry]) -> None:
        """From here on the directory is unfinished: the manifest goes, the journal comes.

        What was there `before` is noted, to be kept or removed at the end.
        """
        with writing(self.root):
            shutil.rmtree(self.stages, ignore_errors=True)
            for directory in (self.stages, self.journal):
                directory.mkdir(parents=True, exist_ok=True)
            for entry in before.values():
                self._note(entry)
            (self.root / NAME).unlink(missing_ok=True)
            sync_directory(self.root)

    def stage(self, id: str) -> Path:
        """An empty directory to write a package in."""
        path = self.stages / id
        with writing(self.root):
            path.mkdir()
        return path

    def publish(self, package: Path, entry: PackageEntry) -> None:
        """Put a written package in its place and note it; its stage goes.

        So does its other form: notes are by id, and nothing else would remember it.
        """
        place = self.root / entry.path
        with writing(self.root):
            if place.exists():
                place.rename(package.parent / "before")
            package.rename(place)
            for path in {container(entry.id, macos) for macos in MACOS} - {entry.path}:
                shutil.rmtree(self.root / path, ignore_errors=True)
            sync_directory(self.root)
            self._note(entry)
            shutil.rmtree(package.parent)

    def finish(self, manifest: Manifest, before: dict[str, PackageEntry]) -> None:
        """Write the manifest; packages of `before` that are not in it are removed."""
        with writing(self.root):
            manifest.save()
            paths = {entry.path for entry in manifest.packages}
            for entry in before.values():
                if entry.path not in paths:
                    shutil.rmtree(self.root / entry.path, ignore_errors=True)
            shutil.rmtree(self.work, ignore_errors=True)

    def _note(self, entry: PackageEntry) -> None:
        write_json(self.journal / f"{entry.id}.json", entry.to_json())


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Turn an OSError of writing in `root` into a named one."""
    try:
        yield
    except MoEError:
        raise
    except OSError as error:
        text = f"cannot write {error.filename or root}: {error.strerror or error}"
        if error.errno in DISK_FULL:
            raise DiskFull(
                f"{text}; make room and compile again: what is finished is kept"
            ) from error
        raise MoEError(text) from error
