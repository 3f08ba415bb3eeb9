"""The units of a device, and what they take, from the numbers of its profile."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .cost import FP16, Expert
from .devices import Device
from .errors import InvalidArgument
from .simulate_engine import Unit

Array = NDArray[np.float64]
STATIC, COLD, HOST, LINK = "static", "cold", "host", "link"
HOST_START = 2e-5  # seconds; assumption: one call of the kernels, as in the profile `cpu`
COPIES = 2  # times a copy of the rows, to pack or combine them (benchmarks/routing.py)


class Machine:
    """A device as units: the static executor, the cold path's unit, and the host.

    Where the device is a CPU the cold path's unit is the host itself.
    """

    def __init__(self, device: Device):
        self.device = device
        self.units = {
            STATIC: Unit(STATIC, self.number("static_watts")),
            COLD: Unit(COLD, 0.0 if device.executor == "cpu" else self.number("cold_watts")),
            HOST: Unit(HOST, 0.0),
        }

    def number(self, name: str) -> float | None:
        found = self.device.simulation.get(name)
        return None if found is None else found.value

    @property
    def cores(self) -> float:
        """Of the host; 1 where the profile does not say: then no time of the processor is told."""
        return self.number("host_cores") or 1.0

    @property
    def has_host(self) -> bool:
        """Whether the profile knows how fast the host is."""
        names = ("host_flops", "host_bandwidth", "host_cores")
        return all(self.number(name) is not None for name in names)

    @property
    def counts_cpu_time(self) -> bool:
        """Whether the profile knows what of the host is needed for its time."""
        if self.device.executor == "cpu":
            return self.number("host_cores") is not None
        return self.has_host

    @property
    def cold_cores(self) -> float:
        """Cores that are busy while the cold path's unit is."""
        return self.cores if self.device.executor == "cpu" else 0.0

    @property
    def core_watts(self) -> float | None:
        """Of one busy core of the host."""
        watts = self.number("host_watts")
        return None if watts is None else watts / self.cores

    def move_seconds(self, expert: Expert, rows: Array) -> Array:
        """Of packing so many rows into tiles, or combining so many results, on all cores.

        Nothing where the profile does not know the host.
        """
        bandwidth = self.number("host_bandwidth")
        if bandwidth is None:
            return np.zeros_like(rows)
        return COPIES * 2 * FP16 * expert.hidden * rows / bandwidth

    def on_host(self) -> Device:
        """The host as the device of a cold path; InvalidArgument where it is not known."""
        if not self.has_host:
            raise InvalidArgument(
                f"the profile {self.device.name!r} has no numbers of its processor ('simulation' "
                "in its file): leave the strategies that compute on it away"
            )
        numbers = self.device.numbers
        values = {
            "cold_flops": self.device.simulation["host_flops"].value,
            "cold_bandwidth": self.device.simulation["host_bandwidth"].value,
            "cold_seconds": HOST_START,
        }
        changed = {name: replace(numbers[name], value=value) for name, value in values.items()}
        return replace(self.device, numbers=numbers | changed, measurements=None, curves=None)
