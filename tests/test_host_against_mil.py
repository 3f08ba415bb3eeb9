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
from mil_layers import EXPERTS, LAYERS, error, exact, kind_of, layer, run, tile

from mlx_moe import core
from mlx_moe.activations import Activation, recognise
from mlx_moe.compile import compile_plan
from mlx_moe.compile_worker import read_back
from mlx_moe.coreml import write_package
from mlx_moe.experts_weights import expert_weights
from mlx_moe.package_entry import TENSORS
from mlx_moe.static_load import load_program

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
    capacities: list[int],
) -> MilProgram:
    """Write and load a package; its interpreter."""
    kind = kind_of(module)
    chosen = [expert_weights(module, kind, e, (0, HIDDEN), "layer") for e in EXPERTS]
    activation: Activation = recognise(module, kind, "layer")
    stored = write_package(path, chosen, activation, capacities, weights)
    tensors, blob = read_back(path, stored, list(EXPERTS), capacities)
    places = [
        tuple(t and (t.offset, t.scale_offset) for t in (getattr(e, key) for key in TENSORS))
        for e in tensors
    ]
    assert any(places[0][3:]) == bias
    program = executor.load(
        *(str(path / blob), WIDTH, HIDDEN, activation.name, capacities, places),
        activation.parameters,
    )
    assert program == 0
    return MilProgram(path)


@pytest.mark.parametrize(
    "name, weights, bias",
    [
        *((name, "fp16", True) for name in LAYERS),
        ("swiglu", "fp16", False),
        ("swiglu", "int8", False),
        ("gelu_tanh", "int8", True),
    ],
)
def test_every_activation(name: str, weights: str, bias: bool, tmp_path: Path) -> None:
    module, executor = layer(name, bias), core.HostExecutor()
    capacities = [32, 64] if name == "swiglu" else [32]
    program = load(executor, tmp_path / "p.mlpackage", module, weights, bias, capacities)
    for capacity in capacities:
        rows = tile(capacity, seed=capacity)
        rows[1, capacity // 2 :] = 0  # padding
        found, interpreted = submit(executor, 0, rows), run(program, rows)
        assert error(found.astype(np.float64), interpreted.astype(np.float64)) <= TOLERANCE
        if weights == "fp16":
            expected = exact(module, rows)
            assert error(interpreted.astype(np.float64), expected) <= 1e-3
            assert error(found.astype(np.float64), expected) <= 1e-3


def test_every_function_of_a_compiled_plan(tiny_model_path: Path, tmp_path: Path) -> None:
    model = mlx_lm.load(str(tiny_model_path))[0]
    layer = "model.layers.2.mlp.switch_mlp"
    groups = [
        group("whole", [3, 8], 64, (0, 64)),
        group("part0", [1], 32, (0, 16), parts=2),
        group("part1", [1], 32, (16, 64), parts=2),
    ]
    manifest = compile_plan(model, plan(model, {layer: groups}), tmp_path, progress=False)
    executor = core.HostExecutor()
    functions = 0
    for entry in manifest.packages:
        number = load_program(executor, manifest.directory, entry)
        program = MilProgram(manifest.package_path(entry.id))
        for capacity in entry.functions:
            rows = np.random.default_rng(capacity).standard_normal(
                (len(entry.experts), capacity, entry.hidden)
            )
            rows = rows.astype(np.float16)
            expected = run(program, rows).astype(np.float64)
            assert error(submit(executor, number, rows), expected) <= TOLERANCE
            functions += 1
    assert functions == sum(len(p.functions) for p in manifest.packages) == 4
