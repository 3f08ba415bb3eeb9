"""A process that compiles a package, loads it and predicts once: `python -m mlx_moe.coreml_trial`.

The first load is the slow one, in which Core ML specialises a model for this machine, and where
it crashes if it does; this process takes that for its parent. Its client is below.
"""

import contextlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .child import Child, serve
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


class Trials(Child):
    """A process of this module, started at the first request and again after each crash."""

    def __init__(self, command: Sequence[str] = (), seconds: float = SECONDS):
        """`command` and `seconds` (that a request may take) are for tests."""
        super().__init__(command or [sys.executable, "-m", __name__])
        self._seconds = seconds

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have one package tried; MoEError says why it failed, a crash and a hang included."""
        if self._process is None:
            self._start()
        reply, late = self._exchange(request, self._seconds)
        if reply is None:
            raise MoEError(f"{request['package']}: {self._ended(late)}")
        if "error" in reply:
            raise MoEError(reply["error"])
        return dict(reply)

    def _ended(self, late: bool) -> str:
        """How the process ended, which is over then; it is started anew for the next request."""
        if late:
            how = f"took more than {self._seconds:.0f} seconds"
        else:
            code, last = self._how_it_ended()
            how = f"crashed ({code}){': ' + last if last else ''}"
        self.close()
        return f"its first load {how}, in a process of its own"


def answer(request: dict[str, Any]) -> dict[str, Any]:
    from . import core

    try:
        return try_package(request, core)
    except MoEError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    serve(answer)
