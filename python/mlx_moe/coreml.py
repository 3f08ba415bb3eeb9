"""Experts as Core ML packages: one function per capacity, all sharing one copy of the weights.

Writing works where coremltools does, on Linux too. Running such a package takes macOS 15
(specification 9, the first whose functions share weights); for macOS 14 (specification 8) each
capacity has a package of its own, with the same program and its own copy of the weights.
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
from .mil_program import StoredExpert, program, target
from .package_form import MACOS, function_name, functions
from .tiers import STEP

Weights = Literal["fp16", "int8"]
WEIGHTS = get_args(Weights)
LARGEST_PACKAGE = 200_000_000  # bytes; larger ones have failed to load on the Neural Engine
ALIGNMENT, METADATA = 64, 64  # bytes per entry of a blob file


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
    macos: int = MACOS[0],
) -> list[StoredExpert]:
    """Write `path`, a new .mlpackage, with a function for each capacity.

    For macOS 14 `path` is a new directory, with a package for each capacity in it. A function
    takes x [1, hidden, 1, G*C] f16, columns [g*C, (g+1)*C] for expert g, and
    returns y of that shape, the experts' outputs (partial sums, where the inner features are a
    part of an expert's).

    Args:
        experts: of equal shapes; float16.
        capacities: multiples of 32, ascending; the largest is the default function.
        weights: "int8" rounds each output channel to 255 levels.
        macos: 15, or 14; `package_form.functions` has the places that they give.

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
        singles = scratch / "singles"
        singles.mkdir()
        for capacity, place in functions(capacities, 14).items():
            _write_function(ct, singles / place.package, stored, activation, capacity, macos)
        made = singles if macos == 14 else _merge(ct, singles, scratch, capacities)
        for file in made.rglob("*.mlmodel"):
            file.chmod(0o644)  # mkstemp lets nobody else read it
        made.rename(path)
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
    ct: Any,
    path: Path,
    stored: list[StoredExpert],
    activation: Activation,
    capacity: int,
    macos: int,
) -> None:
    model = ct.convert(
        program(stored, activation, capacity, macos),
        convert_to="mlprogram",
        minimum_deployment_target=target(macos),
        compute_precision=ct.precision.FLOAT16,
        pass_pipeline=ct.PassPipeline.EMPTY,  # nothing is to be folded, fused or renamed
        skip_model_load=True,
    )
    model.save(str(path))
    shutil.rmtree(model.package_path, ignore_errors=True)  # else it stays until we end


def _merge(ct: Any, singles: Path, scratch: Path, capacities: Sequence[int]) -> Path:
    """One package with the packages of macOS 14's form as its functions."""
    descriptor = ct.utils.MultiFunctionDescriptor()
    for capacity, place in functions(capacities, 14).items():
        single = str(singles / place.package)
        descriptor.add_function(single, place.defined, function_name(capacity))
    descriptor.default_function_name = function_name(capacities[-1])
    merged = scratch / "merged.mlpackage"
    ct.utils.save_multifunction(descriptor, str(merged))
    return merged


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
