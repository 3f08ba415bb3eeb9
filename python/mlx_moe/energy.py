"""Energy and processor time of a stretch of work, by what the system lets us read.

Rails are those of the whole machine: what other programs do in the meantime counts too.
"""

import os
import platform
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

POWERCAP = Path("/sys/class/powercap")
POLL_SECONDS = 5.0  # the shortest range, 2**32 uJ at 100 W, wraps in 43 seconds
INTERVAL_MS = 100  # of powermetrics
START_SECONDS = 5.0  # in which its first sample must come
SAMPLE = re.compile(r"\*\*\* Sampled system activity .*\(([\d.]+)ms elapsed\)")
POWER = re.compile(r"(CPU|GPU|ANE) Power: *([\d.]+) *(mW|W)\s*$")


class Rails(Protocol):
    """Joules by rail, ever growing; empty where there are none, for the reason in `missing`."""

    missing: str | None

    def read(self) -> dict[str, float]: ...
    def close(self) -> None: ...


@dataclass
class Counter:
    """A counter of microjoules that starts again at 0 after `range`."""

    path: Path
    range: int
    last: int
    total: int = 0

    def read(self) -> float:
        """Joules since the counter was opened; right if it did not wrap twice in between."""
        now = int(self.path.read_text())
        self.total += now - self.last if now >= self.last else now - self.last + self.range
        self.last = now
        return self.total / 1e6


class Rapl:
    """Intel's and AMD's running average power limit counters, in Linux's powercap tree."""

    def __init__(self, root: Path = POWERCAP, poll_seconds: float = POLL_SECONDS):
        self.missing: str | None = None
        self._counters: dict[str, Counter] = {}
        self._lock, self._stop = threading.Lock(), threading.Event()
        denied = []
        for name, zone in _zones(root):
            try:
                energy = zone / "energy_uj"
                limit = int((zone / "max_energy_range_uj").read_text())
                self._counters[name] = Counter(energy, limit, int(energy.read_text()))
            except PermissionError:
                denied.append(zone / "energy_uj")
            except (OSError, ValueError):
                continue
        if not self._counters:
            self.missing = (
                f"{denied[0]} can be read by root only"
                if denied
                else f"no RAPL package under {root}"
            )
            return
        self._thread = threading.Thread(target=self._poll, args=(poll_seconds,), daemon=True)
        self._thread.start()

    def read(self) -> dict[str, float]:
        with self._lock:
            return {name: counter.read() for name, counter in self._counters.items()}

    def close(self) -> None:
        self._stop.set()

    def _poll(self, seconds: float) -> None:
        """Read often enough that no counter wraps twice unseen."""
        while not self._stop.wait(seconds):
            try:
                self.read()
            except (OSError, ValueError):
                return


def _zones(root: Path) -> Iterator[tuple[str, Path]]:
    """Packages and their memory; cores and graphics are part of a package, psys is all of it, and
    intel-rapl-mmio has the packages a second time."""
    for zone in sorted(root.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text().strip()
            parent = (zone.parent / zone.name.rpartition(":")[0] / "name").read_text().strip()
        except OSError:
            parent = ""
        if name.startswith("package"):
            yield name, zone
        elif name == "dram":
            yield f"{parent or zone.name} dram", zone


class PowerMetrics:
    """macOS's powermetrics, which needs root: power of CPU, GPU and Neural Engine, summed up."""

    def __init__(self, command: list[str] | None = None, start_seconds: float = START_SECONDS):
        self.missing: str | None = None
        self._joules: dict[str, float] = {}
        self._lock, self._first = threading.Lock(), threading.Event()
        self._process: subprocess.Popen[str] | None = None
        command = _powermetrics() if command is None else command
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        except OSError as error:
            self.missing = f"powermetrics cannot be run ({error.strerror})"
            return
        threading.Thread(target=self._follow, daemon=True).start()
        if not self._first.wait(start_seconds) or not self._joules:
            self.close()
            self.missing = "powermetrics gave no power: it needs root (run with sudo)"

    def read(self) -> dict[str, float]:
        with self._lock:
            return dict(self._joules)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _follow(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for rail, joules in parse_powermetrics(self._process.stdout):
            with self._lock:
                self._joules[rail] = self._joules.get(rail, 0.0) + joules
            self._first.set()
        self._first.set()  # it has ended


def parse_powermetrics(lines: Iterable[str]) -> Iterator[tuple[str, float]]:
    """(rail, joules) of every power in powermetrics' text."""
    seconds = None
    for line in lines:
        if match := SAMPLE.search(line):
            seconds = float(match[1]) / 1e3
        elif seconds is not None and (match := POWER.match(line.strip())):
            watts = float(match[2]) / (1e3 if match[3] == "mW" else 1)
            yield match[1], watts * seconds


def _powermetrics() -> list[str]:
    own = ["powermetrics", "--samplers", "cpu_power,gpu_power,ane_power", "-i", str(INTERVAL_MS)]
    return own if os.geteuid() == 0 else ["sudo", "-n", *own]


@dataclass
class NoRails:
    missing: str | None = field(default="no source of energy readings is known on this system")

    def read(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def open_rails() -> Rails:
    system = platform.system()
    if system == "Linux":
        return Rapl()
    return PowerMetrics() if system == "Darwin" else NoRails()


def rails() -> dict[str, Any]:
    """What energy could be read here, without starting anything that takes time."""
    if platform.system() == "Darwin":
        found = shutil.which("powermetrics") is not None
        missing = None if found else "powermetrics is not there"
        return {"rails": ["CPU", "GPU", "ANE"] if found else [], "missing": missing}
    source = open_rails()
    try:
        return {"rails": sorted(source.read()), "missing": source.missing}
    finally:
        source.close()


@dataclass(frozen=True)
class Use:
    """What a stretch of work took.

    Attributes:
        joules: by rail of the whole machine; empty if there are none.
        cpu_seconds: of all threads of this process, user and system.
        cycles: of this process's threads; None if the system does not say.
    """

    joules: dict[str, float]
    cpu_seconds: float
    cycles: int | None

    def __add__(self, other: "Use") -> "Use":
        both = None
        if self.cycles is not None and other.cycles is not None:
            both = self.cycles + other.cycles
        rails = self.joules.keys() & other.joules.keys()
        joules = {rail: self.joules[rail] + other.joules[rail] for rail in rails}
        return Use(joules, self.cpu_seconds + other.cpu_seconds, both)


class Meter:
    """Reads rails, processor time and cycles; `since` gives what was used in between."""

    def __init__(self, rails: Rails, cycles: Callable[[], int | None] = lambda: None):
        self.rails, self._cycles = rails, cycles

    def now(self) -> Use:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return Use(self.rails.read(), used.ru_utime + used.ru_stime, self._cycles())

    def since(self, start: Use) -> Use:
        end = self.now()
        both = None
        if start.cycles is not None and end.cycles is not None:
            both = end.cycles - start.cycles
        joules = {rail: j - start.joules.get(rail, 0.0) for rail, j in end.joules.items()}
        return Use(joules, end.cpu_seconds - start.cpu_seconds, both)


@contextmanager
def open_meter() -> Iterator[Meter]:
    from .cycles import process_cycles

    source = open_rails()
    try:
        yield Meter(source, process_cycles())
    finally:
        source.close()
