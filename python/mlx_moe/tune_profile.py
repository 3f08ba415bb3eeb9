"""The profile that `mlx_moe tune` wrote of this machine, in the user's cache."""

import re
from pathlib import Path

from . import core
from .cache import cache_dir
from .devices import Device, read_device
from .errors import MoEError
from .machine import chip, processors


def profile_path() -> Path | None:
    """Where this machine's is or would be: what it was measured with is in its name.

    None where the kernels cannot run as the environment says.
    """
    try:
        name = f"{chip()}-{processors()}-{core.isa()}-{core.num_threads()}"
    except MoEError:
        return None
    return cache_dir("profiles") / f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def load() -> Device | None:
    """This machine's profile, None if there is none; CorruptFile if it is no profile."""
    path = profile_path()
    return read_device(path) if path is not None and path.is_file() else None


def better_than(device: Device) -> Device | None:
    """This machine's profile where it measured both paths and a plan's `device` is another."""
    try:
        tuned = load()
    except MoEError:
        return None  # `plan` and `tune` say what is wrong with it
    return tuned if tuned and tuned != device and tuned.by_measurement() is not None else None
