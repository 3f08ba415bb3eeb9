"""Experts as a Core ML package: one function per capacity, all sharing one copy of the weights.

Writing works where coremltools does, on Linux too; running a package takes macOS 15
(specification 9, the first whose functions share weights).
"""

import gc
import importlib.util
import logging
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from .activations import Activation
from .errors import InvalidArgument, MissingDependency
from .experts_weights import ExpertWeights
from .mil_program import StoredExpert, program
from .tiers import STEP

Weights = Literal["fp16", "int8"]
WEIGHTS = get_args(Weights)
LARGEST_PACKAGE = 200_000_000  # bytes; larger ones have failed to load on the Neural Engine
ALIGNMENT, METADATA = 64, 64  # bytes per entry of a blob file


def function_name(capacity: int) -> str:
    """The function of a package whose experts take `capacity` tokens each."""
    return f"c{capacity}"


def check_coremltools() -> None:
    """Raise MissingDependency if coremltools is not installed; does not wait for its import."""
    if importlib.util.find_spec("coremltools") is None:
        raise MissingDependency(
            "compiling needs coremltools 9 or newer, which is not installed; where it has no "
            "release for your Python (as for 3.14) use an older Python to compile: the artifacts "
            "run with any"
        )


def coremltools() -> Any:
    """The coremltools module, imported without warnings of what it lacks off macOS.

    Raises:
        MissingDependency: it is not installed.
    """
    check_coremltools()
    logs = [logging.getLogger(name) for name in ("coremltools", "transformers")]
    before = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        return importlib.import_module("coremltools")
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)


def write_package(
    path: Path,
    experts: Sequence[ExpertWeights],
    activation: Activation,
    capacities: Sequence[int],
    weights: Weights = "fp16",
) -> list[StoredExpert]:
    """Write `path`, a new .mlpackage, with a function for each capacity.

    Function c{C} takes x [1, hidden, 1, G*C] f16, columns [g*C, (g+1)*C] for expert g, and
    returns y of that shape, the experts' outputs (partial sums, where the inner features are a
    part of an expert's).

    Args:
        experts: of equal shapes; float16.
        capacities: multiples of 32, ascending; the largest is the default function.
        weights: "int8" rounds each output channel to 255 levels.

    Returns:
        The weights as they were written.

    Raises:
        InvalidArgument: the capacities are not as said, or the package would be too large.
        MissingDependency: no coremltools.
        OSError: the disk is full.
    """
    check_capacities(capacities, path.name)
    check_size(sum(expert_bytes(e.shapes(), weights) for e in experts), path.name)
    ct = coremltools()
    stored = [StoredExpert.of(e, weights) for e in experts]
    with _scratch(path.parent) as scratch:
        functions = ct.utils.MultiFunctionDescriptor()
        for capacity in capacities:
            single = scratch / f"{function_name(capacity)}.mlpackage"
            _write_function(ct, single, stored, activation, capacity)
            functions.add_function(str(single), "main", function_name(capacity))
        functions.default_function_name = function_name(capacities[-1])
        merged = scratch / "merged.mlpackage"
        ct.utils.save_multifunction(functions, str(merged))
        for file in merged.rglob("*.mlmodel"):
            file.chmod(0o644)  # mkstemp lets nobody else read it
        merged.rename(path)
    gc.collect()  # coremltools' programs are cyclic and hold the weights
    return stored


def expert_bytes(shapes: Mapping[str, tuple[int, ...] | None], weights: Weights) -> int:
    """What one expert, of `ExpertWeights.shapes`, takes in a blob file."""
    total = 0
    for shape in filter(None, shapes.values()):
        size = math.prod(shape)
        entries = [2 * size]
        if len(shape) == 2 and weights == "int8":
            entries = [size, 2 * shape[0]]
        total += sum(METADATA + -(-entry // ALIGNMENT) * ALIGNMENT for entry in entries)
    return total


def check_capacities(capacities: Sequence[int], what: str) -> None:
    good = all(isinstance(c, int) and c > 0 and c % STEP == 0 for c in capacities)
    if not capacities or not good or sorted(set(capacities)) != list(capacities):
        raise InvalidArgument(
            f"{what}: capacities {list(capacities)}; expected ascending multiples of {STEP}"
        )


def check_size(size: int, what: str) -> None:
    if size > LARGEST_PACKAGE:
        raise InvalidArgument(
            f"{what} would be {size / 1e6:.0f} MB; packages over {LARGEST_PACKAGE / 1e6:.0f} MB "
            "do not load on the Neural Engine: plan fewer experts to a group, or more parts"
        )


def _write_function(
    ct: Any, path: Path, stored: list[StoredExpert], activation: Activation, capacity: int
) -> None:
    model = ct.convert(
        program(stored, activation, capacity),
        convert_to="mlprogram",
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT16,
        pass_pipeline=ct.PassPipeline.EMPTY,  # nothing is to be folded, fused or renamed
        skip_model_load=True,
    )
    model.save(str(path))
    shutil.rmtree(model.package_path, ignore_errors=True)  # else it stays until we end


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """A directory beside the package for all that coremltools writes; gone afterwards."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix=".scratch-", dir=parent) as name:
        tempfile.tempdir = name
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = before
