"""The manifest of an artifacts directory, and checks that what it names is there unchanged."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .durable import file_sha256, write_json
from .errors import CorruptArtifact, CorruptFile, InvalidArgument
from .identity import ModelIdentity
from .json_fields import Fields
from .package_entry import ITEM_BYTES, PackageEntry
from .package_form import MACOS

FORMAT, VERSION = "mlx_moe.artifacts", 2
NAME = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """Everything in an artifacts directory.

    Attributes:
        directory: where it is.
        plan_sha256: `Plan.sha256` of the plan that was compiled.
        identity: the model whose weights these are.
        weights: "fp16" or "int8".
        packages: one entry for each group of the plan, in its order.
        macos: 15 if a group's capacities are functions of one package, 14 if each has its own.
    """

    directory: Path
    plan_sha256: str
    identity: ModelIdentity
    weights: str
    packages: list[PackageEntry] = field(default_factory=list)
    macos: int = MACOS[0]

    @classmethod
    def load(cls, directory: str | Path) -> "Manifest":
        """Read DIR/manifest.json and check it; the packages themselves are `verify`'s.

        Raises:
            CorruptArtifact: there is none, as while compiling is not finished, or it is not
                what `save` wrote.
        """
        directory = Path(directory)
        path = directory / NAME
        try:
            value = json.loads(path.read_bytes())
        except OSError as error:
            if not directory.is_dir():
                raise CorruptArtifact(
                    f"there is no artifacts directory {directory}: `mlx_moe compile` writes it"
                ) from error
            raise CorruptArtifact(
                f"{directory} has no {NAME}, which compiling writes last ({error.strerror}): run "
                "`mlx_moe compile` with the same arguments to finish it"
            ) from error
        except (ValueError, RecursionError) as error:
            raise CorruptArtifact(f"{path} is not JSON: {error}; compile again") from error
        try:
            return cls._from_json(directory, value, f"{path}: ")
        except CorruptArtifact:
            raise
        except CorruptFile as error:
            raise CorruptArtifact(f"{error}; compile again") from error

    @classmethod
    def _from_json(cls, directory: Path, value: Any, where: str) -> "Manifest":
        take = Fields(value, where)
        if (take("format"), take("version")) != (FORMAT, VERSION):
            raise CorruptFile(
                f"{where}{take('format')!r} version {take('version')!r}; this mlx_moe reads "
                f"{FORMAT!r} version {VERSION}"
            )
        identity = ModelIdentity.from_json(take("identity"), f"{where}identity")
        weights = take.one_of("weights", tuple(ITEM_BYTES))
        packages = [PackageEntry.from_json(p, where[:-2]) for p in take.items("packages")]
        if len({p.id for p in packages}) < len(packages):
            raise CorruptFile(f"{where}two packages have the same id")
        macos = take.count("macos")
        if macos not in MACOS or any(p.macos != macos for p in packages):
            raise CorruptFile(f"{where}not all packages are for macOS {macos}")
        return cls(directory, take.text("plan_sha256"), identity, weights, packages, macos)

    def save(self) -> Path:
        """Write DIR/manifest.json, whole or not at all."""
        value = {
            "format": FORMAT,
            "version": VERSION,
            "plan_sha256": self.plan_sha256,
            "identity": self.identity.to_json(),
            "weights": self.weights,
            "macos": self.macos,
            "packages": [p.to_json() for p in self.packages],
        }
        return write_json(self.directory / NAME, value)

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.packages)

    def package(self, id: str) -> PackageEntry:
        """The entry of a group; CorruptArtifact if it was not compiled."""
        for entry in self.packages:
            if entry.id == id:
                return entry
        raise CorruptArtifact(
            f"{self.directory} has no package for the plan's group {id!r}; it was compiled from "
            "another plan: run `mlx_moe compile` with this one"
        )

    def package_path(self, id: str) -> Path:
        return self.directory / self.package(id).path

    def verify(self, deep: bool = False) -> None:
        """Raise CorruptArtifact unless every file is there in its size, and if `deep` its hash."""
        for entry in self.packages:
            verify_package(self.directory, entry, deep)

    def check_plan(self, plan: Any) -> None:
        """Raise InvalidArgument unless this was compiled from `plan` (a `Plan`)."""
        if plan.sha256 != self.plan_sha256:
            raise InvalidArgument(
                f"the artifacts in {self.directory} were compiled from another plan; run "
                "`mlx_moe compile` with this one, or give the plan they were made from"
            )


def verify_package(directory: Path, entry: PackageEntry, deep: bool) -> None:
    """Raise CorruptArtifact unless the package's files are as the entry says."""
    for relative, expected in entry.files.items():
        path = directory / entry.path / relative
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CorruptArtifact(
                f"{path} is missing ({error.strerror}); compile again to make it new"
            ) from error
        if size != expected.bytes:
            raise CorruptArtifact(
                f"{path} has {size} bytes and should have {expected.bytes}; compile again to make "
                "it new"
            )
        if deep and file_sha256(path) != expected.sha256:
            raise CorruptArtifact(
                f"{path} is not what was compiled: its SHA-256 differs; compile again to make it "
                "new"
            )
