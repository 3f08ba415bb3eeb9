"""A process that compiles packages, loads them and predicts once: `python -m mlx_moe.coreml_trial`.

The first load is the slow one, in which Core ML specialises a model for this machine, and where
it crashes if it does; this process takes that for its parent. Its client is below.
"""

import contextlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .child import Child, serve
from .errors import MoEError
from .package_form import ITSELF, Function

SUFFIX = ".mlmodelc"
SECONDS = 900.0  # for one package; first loads of minutes are reported


def try_package(request: dict[str, Any], core: Any) -> dict[str, Any]:
    """Compile `package` to `compiled`, load every function and run each on zeros.

    Args:
        request: what `trial_request` made.
        core: `mlx_moe.core`.

    Returns:
        {"placement": {capacity: {unit: [operations, convolutions]}}}, without the capacities
        that Core ML has no compute plan for.

    Raises:
        MoEError: it does not compile, load or predict.
    """
    package, compiled = Path(request["package"]), Path(request["compiled"])
    places = {int(c): Function(**place) for c, place in request["functions"].items()}
    shutil.rmtree(compiled, ignore_errors=True)
    for place in {place.package: place for place in places.values()}.values():
        made = core.coreml_compile(str(package / place.package))
        model = compiled_model(compiled, place)
        model.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, model)
    executor, functions = core.CoreMLExecutor(), compiled_functions(compiled, places)
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


def trial_request(
    package: Path,
    compiled: Path,
    functions: Mapping[int, Function],
    groups: int,
    width: int,
    input: str,
    output: str,
) -> dict[str, Any]:
    """Ask for a group's `package` (or a directory of its packages) to be tried.

    What Core ML makes of it is to be at `compiled`, in the same form.
    """
    return {
        "package": str(package),
        "compiled": str(compiled),
        "functions": {str(c): asdict(place) for c, place in functions.items()},
        "groups": groups,
        "width": width,
        "input": input,
        "output": output,
    }


def compiled_model(compiled: Path, place: Function) -> Path:
    """The .mlmodelc of a place's package; `compiled` itself where that is the only one."""
    return compiled if place.package == ITSELF else (compiled / place.package).with_suffix(SUFFIX)


def compiled_functions(
    compiled: Path, functions: Mapping[int, Function]
) -> dict[int, tuple[str, str]]:
    """As core.CoreMLExecutor.load takes them."""
    return {c: (str(compiled_model(compiled, f)), f.name or "") for c, f in functions.items()}


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
