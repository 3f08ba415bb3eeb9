"""The host executor against the interpreted MIL program, from the same weight file.

And both against float64.
"""

from pathlib import Path
from typing import Any

import mlx_lm
import numpy as np
import pytest
from artifacts import group, plan
from switch_reference import HIDDEN, WIDTH

pytest.importorskip("coremltools")

from mil_interpreter import MilProgram
from mil_layers import EXPERTS, LAYERS, error, exact, kind_of, layer, run, tile, write

from mlx_moe import core
from mlx_moe.activations import Activation, recognise
from mlx_moe.compile import compile_plan
from mlx_moe.compile_worker import read_back
from mlx_moe.package_entry import TENSORS
from mlx_moe.package_form import MACOS, Function, container, functions
from mlx_moe.static_programs import load_program

# Both round to f16, the interpreter after every operation, the executor less often.
TOLERANCE = 1.2e-3


def submit(executor: core.HostExecutor, program: int, rows: np.ndarray) -> np.ndarray:
    """[G, C, d] through a program, from token-major tiles as they are."""
    y = np.full_like(rows, np.nan)
    executor.submit([(program, rows, y)]).wait()
    return y


def load(
    executor: core.HostExecutor,
    path: Path,
    module: Any,
    weights: Any,
    bias: bool,
    places: dict[int, Function],
) -> None:
    """Write and load packages."""
    activation: Activation = recognise(module, kind_of(module), "layer")
    macos, capacities = 15 if path.suffix == ".mlpackage" else 14, list(places)
    stored = write(path, module, capacities, weights, macos=macos)
    tensors, blob = read_back(path, stored, list(EXPERTS), places)
    experts = [
        tuple(t and (t.offset, t.scale_offset) for t in (getattr(e, key) for key in TENSORS))
        for e in tensors
    ]
    assert any(experts[0][3:]) == bias
    program = executor.load(
        *(str(path / blob), WIDTH, HIDDEN, activation.name, capacities, experts),
        activation.parameters,
    )
    assert program == 0


@pytest.mark.parametrize(
    "name, weights, bias, macos",
    [
        *((name, "fp16", True, 15) for name in LAYERS),
        ("swiglu", "fp16", False, 15),
        ("swiglu", "fp16", False, 14),
        ("swiglu", "int8", False, 15),
        ("swiglu", "int8", False, 14),
        ("gelu_tanh", "int8", True, 14),
    ],
)
def test_every_activation(name: str, weights: str, bias: bool, macos: int, tmp_path: Path) -> None:
    module, executor = layer(name, bias), core.HostExecutor()
    path = tmp_path / container("p", macos)
    places = functions([32, 64] if name == "swiglu" else [32], macos)
    load(executor, path, module, weights, bias, places)
    for capacity, place in places.items():
        rows = tile(capacity, seed=capacity)
        rows[1, capacity // 2 :] = 0  # padding
        program = MilProgram(path / place.package)
        found, interpreted = submit(executor, 0, rows), run(program, rows, place.defined)
        assert error(found.astype(np.float64), interpreted.astype(np.float64)) <= TOLERANCE
        if weights == "fp16":
            expected = exact(module, rows)
            assert error(interpreted.astype(np.float64), expected) <= 1e-3
            assert error(found.astype(np.float64), expected) <= 1e-3


def test_every_function_of_a_compiled_plan_in_both_forms(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    """The packages of macOS 14 and the functions of macOS 15: the same bits come out."""
    model = mlx_lm.load(str(tiny_model_path))[0]
    layer = "model.layers.2.mlp.switch_mlp"
    groups = [
        group("whole", [3, 8], 64, (0, 64)),
        group("part0", [1], 32, (0, 16), parts=2),
        group("part1", [1], 32, (16, 64), parts=2),
    ]
    planned, executor = plan(model, {layer: groups}), core.HostExecutor()
    results: dict[int, list[Any]] = {}
    for macos in MACOS:
        manifest = compile_plan(
            model, planned, tmp_path / f"{macos}", macos=macos, workers=1, progress=False
        )
        for entry in manifest.packages:
            number = load_program(executor, manifest.directory, entry)
            for capacity, place in entry.functions.items():
                program = MilProgram(manifest.package_path(entry.id) / place.package)
                rows = np.random.default_rng(capacity).standard_normal(
                    (len(entry.experts), capacity, entry.hidden)
                )
                rows = rows.astype(np.float16)
                expected = run(program, rows, place.defined)
                found = submit(executor, number, rows)
                assert error(found, expected.astype(np.float64)) <= TOLERANCE
                results.setdefault(macos, []).extend([expected.tobytes(), found.tobytes()])
    assert results[14] == results[15] and len(results[15]) == 2 * 4
