"""Commands that run models start anew with large memory pages, where they are for the asking."""

import os
import subprocess
import sys

import pytest

from mlx_moe import large_pages

GLIBC = ("glibc", "2.36")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    def make(setting="always [madvise] never", libc=GLIBC, tunables=None):
        path = tmp_path / "enabled"
        if setting is not None:
            path.write_text(setting)
        monkeypatch.setattr(large_pages, "SETTING", path)
        monkeypatch.setattr(large_pages.platform, "libc_ver", lambda: libc)
        monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
        if tunables is not None:
            monkeypatch.setenv("GLIBC_TUNABLES", tunables)

    return make


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ({}, True),
        ({"tunables": "glibc.malloc.check=1"}, True),
        ({"setting": "[always] madvise never"}, False),
        ({"setting": "always madvise [never]"}, False),
        ({"setting": None}, False),
        ({"libc": ("glibc", "2.34")}, False),
        ({"libc": ("", "")}, False),
        ({"tunables": "glibc.malloc.hugetlb=0"}, False),
        ({"tunables": "glibc.malloc.hugetlb=1"}, False),
    ],
)
def test_wanted_where_they_are_for_the_asking_and_nobody_decided(machine, there, expected):
    machine(**there)
    assert large_pages.wanted() is expected


@pytest.mark.parametrize(
    ("tunables", "arguments", "expected"),
    [
        (None, ["run", "x"], "glibc.malloc.hugetlb=1"),
        ("a.b=1", ["run", "x"], "a.b=1:glibc.malloc.hugetlb=1"),
        (None, [], "glibc.malloc.hugetlb=1"),
        (None, ["other"], None),  # the arguments were changed: called from within a program
    ],
)
def test_restarts_the_same_command(machine, monkeypatch, tunables, arguments, expected):
    machine(tunables=tunables)
    started = []
    monkeypatch.setattr(sys, "orig_argv", ["python", "mlx_moe", "run", "x"])
    if not arguments:
        monkeypatch.setattr(sys, "orig_argv", ["python", "mlx_moe"])
    monkeypatch.setattr(sys, "argv", ["mlx_moe", *arguments])
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call))
    large_pages.restart_with()
    if expected is None:
        assert not started
    else:
        ((program, command, environment),) = started
        assert (program, command) == (sys.executable, sys.orig_argv)
        assert environment["GLIBC_TUNABLES"] == expected


def test_a_command_that_cannot_restart_goes_on(machine, monkeypatch):
    machine()
    monkeypatch.setattr(sys, "argv", ["mlx_moe"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "mlx_moe"])

    def refuse(*call):
        raise PermissionError

    monkeypatch.setattr(os, "execve", refuse)
    large_pages.restart_with()


@pytest.mark.skipif(sys.platform != "linux", reason="a C library of Linux")
def test_a_process_restarts_once_with_its_arguments(tmp_path):
    script = tmp_path / "command.py"
    (tmp_path / "enabled").write_text("always [madvise] never")
    script.write_text(
        "import os, pathlib, sys\n"
        "from mlx_moe import large_pages\n"
        "large_pages.platform.libc_ver = lambda: ('glibc', '2.36')\n"
        f"large_pages.SETTING = pathlib.Path({str(tmp_path / 'enabled')!r})\n"
        "print('start', flush=True)\n"
        "large_pages.restart_with()\n"
        "print(os.environ['GLIBC_TUNABLES'], sys.argv[1:], os.getpid())\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    process = subprocess.Popen(
        [sys.executable, str(script), "a b", "--c"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    out, _ = process.communicate(timeout=60)
    assert out.split("\n")[:3] == [
        "start",
        "start",
        f"glibc.malloc.hugetlb=1 ['a b', '--c'] {process.pid}",
    ]
