"""Open compiled groups in Core ML: once in a process of their own, then here, and only those that
Core ML itself places on the Neural Engine."""

import json
import logging
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import cache, core
from .coreml_trial import SUFFIX, Trials, compiled_functions, trial_request
from .durable import file_sha256, locked, sync_directory, write_json
from .errors import InvalidArgument, MissingDependency, MoEError
from .manifest import NAME, Manifest
from .package_entry import PackageEntry
from .package_form import system_macos
from .progress import progress_bar

UNITS = {"ane": "the Neural Engine", "gpu": "the GPU", "cpu": "the CPU", "other": "another unit"}

logger = logging.getLogger("mlx_moe")


@dataclass(frozen=True)
class Report:
    """What became of a group's package.

    Attributes:
        placement: by capacity and unit ("ane", "gpu", "cpu", "other"), the operations and the
            convolutions among them that Core ML prefers to run there, as its compute plan says;
            empty where it does not say.
        cold: why its experts are computed on the cold path; None if they are not.
        preferred: whether Core ML prefers the Neural Engine for every convolution there is, at
            every capacity; where it names no unit for some, nothing is known.
    """

    id: str
    placement: dict[int, dict[str, tuple[int, int]]]
    cold: str | None = None
    preferred: bool = False


def demotion(placement: dict[int, dict[str, tuple[int, int]]]) -> str | None:
    """Why a group of this placement is computed cold: a convolution is not on the Neural Engine."""
    for capacity, units in sorted(placement.items()):
        total = sum(convolutions for _, convolutions in units.values())
        away = {u: c for u, (_, c) in units.items() if c and u != "ane"}
        if away:
            where = ", ".join(f"{count} for {UNITS[unit]}" for unit, count in away.items())
            return f"at capacity {capacity} Core ML prefers, of {total} convolutions, {where}"
    return None


def prefers_neural_engine(
    placement: dict[int, dict[str, tuple[int, int]]], entry: PackageEntry
) -> bool:
    """Whether every convolution of a group is counted for it, at every capacity."""
    matrices = [matrix for e in entry.tensors for matrix in (e.gate, e.up, e.down)]
    count = sum(matrix is not None for matrix in matrices)
    return all(placement.get(c, {}).get("ane", (0, 0))[1] >= count for c in entry.functions)


@dataclass
class CoreMLPrograms:
    """The programs of an artifacts directory in Core ML.

    Attributes:
        executor: a core.CoreMLExecutor.
        reports: by group, in the order in which they were opened.
    """

    manifest: Manifest
    executor: Any
    reports: dict[str, Report] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict, repr=False)

    @classmethod
    def open(
        cls, manifest: Manifest, ids: Sequence[str], *, core: Any = core, trials: Any = None
    ) -> "CoreMLPrograms":
        """Open groups; one that cannot be opened is cold, which is logged.

        Core ML's own form of each is made the first time, with progress shown, and kept in the
        cache "compiled" for this manifest and this build of the system.

        Args:
            core, trials: stand-ins for tests.

        Raises:
            MissingDependency: there is no Core ML here.
            InvalidArgument: the artifacts take a newer macOS than this one.
            MoEError: there can be no cache directory.
        """
        if missing := core.coreml_missing():
            raise MissingDependency(f"backend='coreml': {missing}; backend='host' runs anywhere")
        check_system(manifest)
        programs = cls(manifest, core.CoreMLExecutor())
        kept = cache_directory(manifest)
        entries = [manifest.package(id) for id in ids]
        earlier = {entry.id: kept_report(kept, entry) for entry in entries}
        found = {id: report for id, report in earlier.items() if report is not None}
        new = [entry for entry in entries if entry.id not in found]
        with closing(trials or Trials()) as trials:
            what = "preparing for Core ML (once)"
            for entry in progress_bar(bool(new), delay=0, iterable=new, desc=what, unit="group"):
                found[entry.id] = try_entry(manifest, entry, kept, trials)
        for parts in split_groups(entries):
            programs._load_group(parts, kept, [found[part.id] for part in parts])
        return programs

    def number(self, id: str) -> int | None:
        """The executor's number for a group; None for one that is cold."""
        return self._numbers.get(id)

    def summary(self) -> str:
        """A sentence for users: what Core ML says, never what it was asked for."""
        cold = [r for r in self.reports.values() if r.cold is not None]
        unknown = [r for r in self.reports.values() if r.cold is None and not r.preferred]
        good = len(self.reports) - len(cold) - len(unknown)
        text = f"Core ML prefers the Neural Engine for {good} of {len(self.reports)} groups"
        if unknown:
            text += f"; it does not say for {len(unknown)}"
        if cold:
            text += f"; {len(cold)} are computed cold ({cold[0].id}: {cold[0].cold})"
        return text

    def placement(self, ids: Sequence[str]) -> str:
        """The same of some groups, for a table's cell."""
        some = [self.reports[id] for id in ids]
        good = sum(r.cold is None and r.preferred for r in some)
        unknown = sum(r.cold is None and not r.preferred for r in some)
        text = f"Neural Engine preferred for {good} of {len(some)} groups"
        return f"{text}, not known for {unknown}" if unknown else text

    def _load_group(
        self, parts: Sequence[PackageEntry], kept: Path, reports: Sequence[Report]
    ) -> None:
        """Load the parts of a group; none is of use without the others."""
        cold = [report.id for report in reports if report.cold is not None]
        for part, report in zip(parts, reports, strict=True):
            if cold and report.cold is None:
                why = f"its part {cold[0]} is computed cold"
                self.reports[part.id] = replace(report, cold=why)
                continue
            self._load(part, kept, report)
            cold += [part.id] if self.reports[part.id].cold is not None else []

    def _load(self, entry: PackageEntry, kept: Path, report: Report) -> None:
        if report.cold is None:
            try:
                self._numbers[entry.id] = self.executor.load(
                    compiled_functions(model_path(kept, entry), entry.functions),
                    len(entry.experts),
                    entry.hidden,
                    entry.input,
                    entry.output,
                )
            except MoEError as error:
                report_path(kept, entry).unlink(missing_ok=True)  # to be made anew the next time
                report = Report(entry.id, report.placement, str(error))
        if report.cold is not None:
            logger.warning("%s: group %s is computed cold: %s", entry.layer, entry.id, report.cold)
        self.reports[entry.id] = report


def split_groups(entries: Sequence[PackageEntry]) -> list[list[PackageEntry]]:
    """The packages of the same experts together."""
    found: dict[tuple[str, tuple[int, ...]], list[PackageEntry]] = {}
    for entry in entries:
        found.setdefault((entry.layer, entry.experts), []).append(entry)
    return list(found.values())


def cache_directory(manifest: Manifest) -> Path:
    """Where Core ML's form of a manifest's packages is kept for this build of the system."""
    key = file_sha256(manifest.directory / NAME)[:20]
    path = cache.make_cache_dir("compiled") / f"{key}-{system_build()}"
    path.mkdir(exist_ok=True)
    return path


def system_build() -> str:
    """The build of the operating system, as 23F79; Core ML's form may not outlive it."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "kern.osversion"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if build := done.stdout.strip():
            return build
    return platform.release()


def check_system(manifest: Manifest) -> None:
    """Raise InvalidArgument for functions of packages on macOS 14."""
    if manifest.macos > 14 and system_macos() == 14:
        raise InvalidArgument(
            f"{manifest.directory} was compiled for macOS {manifest.macos} and this is "
            f"{platform.mac_ver()[0]}: `mlx_moe compile --macos 14` writes what runs here"
        )


def model_path(kept: Path, entry: PackageEntry) -> Path:
    """What Core ML made of an entry's packages, laid out as they are."""
    return kept / f"{entry.id}{SUFFIX}"


def report_path(kept: Path, entry: PackageEntry) -> Path:
    return kept / f"{entry.id}.json"


def kept_report(kept: Path, entry: PackageEntry) -> Report | None:
    """What an earlier run found, if the compiled model is still there."""
    try:
        value = json.loads(report_path(kept, entry).read_bytes())
        if not model_path(kept, entry).is_dir():
            return None
        return _report(entry, value["placement"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def try_entry(manifest: Manifest, entry: PackageEntry, kept: Path, trials: Any) -> Report:
    """Compile, load and run a group in another process, where it is kept: Core ML is said to find
    what it specialised by the model's path. A model counts once it has its report, which is last.
    """
    try:
        with locked(kept):
            if (report := kept_report(kept, entry)) is not None:
                return report  # another process has made it meanwhile
            report_path(kept, entry).unlink(missing_ok=True)
            remove_unfinished(kept)
            try:
                reply = trials.request(
                    trial_request(
                        manifest.directory / entry.path,
                        model_path(kept, entry),
                        entry.functions,
                        len(entry.experts),
                        entry.hidden,
                        entry.input,
                        entry.output,
                    )
                )
                report = _report(entry, reply["placement"])
                sync_directory(kept)
                write_json(report_path(kept, entry), {"placement": reply["placement"]})
            except (MoEError, OSError):
                remove_unfinished(kept)
                raise
            return report
    except (MoEError, OSError) as error:
        return Report(entry.id, {}, str(error))


def remove_unfinished(kept: Path) -> None:
    """Remove the models without a report, as a process that was killed leaves them.

    Only for who has `kept` locked.
    """
    for model in kept.glob(f"*{SUFFIX}"):
        if not model.with_suffix(".json").exists():
            shutil.rmtree(model, ignore_errors=True)


def _report(entry: PackageEntry, placement: dict[str, Any]) -> Report:
    read = {
        int(capacity): {unit: (int(a), int(b)) for unit, (a, b) in units.items() if unit in UNITS}
        for capacity, units in placement.items()
    }
    return Report(entry.id, read, demotion(read), prefers_neural_engine(read, entry))
