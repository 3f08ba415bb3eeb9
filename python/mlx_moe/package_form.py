"""How the capacities of a group are laid out as Core ML packages, for each system's abilities.

macOS 15 takes a package of several functions, which share one copy of the weights; macOS 14 takes
packages of one function, so there is one for each capacity, each with the weights.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass

MACOS = (15, 14)  # the oldest system that runs what is written; the first is the default
ITSELF = "."


@dataclass(frozen=True)
class Function:
    """Where the program of one capacity is.

    Attributes:
        package: path of the .mlpackage in what holds the group's packages; "." is that itself.
        name: of the function; None for the only one of a package of macOS 14.
    """

    package: str
    name: str | None

    @property
    def defined(self) -> str:
        """Its name in the specification."""
        return self.name or "main"


def system_macos() -> int | None:
    """The major version of this macOS; None on another system."""
    version = platform.mac_ver()[0].partition(".")[0]
    return int(version) if version.isdigit() else None


def function_name(capacity: int) -> str:
    """The function of a package whose experts take `capacity` tokens each."""
    return f"c{capacity}"


def container(stem: str, macos: int) -> str:
    """The name of what holds a group's packages: a package, or a directory of them."""
    return f"{stem}.mlpackage" if macos == 15 else f"{stem}.tiers"


def functions(capacities: Sequence[int], macos: int) -> dict[int, Function]:
    """The places in a `container`, by capacity."""
    if macos == 15:
        return {c: Function(ITSELF, function_name(c)) for c in capacities}
    return {c: Function(f"{function_name(c)}.mlpackage", None) for c in capacities}
