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
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def wanted() -> bool:
    """Whether large pages are there for those who ask, and nobody has decided about them yet."""
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 35):
        return False
    try:
        on_request = "[madvise]" in SETTING.read_text()
    except OSError:
        return False
    return on_request and TUNABLE not in os.environ.get("GLIBC_TUNABLES", "")


def restart_with() -> None:
    """Start this command anew with large pages, if they are wanted; else, and on failure, return.

    To be called before anything is done. `GLIBC_TUNABLES=glibc.malloc.hugetlb=0` turns it off.
    """
    command = sys.orig_argv  # ends in sys.argv, unless another program called us
    if not wanted() or command[len(command) - len(sys.argv) + 1 :] != sys.argv[1:]:
        return
    others = os.environ.get("GLIBC_TUNABLES")
    tunables = f"{others}:{TUNABLE}=1" if others else f"{TUNABLE}=1"
    try:
        os.execve(sys.executable, command, {**os.environ, "GLIBC_TUNABLES": tunables})
    except OSError:
        return
