"""Core ML itself, on a Mac: packages compiled, opened and predicted, against float64.

The only tests that need Apple's frameworks; elsewhere they are skipped.
"""

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_moe import core

if missing := core.coreml_missing():
    pytest.skip(missing, allow_module_level=True)
if int(platform.mac_ver()[0].split(".")[0] or 0) < 15:
    pytest.skip("packages with several functions take macOS 15", allow_module_level=True)
pytest.importorskip("coremltools")

from mil_layers import error, exact, layer, package, tile
from switch_reference import WIDTH

from mlx_moe.coreml_trial import Trials

TOLERANCE = 2e-3  # relative Frobenius error; sums in half precision on some units
CAPACITIES = (32, 64)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, dict[str, Any]]:
    """A layer, its compiled model, and what the first load in another process said."""
    module = layer("swiglu")
    directory = tmp_path_factory.mktemp("coreml")
    package(directory / "p.mlpackage", module, CAPACITIES)
    compiled = directory / "p.mlmodelc"
    trials = Trials()
    reply = trials.request(
        {
            "package": str(directory / "p.mlpackage"),
            "compiled": str(compiled),
            "functions": {str(c): f"c{c}" for c in CAPACITIES},
            "groups": 3,
            "width": WIDTH,
            "input": "x",
            "output": "y",
        }
    )
    trials.close()
    return module, compiled, reply


@pytest.mark.parametrize("surfaces", [True, False])
@pytest.mark.parametrize("tiles", [1, 3])
def test_tiles_come_back_right(opened: Any, surfaces: bool, tiles: int) -> None:
    module, compiled, _ = opened
    executor = core.CoreMLExecutor(surfaces=surfaces)
    functions = {c: (str(compiled), f"c{c}") for c in CAPACITIES}
    program = executor.load(functions, 3, WIDTH, "x", "y")
    for capacity in CAPACITIES:
        rows = [tile(capacity, seed) for seed in range(tiles)]
        outs = [np.full_like(r, np.nan) for r in rows]
        outcomes = executor.submit(
            [(program, r, y) for r, y in zip(rows, outs, strict=True)]
        ).wait()
        assert outcomes == [""] * tiles
        for r, y in zip(rows, outs, strict=True):
            assert error(y, exact(module, r)) <= TOLERANCE
    print("buffers:", executor.buffers)


def test_placement_counts_every_convolution(opened: Any) -> None:
    _, _, reply = opened
    print("placement:", reply["placement"])
    for capacity in CAPACITIES:
        units = reply["placement"][str(capacity)]
        assert sum(products for _, products in units.values()) == 9  # three to an expert
