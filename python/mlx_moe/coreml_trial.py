"""A process that compiles a package, loads it and predicts once: `python -m mlx_moe.coreml_trial`.

The first load is the slow one, in which Core ML specialises a model for this machine, and where
it crashes if it does; this process takes that for its parent. Requests and replies are lines of
JSON on its standard input and output. Its client is below.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import MoEError

SECONDS = 900.0  # for one package; first loads of minutes are reported


def try_package(request: dict[str, Any], core: Any) -> dict[str, Any]:
    """Compile `package` to `compiled`, load every function and run each on zeros.

    Args:
        request: package and compiled (paths), functions (name by capacity), groups, width,
            input and output (names).
        core: `mlx_moe.core`.

    Returns:
        {"placement": {capacity: {unit: [operations, convolutions]}}}, without the capacities
        that Core ML has no compute plan for.

    Raises:
        MoEError: it does not compile, load or predict.
    """
    made = Path(core.coreml_compile(request["package"]))
    compiled = Path(request["compiled"])
    shutil.rmtree(compiled, ignore_errors=True)
    shutil.move(made, compiled)
    executor = core.CoreMLExecutor()
    functions = {int(c): (str(compiled), name) for c, name in request["functions"].items()}
    shape = request["groups"], request["width"]
    number = executor.load(functions, *shape, request["input"], request["output"])
    placement = {}
    for capacity, (path, name) in functions.items():
        x = np.zeros((request["groups"], capacity, request["width"]), np.float16)
        (outcome,) = executor.submit([(number, x, np.empty_like(x))]).wait()
        if outcome:
            raise MoEError(f"{request['package']}: the first prediction failed: {outcome}")
        with contextlib.suppress(MoEError):  # macOS before 14.4 has no compute plans
            placement[str(capacity)] = core.coreml_placement(path, name)
    return {"placement": placement}


class Trials:
    """A process of this module, started at the first request and again after each crash."""

    def __init__(self, command: Sequence[str] = (), seconds: float = SECONDS):
        """`command` and `seconds` (that a request may take) are for tests."""
        self._command = list(command) or [sys.executable, "-m", __name__]
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have one package tried; MoEError says why it failed, a crash and a hang included."""
        if self._process is None:
            self._start()
        assert self._process and self._process.stdin and self._process.stdout
        line, late = b"", False
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            late = not select.select([self._process.stdout], [], [], self._seconds)[0]
            line = b"" if late else self._process.stdout.readline()
        if not line:
            raise MoEError(f"{request['package']}: {self._ended(late)}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise MoEError(reply["error"])
        return reply

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout, self._log):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]
            self._process = None

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        root = str(Path(__file__).parent.parent)  # the package as it is imported here
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def _ended(self, late: bool) -> str:
        """How the process ended, which is over then; it is started anew for the next request."""
        assert self._process is not None
        if late:
            how = f"took more than {self._seconds:.0f} seconds"
        else:
            code = self._process.wait()
            name = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip().splitlines()
            how = f"crashed ({name}){': ' + said[-1] if said else ''}"
        self.close()
        return f"its first load {how}, in a process of its own"


def main() -> None:
    from . import core

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which closes us
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the system prints is no reply
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = try_package(request, core)
        except Exception as error:
            ours = isinstance(error, MoEError)
            reply = {"error": f"{'' if ours else type(error).__name__ + ': '}{error}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
