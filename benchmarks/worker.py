"""Contestants as processes that wait for their turn. Needs numpy only.

A contestant is a script that builds its layers once and then answers lines of JSON: a request
`{"tokens": T, "calls": n}` with `{"seconds": [...]}`, one entry a call. Between turns the process
is stopped (SIGSTOP), so that threads that spin while idle cost the others nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Missing(Exception):
    """The contestant cannot run here; the message says why."""


def arguments() -> argparse.Namespace:
    """The options that every contestant takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", required=True)
    parser.add_argument("--format", required=True)
    parser.add_argument("--routing", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--variant", default="")
    return parser.parse_args()


Sample = Callable[[int, int], list[float]]


def serve(build: Callable[[argparse.Namespace], tuple[Sample, dict[str, Any]]]) -> None:
    """Contestant's side: build, say what was built, answer requests until the input ends."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print do not disturb the answers
    try:
        sample, about = build(arguments())
    except Missing as reason:
        print(json.dumps({"missing": str(reason)}), file=channel)
        return
    print(json.dumps({"about": about}), file=channel)
    for line in sys.stdin:
        request = json.loads(line)
        seconds = sample(request["tokens"], request["calls"])
        print(json.dumps({"seconds": seconds}), file=channel)


class Contestant:
    """Benchmark's side of one process."""

    def __init__(self, script: str, python: str, options: dict[str, Any], env: dict[str, str]):
        command = [python, str(HERE / "contestants" / script)]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        quiet = None if os.environ.get("BENCH_VERBOSE") else subprocess.DEVNULL
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=quiet,
            text=True,
            env={**os.environ, **env, "PYTHONPATH": _path()},
        )
        first = self._read()
        self.missing: str | None = first.get("missing")
        self.about: dict[str, Any] = first.get("about", {})
        self._stop()

    def sample(self, tokens: int, calls: int) -> list[float]:
        """Seconds of each call."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"tokens": tokens, "calls": calls}) + "\n")
        self._process.stdin.flush()
        seconds = self._read().get("seconds")
        self._stop()
        if seconds is None:
            raise RuntimeError("a contestant died; BENCH_VERBOSE=1 shows what it printed")
        return seconds

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"missing": "it died; BENCH_VERBOSE=1 shows why"}

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)


def _path() -> str:
    """PYTHONPATH of a contestant: these scripts, and what the caller set."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(HERE), *([inherited] if inherited else [])])


@contextmanager
def closing(contestants: dict[str, Contestant]) -> Iterator[dict[str, Contestant]]:
    """Ends them in the end, also when this process is told to (a stopped one would stay)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        yield contestants
    finally:
        for contestant in contestants.values():
            contestant.close()
