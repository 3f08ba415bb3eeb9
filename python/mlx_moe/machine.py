"""What this machine is: processor, memory, limits that bound them, MLX, Core ML and our build."""

import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from . import core
from .errors import MoEError

CORE_ML = (14, 0)  # the macOS from which its asynchronous predictions are there
UNLIMITED = 1 << 60  # bytes; cgroups write "no limit" as a number near 2**63


def as_size(size: float) -> str:
    """ "12.3 GB": decimal units, as disks and `--memory` have them."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" or size >= 100 else f"{size:.1f} {units[0]}"


@dataclass(frozen=True)
class Machine:
    """Facts, None or empty where the system does not say.

    Attributes:
        memory_bytes: of the machine, or the limit of its control group if that is lower.
        available_bytes: that programs can still have.
        processors: that this process may use.
        cpu_quota: processors' worth of time that a control group allows.
        threads: of our kernels.
        isa, isas: instruction set in use, and all that the machine has.
        isa_error: why there is none (MLX_MOE_ISA or MLX_MOE_NUM_THREADS says what cannot be).
        wheel: its tag, or "source tree".
        mlx, mlx_lm: versions.
        device: "cpu" or "gpu", where MLX computes by default.
        device_memory_bytes: that MLX advises to use of a GPU's.
        coreml: None if programs can run there, else why not.
    """

    system: str
    chip: str
    memory_bytes: int | None
    available_bytes: int | None
    processors: int
    cpu_quota: float | None
    threads: int | None
    isa: str | None
    isas: list[str]
    isa_error: str | None
    python: str
    mlx_moe: str
    wheel: str
    mlx: str | None
    mlx_lm: str | None
    device: str | None
    device_name: str | None
    device_memory_bytes: int | None
    coreml: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def this_machine() -> Machine:
    """Does not import mlx_lm."""
    isa, threads, isa_error = _kernels()
    return Machine(
        system=_system(),
        chip=chip(),
        memory_bytes=memory_bytes(),
        available_bytes=available_bytes(),
        processors=processors(),
        cpu_quota=cpu_quota(),
        threads=threads,
        isa=isa,
        isas=core.isas(),
        isa_error=isa_error,
        python=platform.python_version(),
        mlx_moe=_version("mlx-npumoe") or "0+unknown",
        wheel=_wheel(),
        mlx=_version("mlx"),
        mlx_lm=_version("mlx-lm"),
        **_device(),
        coreml=coreml_missing(),
    )


def chip(root: Path = Path("/")) -> str:
    """The processor's name as the system has it; `root` is where its files are."""
    if platform.system() == "Darwin":
        return _command("sysctl", "-n", "machdep.cpu.brand_string").strip() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes(root: Path = Path("/")) -> int | None:
    try:
        own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None
    limits = [_bytes(text) for text in _cgroup_files(root, "memory", "memory.max")]
    limits += [_bytes(text) for text in _cgroup_files(root, "memory", "memory.limit_in_bytes")]
    return min([own, *(limit for limit in limits if limit is not None)])


def available_bytes(root: Path = Path("/")) -> int | None:
    if platform.system() == "Darwin":
        return _from_vm_stat(_command("vm_stat"))
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def resident_bytes(root: Path = Path("/")) -> int:
    """What this process has in memory now; 0 where the system does not say."""
    if platform.system() == "Darwin":
        text = _command("ps", "-o", "rss=", "-p", str(os.getpid())).strip()
        return int(text) * 1024 if text.isdigit() else 0
    pages = _text(root / "proc/self/statm").split()[1:2]
    return int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _from_vm_stat(text: str) -> int | None:
    """What macOS's vm_stat counts as free or soon to be."""
    page = re.search(r"page size of (\d+) bytes", text)
    kinds = "free|inactive|speculative|purgeable"
    counts = re.findall(rf"^Pages (?:{kinds}):\s+(\d+)\.$", text, re.MULTILINE)
    return int(page.group(1)) * sum(map(int, counts)) if page and counts else None


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that this process's control groups allow, None if no bound."""
    quotas = []
    for text in _cgroup_files(root, "cpu", "cpu.max"):  # "150000 100000" or "max 100000"
        match text.split():
            case [quota, period] if quota.isdigit() and period.isdigit() and int(period):
                quotas.append(int(quota) / int(period))
    own = zip(
        _cgroup_files(root, "cpu", "cpu.cfs_quota_us"),
        _cgroup_files(root, "cpu", "cpu.cfs_period_us"),
        strict=False,
    )
    for quota, period in own:  # -1 is no bound
        if quota.strip().isdigit() and period.strip().isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def coreml_missing() -> str | None:
    """Why no Core ML program can run here; None if one can."""
    if platform.system() != "Darwin":
        return f"Core ML is part of macOS, and this is {platform.system()}"
    found = tuple(int(part) for part in platform.mac_ver()[0].split(".")[:2] if part.isdigit())
    if found < CORE_ML:
        return f"needs macOS {CORE_ML[0]} or newer, and this is {platform.mac_ver()[0]}"
    if reason := core.coreml_missing():
        return reason
    if find_spec("coremltools") is None:
        return "coremltools, which writes its programs, is not installed: pip install coremltools"
    return None


def has_packed_copies() -> bool:
    """Whether the kernels in use multiply faster with prepacked copies of experts."""
    weight = np.zeros((1, 32, 16), np.uint32)  # 128 columns of 4 bits
    scales = np.zeros((1, 32, 2), np.float16)
    matrix = core.Matrix(weight, scales, scales, mode="affine", bits=4, group_size=64)
    return core.Packed(matrix, [0]).nbytes > 0


def _cgroup_files(root: Path, controller: str, name: str) -> list[str]:
    """A control file of this process's group and of all above it, in either layout."""
    texts = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controllers and controller)
        # In a container the path is often the host's, and the mount is the group itself.
        group = mount / path.strip("/")
        for directory in (group, *group.parents):
            if text := _text(directory / name):
                texts.append(text)
            if directory == mount:
                break
    return texts


def _bytes(text: str) -> int | None:
    value = int(text) if text.strip().isdigit() else UNLIMITED
    return value if value < UNLIMITED else None


def _command(*words: str) -> str:
    """What a command prints; "" if it fails."""
    try:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
        return ran.stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _system() -> str:
    name = f"macOS {platform.mac_ver()[0]}" if platform.system() == "Darwin" else platform.system()
    release = "" if platform.system() == "Darwin" else f" {platform.release()}"
    return f"{name}{release} {platform.machine()}"


def _kernels() -> tuple[str | None, int | None, str | None]:
    try:
        return core.isa(), core.num_threads(), None
    except MoEError as error:
        return None, None, str(error)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _wheel() -> str:
    try:
        text = distribution("mlx-npumoe").read_text("WHEEL") or ""
    except PackageNotFoundError:
        return "source tree"
    found = re.findall(r"^Tag: (.+)$", text, re.MULTILINE)
    return ", ".join(found) or "source tree"


def _device() -> dict[str, Any]:
    nothing = {"device": None, "device_name": None, "device_memory_bytes": None}
    try:
        import mlx.core as mx
    except ImportError:
        return nothing
    device = mx.default_device()
    info: dict[str, Any] = getattr(mx, "device_info", dict)()
    return {
        "device": device.type.name,
        "device_name": info.get("device_name"),
        "device_memory_bytes": info.get("max_recommended_working_set_size"),
    }
