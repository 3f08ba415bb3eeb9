"""What the machine says of itself, from made-up trees of system files."""

from pathlib import Path

import numpy as np
import pytest

from mlx_moe import core, machine
from mlx_moe.expert_memory import free_bytes
from mlx_moe.machine import (
    as_size,
    available_bytes,
    chip,
    cpu_quota,
    memory_bytes,
    resident_bytes,
    this_machine,
)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


SELF, GROUPS = "proc/self/cgroup", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({SELF: "0::/\n", f"{GROUPS}/cpu.max": "max 100000\n"}, None),
        ({SELF: "0::/\n", f"{GROUPS}/cpu.max": "150000 100000\n"}, 1.5),
        # the group itself is free, the one above it is not
        (
            {
                SELF: "0::/a/b\n",
                f"{GROUPS}/a/b/cpu.max": "max 100000",
                f"{GROUPS}/a/cpu.max": "200000 100000",
                f"{GROUPS}/cpu.max": "400000 100000",
            },
            2.0,
        ),
        # in a container: the path is the host's, the mount is the group
        ({SELF: "0::/docker/abc\n", f"{GROUPS}/cpu.max": "50000 100000"}, 0.5),
        # the first version of control groups, -1 for no bound
        (
            {
                SELF: "4:memory:/x\n3:cpu,cpuacct:/y\n",
                f"{GROUPS}/cpu/y/cpu.cfs_quota_us": "-1",
                f"{GROUPS}/cpu/y/cpu.cfs_period_us": "100000",
                f"{GROUPS}/cpu/cpu.cfs_quota_us": "300000",
                f"{GROUPS}/cpu/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        ({SELF: "0::/\n", f"{GROUPS}/cpu.max": "nonsense"}, None),
    ],
)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    assert cpu_quota(tree(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({SELF: "0::/\n", f"{GROUPS}/memory.max": "1000000\n"}, 1_000_000),
        ({SELF: "4:memory:/x\n", f"{GROUPS}/memory/x/memory.limit_in_bytes": "2000000"}, 2_000_000),
        ({SELF: "0::/\n", f"{GROUPS}/memory.max": "max\n"}, None),
        ({SELF: "4:memory:/\n", f"{GROUPS}/memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    ],
)
def test_memory_is_bounded_by_control_groups(tmp_path, files, expected) -> None:
    whole = memory_bytes(tmp_path / "nothing")
    assert whole is not None and whole > 1 << 28
    assert memory_bytes(tree(tmp_path, files)) == (expected or whole)


def test_available_memory_and_chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    root = tree(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:  10 kB\nMemAvailable:     3 kB\n",
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: A CPU @ 1 GHz\nmodel name\t: B\n",
        },
    )
    assert available_bytes(root) == 3072 and chip(root) == "A CPU @ 1 GHz"
    assert available_bytes(tmp_path / "x") is None and chip(tmp_path / "x")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (25.3e9, "25.3 GB"), (2e15, "2000 TB")],
)
def test_sizes(size: float, text: str) -> None:
    assert as_size(size) == text


@pytest.mark.parametrize(
    ("system", "release", "missing", "reason"),
    [
        ("Linux", "", "", "part of macOS"),
        ("Darwin", "13.6.1", "", "needs macOS 14"),
        ("Darwin", "14.4", "built without it", "built without it"),
        ("Darwin", "15.0", "", None),
    ],
)
def test_core_ml(monkeypatch, system: str, release: str, missing: str, reason) -> None:
    pytest.importorskip("coremltools")
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.mac_ver", lambda: (release, ("", "", ""), ""))
    monkeypatch.setattr(core, "coreml_missing", lambda: missing, raising=False)
    found = machine.coreml_missing()
    assert found is None if reason is None else reason in str(found)


def test_this_machine() -> None:
    found = this_machine()
    assert found.isa == core.isa() and found.threads == core.num_threads() >= 1
    assert found.mlx and found.mlx_lm and found.device == "cpu" and found.isa_error is None
    assert found.memory_bytes and found.processors >= 1


def test_copies_are_had_where_the_kernel_packs() -> None:
    assert machine.has_packed_copies() == (core.isa() == "amx")


VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            500000.
Pages inactive:                           20000.
Pages speculative:                         3000.
Pages throttled:                              0.
Pages wired down:                        100000.
Pages purgeable:                            400.
"Translation faults":                 123456789.
"""


def test_available_memory_of_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("mlx_moe.machine._command", lambda *_: VM_STAT)
    assert available_bytes() == 16384 * 33400
    monkeypatch.setattr("mlx_moe.machine._command", lambda *_: "")
    assert available_bytes() is None


def test_memory_of_this_process_is_what_it_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 64 << 20
    before = resident_bytes()
    held = np.ones(size, np.uint8)
    grown = resident_bytes() - before
    del held
    assert grown > 0.9 * size and resident_bytes() - before < 0.5 * size  # it was more once
    monkeypatch.setattr("mlx_moe.expert_memory.memory_bytes", lambda: 10_000)
    monkeypatch.setattr("mlx_moe.expert_memory.available_bytes", lambda: None)
    monkeypatch.setattr("mlx_moe.expert_memory.resident_bytes", lambda: 3_000)
    assert free_bytes() == 6_000
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("mlx_moe.machine._command", lambda *_: " 1234\n")
    assert resident_bytes() == 1234 * 1024
