"""What a device can do, in numbers that each name their source: one JSON file per chip."""

import json
import os
import platform
import subprocess
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import CorruptFile, InvalidArgument
from ..json_fields import Fields
from ..measured import Measurements

FOLDER = Path(__file__).parent
EXECUTORS = ("static", "cpu")
AUTO = "auto"

# What each number is; the executor decides which a profile must have.
COLD = {
    "cold_flops": "FLOP/s",  # of the cold path's grouped quantised products
    "cold_bandwidth": "B/s",  # at which the cold path reads weights
    "cold_seconds": "s",  # that the cold path takes to start, once a layer
    "memory_bytes": "B",
}
STATIC = {
    "static_flops": "FLOP/s",  # fp16 peak of the static executor
    "static_efficiency": "share of static_flops",
    "static_bandwidth": "B/s",  # at which it streams weights
    "dispatch_seconds": "s",  # of one program
    "sync_seconds": "s",  # of the one wait of a layer
    "on_chip_bytes": "B",
    "package_bytes": "B",  # the largest package
}
CPU = {"packed_speedup": "times"}  # of a prepacked expert over one read in place
NUMBERS = {"static": COLD | STATIC, "cpu": COLD | CPU}

# What only `simulate` reads, as much of it as is known; a watt is one of a busy unit.
SIMULATION = {
    "host_flops": "FLOP/s",  # of the processor's products, all its cores
    "host_bandwidth": "B/s",
    "host_cores": "cores",
    "host_watts": "W",  # all cores
    "static_watts": "W",
    "cold_watts": "W",
    "idle_watts": "W",  # the machine, whatever it does
}


@dataclass(frozen=True)
class Number:
    """A value with where it comes from; `measured` means by this project, on this device."""

    value: float
    unit: str
    source: str
    measured: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "unit": self.unit,
            "source": self.source,
            "measured": self.measured,
        }


@dataclass(frozen=True)
class Device:
    """A profile; `device["static_flops"]` is a number's value.

    Attributes:
        measurements: what `mlx_moe tune` fitted the numbers to; None for a built-in profile.
        curves: these, where costs are to be taken from them and not from the numbers.
        simulation: numbers that plans do not need, some of SIMULATION.
    """

    name: str
    executor: str
    description: str
    numbers: dict[str, Number]
    measurements: Measurements | None = None
    curves: Measurements | None = field(default=None, compare=False)
    simulation: dict[str, Number] = field(default_factory=dict)

    def __getitem__(self, number: str) -> float:
        return float(self.numbers[number].value)

    @property
    def measured(self) -> bool:
        """Whether every number was measured."""
        return all(number.measured for number in self.numbers.values())

    def by_measurement(self) -> "Device | None":
        """The same device with costs as measured; None unless both paths were."""
        found = self.measurements
        if found is None or not (found.has("static") and found.has("cold")):
            return None
        return replace(self, curves=found)

    def as_dict(self) -> dict[str, Any]:
        numbers = {name: number.as_dict() for name, number in self.numbers.items()}
        found: dict[str, Any] = {
            "name": self.name,
            "executor": self.executor,
            "description": self.description,
            "numbers": numbers,
        }
        if self.measurements is not None:
            found["measurements"] = self.measurements.as_dict()
        if self.simulation:
            known = self.simulation.items()
            found["simulation"] = {name: number.as_dict() for name, number in known}
        return found

    @staticmethod
    def from_dict(data: Any, where: str) -> "Device":
        """Check a profile; `where` names it in errors (`CorruptFile`)."""
        take = Fields(data, where)
        executor = take.one_of("executor", EXECUTORS)
        expected = NUMBERS[executor]
        found = take.fields("numbers", set(expected))
        numbers = {name: _number(found, name, unit) for name, unit in expected.items()}
        measurements = None
        if "measurements" in take:
            at = f"{take.prefix}measurements"
            measurements = Measurements.from_dict(take("measurements"), at)
        simulation = {}
        if "simulation" in take:
            known = Fields(take("simulation"), f"{take.prefix}simulation")
            if unknown := sorted(set(known.value) - set(SIMULATION)):
                raise CorruptFile(
                    f"{take.prefix}simulation: {unknown} are not of {sorted(SIMULATION)}"
                )
            simulation = {name: _number(known, name, SIMULATION[name]) for name in known.value}
        return Device(
            take.text("name"),
            executor,
            take.text("description"),
            numbers,
            measurements,
            simulation=simulation,
        )


def _number(numbers: Fields, name: str, unit: str) -> Number:
    take = numbers.fields(name, {"value", "unit", "source", "measured"})
    if not take.number("value"):
        raise take.wrong("value", "a number above 0")
    return Number(
        take("value"), take.one_of("unit", (unit,)), take.text("source"), take.flag("measured")
    )


@cache
def names() -> tuple[str, ...]:
    """The built-in profiles."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load_device(device: "str | Path | Device" = AUTO) -> Device:
    """A built-in profile by name, one from a JSON file, or `auto`: that of this machine, tuned
    if `mlx_moe tune` has been here.

    Raises:
        InvalidArgument: no such profile; the message lists those there are.
        CorruptFile: the file is no profile.
    """
    if isinstance(device, Device):
        return device
    if device == AUTO:
        from .. import tune_profile

        if (tuned := tune_profile.load()) is not None:
            return tuned
    name = this_device() if device == AUTO else str(device)
    if name in names():
        return builtin(name)
    if Path(name).is_file():
        return read_device(Path(name))
    raise InvalidArgument(
        f"no device {name!r}: expected {AUTO}, a profile's JSON file or one of {', '.join(names())}"
    )


def builtin(name: str) -> Device:
    """The profile that comes with the package, one of `names()`."""
    return _with_own_memory(read_device(FOLDER / f"{name}.json"))


def this_device() -> str:
    """The profile of the chip that this runs on; `cpu` where there is none."""
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return "cpu"
    try:
        brand = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return "cpu"
    name = brand.strip().lower().removeprefix("apple ").replace(" ", "-")  # "Apple M2 Max"
    return name if name in names() else "cpu"


def read_device(path: Path) -> Device:
    """A profile from its file; CorruptFile if it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{path}: not a device profile: {error}") from error
    return Device.from_dict(data, f"{path}: ")


def _with_own_memory(device: Device) -> Device:
    """Where the profile is of this very machine, the memory that it really has."""
    if device.name != this_device():
        return device
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return device
    number = Number(memory, "B", "this machine", measured=True)
    return replace(device, numbers={**device.numbers, "memory_bytes": number})
