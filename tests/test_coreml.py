"""Saved packages, run by the interpreter, against float64.

Every activation: test_host_against_mil.py.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from switch_reference import HIDDEN, WIDTH, glu

pytest.importorskip("coremltools")

from mil_layers import EXPERTS, error, exact, layer, package, run, tile

from mlx_moe.activations import recognise
from mlx_moe.coreml import expert_bytes, write_package
from mlx_moe.errors import InvalidArgument
from mlx_moe.experts_weights import ExpertWeights, expert_weights
from mlx_moe.mil_program import Stored
from mlx_moe.package import Package, convolution_blobs
from mlx_moe.package_entry import TENSORS

TOLERANCE = {"fp16": 1e-3, "int8": 2e-2}  # relative Frobenius error


@pytest.mark.parametrize("weights", ["fp16", "int8"])
@pytest.mark.parametrize("name", ["swiglu_oai", "relu2"])
def test_biases_and_quantised_weights(name: str, weights: str, tmp_path: Path) -> None:
    module = layer(name, bias=True, weights="affine-4")
    program = package(tmp_path / "p.mlpackage", module, (32, 64), weights)
    for capacity in (32, 64):
        rows = tile(capacity, seed=capacity)
        found = error(run(program, rows), exact(module, rows))
        assert found <= TOLERANCE[weights]
        assert weights == "fp16" or found > 1e-3  # or int8 is not what ran


def test_tiers_are_functions_that_share_one_copy_of_the_weights(tmp_path: Path) -> None:
    module = layer("swiglu")
    one = package(tmp_path / "one.mlpackage", module, (96,))
    three = package(tmp_path / "three.mlpackage", module, (32, 64, 96))
    assert one.functions == ["c96"] and three.functions == ["c32", "c64", "c96"]
    assert three.spec.description.defaultFunctionName == "c96"
    assert three.spec.specificationVersion == 9
    for capacity in (32, 64, 96):
        rows = tile(capacity, seed=capacity)
        assert error(run(three, rows), exact(module, rows)) <= TOLERANCE["fp16"]
    sizes = [weight_file(tmp_path / f"{n}.mlpackage").stat().st_size for n in ("one", "three")]
    values = len(EXPERTS) * 3 * WIDTH * HIDDEN * 2
    assert sizes[0] == sizes[1] and values < sizes[0] < 1.01 * values
    assert len(three.blobs) == 3 * len(EXPERTS)  # places read by all three functions


@pytest.mark.parametrize("experts", [(4,), (4, 1)])
def test_groups_of_one_and_two(experts: tuple[int, ...], tmp_path: Path) -> None:
    module = layer("swiglu", bias=True)
    program = package(tmp_path / "p.mlpackage", module, (32, 64), experts=experts)
    rows = tile(64, len(experts))
    assert error(run(program, rows), exact(module, rows, experts)) <= TOLERANCE["fp16"]


def test_experts_have_their_own_columns(tmp_path: Path) -> None:
    module = layer("swiglu")
    program = package(tmp_path / "p.mlpackage", module)
    rows = tile(32)
    expected = run(program, rows)
    rows[1] = 0
    changed = run(program, rows)
    assert not changed[1].any()
    np.testing.assert_array_equal(changed[[0, 2]], expected[[0, 2]])


def test_a_shape_that_was_not_compiled_is_refused(tmp_path: Path) -> None:
    program = package(tmp_path / "p.mlpackage", layer("swiglu"))
    with pytest.raises(TypeError, match="x: "):
        program("c32", x=np.zeros((1, WIDTH, 1, 64), np.float16))


@pytest.mark.parametrize("bias", [False, True])
def test_splits_along_the_inner_features_add_up(bias: bool, tmp_path: Path) -> None:
    module = layer("swiglu", bias)
    rows = tile(32)
    total = np.zeros((*rows.shape[:2], WIDTH), np.float32)
    for split in ((0, 32), (32, 80), (80, HIDDEN)):
        path = tmp_path / f"{split[0]}.mlpackage"
        total += run(package(path, module, split=split), rows)
    assert error(total, exact(module, rows)) <= TOLERANCE["fp16"]


def test_offsets_in_the_blob_file_are_the_weights_bit_for_bit(tmp_path: Path) -> None:
    module = layer("swiglu", bias=True)
    path = tmp_path / "p.mlpackage"
    package(path, module, (32, 64))
    saved = Package(path)
    assert convolution_blobs(saved, "c32") == convolution_blobs(saved, "c64")
    blobs = convolution_blobs(saved, "c32")
    data = weight_file(path).read_bytes()
    for g, expert in enumerate(EXPERTS):
        weights = expert_weights(module, "glu", expert, (0, HIDDEN), "layer")
        for key, array in weights.arrays().items():
            matrix, _, bias = key.partition("_")
            blob = blobs[f"e{g}_{matrix}"]["bias" if bias else "weight"]
            assert data[blob.offset : blob.offset + array.nbytes] == array.tobytes()


def test_int8_keeps_each_channel_to_half_a_step() -> None:
    matrix = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float16)
    matrix[3] = 0
    matrix[4] *= 1e-5  # subnormal scales
    stored = Stored.of(matrix, "int8")
    assert stored.values.dtype == np.int8 and stored.scales is not None
    found = stored.values.astype(np.float64) * stored.scales.astype(np.float64)
    step = stored.scales.astype(np.float64)
    assert (np.abs(found - matrix) <= 0.5001 * step).all()
    assert np.abs(stored.values.astype(int)).max() <= 127 and not found[3].any()


def test_packages_over_the_limit_are_refused_before_work(tmp_path: Path) -> None:
    big = np.lib.stride_tricks.as_strided(np.zeros(1, np.float16), (14336, 4096), (0, 0))
    expert = ExpertWeights(big, big, big.T)
    path = tmp_path / "group.mlpackage"
    activation = recognise(glu(), "glu", "layer")
    with pytest.raises(InvalidArgument, match="group.mlpackage would be 352 MB.*more parts"):
        write_package(path, [expert], activation, [32])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("capacities", [(), (33,), (0,), (64, 32), (32, 32)])
def test_capacities_are_ascending_multiples_of_32(
    capacities: tuple[int, ...], tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="ascending multiples of 32"):
        write_package(tmp_path / "p.mlpackage", [], recognise(glu(), "glu", ""), capacities)


@pytest.mark.parametrize("weights", ["fp16", "int8"])
def test_sizes_are_known_beforehand(weights: Any, tmp_path: Path) -> None:
    module = layer("swiglu", bias=True)
    package(tmp_path / "p.mlpackage", module, weights=weights)
    expert = expert_weights(module, "glu", 0, (0, HIDDEN), "layer")
    assert set(expert.shapes()) == set(TENSORS)
    expected = len(EXPERTS) * expert_bytes(expert.shapes(), weights)
    assert weight_file(tmp_path / "p.mlpackage").stat().st_size == pytest.approx(expected, abs=64)


def weight_file(path: Path) -> Path:
    return path / "Data" / "com.apple.CoreML" / "weights" / "weight.bin"
