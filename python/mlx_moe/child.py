"""A process of ours that answers requests, lines of JSON on its standard input and output.

It ends when its input does, so that nothing outlives a killed parent.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .ready import readable


class Child:
    """The parent's side; what the process logs is kept for when it ends."""

    def __init__(self, command: Sequence[str], **environment: str):
        self._command, self._environment = list(command), environment
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        root = str(Path(__file__).parent.parent)  # the package as it is imported here
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **self._environment, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def _exchange(self, request: Any, seconds: float | None = None) -> tuple[Any, bool]:
        """The reply, None if the process ended; and whether it took longer than `seconds`."""
        assert self._process and self._process.stdin and self._process.stdout
        line, late = b"", False
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            if seconds is not None:
                late = not readable([self._process.stdout], seconds)
            line = b"" if late else self._process.stdout.readline()
        return (json.loads(line) if line else None), late

    def _how_it_ended(self) -> tuple[str, str]:
        """Its exit code or signal, and the last line that it logged."""
        assert self._process is not None
        code = self._process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name, "".join(said[-1:])

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout, self._log):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]
            self._process = None


def serve(answer: Callable[[Any], dict[str, Any]]) -> None:
    """The process's side: answers requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which closes us
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries and the system print is no reply
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies, flush=True)
