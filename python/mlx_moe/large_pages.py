"""Weights in large memory pages on Linux.

Where the kernel gives 2 MiB pages to those who ask (`transparent_hugepage` is `madvise`, as on most
distributions), MLX's allocations get pages of 4 KiB, and reading weights for a token spends some
10 % of its time on looking up their addresses (`docs/performance.md`). The C library asks for large
pages if it is told to before the process starts
(https://www.gnu.org/software/libc/manual/html_node/Memory-Allocation-Tunables.html).
"""

import os
import platform
import sys
from pathlib import Path

TUNABLE = "glibc.malloc.hugetlb"
# The C library takes the tunable away from a Python that has capabilities of its own.
STARTED_ANEW = "MLX_MOE_STARTED_ANEW"
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAMS = ("mlx_moe", "mlx_moe.generate")  # console scripts and `python -m`


def wanted() -> bool:
    """Whether large pages are there for those who ask, and nobody has decided about them yet."""
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 35):
        return False
    try:
        on_request = "[madvise]" in SETTING.read_text()
    except OSError:
        return False
    decided = STARTED_ANEW in os.environ or TUNABLE in os.environ.get("GLIBC_TUNABLES", "")
    return on_request and not decided


def own_process() -> bool:
    """Whether Python was started for our command alone, not for a program that calls it."""
    program = sys.orig_argv[-len(sys.argv) :]  # what Python was told to run, and its arguments
    return bool(program) and Path(program[0]).name in PROGRAMS and program[1:] == sys.argv[1:]


def restart_command() -> None:
    """`restart`, if Python was started for our command."""
    if own_process():
        restart()


def restart() -> None:
    """Start this process anew with large pages, if they are wanted; else, and on failure, return.

    To be called before anything is done. `GLIBC_TUNABLES=glibc.malloc.hugetlb=0` turns it off.
    """
    if not (sys.executable and wanted()):
        return
    others = os.environ.get("GLIBC_TUNABLES")
    tunables = f"{others}:{TUNABLE}=1" if others else f"{TUNABLE}=1"
    changed = {"GLIBC_TUNABLES": tunables, STARTED_ANEW: "1"}
    try:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **changed})
    except OSError:
        return
