"""Start ranks of a script over the ring on this machine, as `mlx.launch` does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

LIMIT = 300  # seconds; a rank that hangs fails its test then (busy machines are slow)


@dataclass(frozen=True)
class Ended:
    """How a rank came to its end, and seconds after the start."""

    code: int | None
    output: str
    seconds: float


def ring_of(size: int, folder: Path) -> list[dict[str, str]]:
    """The environment of each rank."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(size)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in held]
    file = folder / "hosts.json"
    file.write_text(json.dumps(hosts))
    # One thread each: the ranks of a test share one machine.
    common = {"MLX_HOSTFILE": str(file), "MLX_MOE_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return [os.environ | common | {"MLX_RANK": str(rank)} for rank in range(size)]


def start(
    size: int, folder: Path, command: list[str], **per_rank: list[str]
) -> list[subprocess.Popen[str]]:
    """One process a rank; per_rank: further environment variables, a value for each."""
    processes = []
    for rank, env in enumerate(ring_of(size, folder)):
        own = {name: values[rank] for name, values in per_rank.items()}
        out = (folder / f"rank{rank}.txt").open("w")
        processes.append(
            subprocess.Popen(command, env=env | own, stdout=out, stderr=subprocess.STDOUT)
        )
        out.close()
    return processes


def ended(processes: list[subprocess.Popen[str]], folder: Path, begin: float) -> list[Ended]:
    """Wait for all; those that do not end are killed and have no code."""
    found = []
    for rank, process in enumerate(processes):
        try:
            code: int | None = process.wait(max(0.1, begin + LIMIT - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
        text = (folder / f"rank{rank}.txt").read_text()
        found.append(Ended(code, text, time.monotonic() - begin))
    return found


def run(size: int, folder: Path, *arguments: object, **per_rank: list[str]) -> list[Ended]:
    """Run the ranks of `python arguments`."""
    begin = time.monotonic()
    command = [sys.executable, *map(str, arguments)]
    return ended(start(size, folder, command, **per_rank), folder, begin)
