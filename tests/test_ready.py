"""Waiting for files with numbers that `select` does not take."""

import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from mlx_moe.child import Child
from mlx_moe.distributed_peers import BEAT, Line
from mlx_moe.distributed_watch import Watchdog
from mlx_moe.ready import readable

MANY = 1100


@pytest.fixture
def many_files() -> Iterator[None]:
    """So many files are open that further ones have numbers from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * MANY:
        pytest.skip(f"a process may have {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * MANY), hard))
    held = []
    while not held or held[-1] < MANY:
        held.append(os.open(os.devnull, os.O_RDONLY))
    yield
    for one in held:
        os.close(one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_can_be_read(many_files: None) -> None:
    (a, b), (c, d) = socket.socketpair(), socket.socketpair()
    assert min(s.fileno() for s in (a, b, c, d)) >= 1024
    begun = time.monotonic()
    assert readable([a, c], 0.05) == [] and time.monotonic() - begun >= 0.04
    b.send(b"x")
    assert readable([a, c], 10) == [a]
    d.close()
    assert set(readable([a, c], 10)) == {a, c}  # the end can be read too
    for one in (a, b, c):
        one.close()


def test_a_rank_with_many_files_is_watched(many_files: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    watch = Watchdog(0, 2, 60)
    watch.tick = 0.02
    line = Line(ours)
    watch._lines, heard = {1: line}, line.heard
    watch.start()
    theirs.send(BEAT + b"\n")
    deadline = time.monotonic() + 10
    while line.heard == heard and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watch.is_alive() and line.heard > heard
    watch.close()
    watch.join(10)
    assert not watch.is_alive()
    theirs.close()


def test_a_child_of_one_with_many_files_answers(many_files: None) -> None:
    child = Child(["/bin/sh", "-c", "read line; echo 3; read line; sleep 9"])
    child._start()
    assert child._exchange("a", 10) == (3, False)
    assert child._exchange("b", 0.05) == (None, True)
    child.close()
