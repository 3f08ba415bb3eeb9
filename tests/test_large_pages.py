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


@pytest.fixture
def started(monkeypatch):
    """The commands that were started in place of this process."""
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    return calls


@pytest.mark.parametrize("tunables", [None, "a.b=1"])
@pytest.mark.parametrize(
    "command",
    [
        ["python", "-I", "-m", "mlx_moe", "run", "x"],
        ["python", "-m", "cProfile", "-m", "mlx_moe", "run"],
        ["/bin/python", "../bin/mlx_moe", "run", "a b"],
        ["/bin/python", "/bin/mlx_moe.generate"],
    ],
    ids=" ".join,
)
def test_restarts_the_same_command(machine, monkeypatch, started, tunables, command):
    machine(tunables=tunables)
    monkeypatch.setattr(sys, "orig_argv", command)
    at = next(i for i, word in enumerate(command) if "mlx_moe" in word)
    monkeypatch.setattr(sys, "argv", ["as Python names it", *command[at + 1 :]])
    large_pages.restart_command()
    ((program, arguments, environment),) = started
    assert (program, arguments) == (sys.executable, command)
    expected = "glibc.malloc.hugetlb=1"
    assert environment["GLIBC_TUNABLES"] == (f"{tunables}:{expected}" if tunables else expected)
    # Where the C library takes its tunables away, as from a Python with capabilities: only once.
    monkeypatch.setattr(os, "environ", environment)
    del environment["GLIBC_TUNABLES"]
    large_pages.restart_command()
    assert len(started) == 1


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (["python", "mine.py", "run", "x"], ["mine.py", "run", "x"]),
        (["python", "mine.py"], ["mlx_moe", "run", "x"]),
        (["python", "mlx_moe", "mine"], ["mlx_moe", "run"]),
        (["python", "-", "run"], ["-", "run"]),
        (["python", "-c", "from mlx_moe.cli import main; main()", "run"], ["-c", "run"]),
        ([], ["mlx_moe"]),
    ],
    ids=str,
)
def test_a_program_that_calls_a_command_is_not_restarted(
    machine, monkeypatch, started, command, argv
):
    machine()
    monkeypatch.setattr(sys, "orig_argv", command)
    monkeypatch.setattr(sys, "argv", argv)
    large_pages.restart_command()
    assert not started


@pytest.mark.parametrize("executable", ["", None])
def test_a_python_that_does_not_know_its_path_goes_on(machine, monkeypatch, started, executable):
    machine()
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "orig_argv", ["python", "mlx_moe"])
    monkeypatch.setattr(sys, "argv", ["mlx_moe"])
    large_pages.restart_command()
    assert not started


def test_a_command_that_cannot_restart_goes_on(machine, monkeypatch):
    machine()
    monkeypatch.setattr(sys, "argv", ["mlx_moe"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "mlx_moe"])

    def refuse(*call):
        raise PermissionError

    monkeypatch.setattr(os, "execve", refuse)
    large_pages.restart_command()


@pytest.mark.skipif(sys.platform != "linux", reason="a C library of Linux")
def test_a_process_restarts_once_with_its_arguments(tmp_path):
    script = tmp_path / "mlx_moe"
    (tmp_path / "enabled").write_text("always [madvise] never")
    script.write_text(
        "import os, pathlib, sys\n"
        "from mlx_moe import large_pages\n"
        "large_pages.platform.libc_ver = lambda: ('glibc', '2.36')\n"
        f"large_pages.SETTING = pathlib.Path({str(tmp_path / 'enabled')!r})\n"
        "print('start', flush=True)\n"
        "large_pages.restart_command()\n"
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
