"""Core ML itself, on a Mac: packages compiled, opened and predicted, against float64.

The only tests that need Apple's frameworks; elsewhere they are skipped. Both forms of packages:
those for macOS 14 run on newer systems too.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlx_moe import core

if missing := core.coreml_missing():
    pytest.skip(missing, allow_module_level=True)
pytest.importorskip("coremltools")

from mil_layers import EXPERTS, error, exact, layer, tile, write
from switch_reference import WIDTH

from mlx_moe.compile import compile_plan
from mlx_moe.coreml_load import CoreMLPrograms
from mlx_moe.coreml_trial import Trials, compiled_functions, trial_request
from mlx_moe.package_form import MACOS, container, functions, system_macos
from mlx_moe.plan import Plan
from mlx_moe.static_programs import HostPrograms

TOLERANCE = 2e-3  # relative Frobenius error; sums in half precision on some units
CAPACITIES = (32, 64)
FORMS = [form for form in MACOS if form <= (system_macos() or 0)]


@pytest.fixture(scope="module", params=FORMS)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    """A layer, its compiled models, and what the first load in another process said."""
    module, directory = layer("swiglu"), tmp_path_factory.mktemp("coreml")
    package, places = (
        directory / container("p", request.param),
        functions(CAPACITIES, request.param),
    )
    write(package, module, CAPACITIES, macos=request.param)
    compiled, trials = directory / "p.mlmodelc", Trials()
    try:
        asked = trial_request(package, compiled, places, len(EXPERTS), WIDTH, "x", "y")
        placement = trials.request(asked)["placement"]
    finally:
        trials.close()
    models = compiled_functions(compiled, places)
    yield SimpleNamespace(module=module, models=models, placement=placement)


@pytest.mark.parametrize("surfaces", [True, False])
@pytest.mark.parametrize("tiles", [1, 3])
def test_tiles_come_back_right(opened: Any, surfaces: bool, tiles: int) -> None:
    executor = core.CoreMLExecutor(surfaces=surfaces)
    program = executor.load(opened.models, len(EXPERTS), WIDTH, "x", "y")
    for capacity in CAPACITIES:
        rows = [tile(capacity, seed=seed) for seed in range(tiles)]
        outs = [np.full_like(r, np.nan) for r in rows]
        outcomes = executor.submit(
            [(program, r, y) for r, y in zip(rows, outs, strict=True)]
        ).wait()
        assert outcomes == [""] * tiles
        for r, y in zip(rows, outs, strict=True):
            assert error(y, exact(opened.module, r)) <= TOLERANCE
    print("buffers:", executor.buffers)


def test_placement_counts_every_convolution(opened: Any) -> None:
    print("placement:", opened.placement)
    if not opened.placement:
        pytest.skip("a compute plan takes macOS 14.4 or newer")
    for capacity in CAPACITIES:
        units = opened.placement[str(capacity)]
        assert sum(products for _, products in units.values()) == 3 * len(EXPERTS)


@pytest.mark.parametrize("macos", FORMS)
def test_a_compiled_plan_runs_as_on_the_host(
    macos: int,
    tiny_plan: Plan,
    tiny_model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups that this machine places elsewhere than on the Neural Engine are run as well."""
    monkeypatch.setenv("MLX_MOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("mlx_moe.coreml_load.demotion", lambda _: None)
    artifacts = tmp_path / "artifacts"
    manifest = compile_plan(tiny_model_path, tiny_plan, artifacts, macos=macos, progress=False)
    ids = [entry.id for entry in manifest.packages]
    real, host = CoreMLPrograms.open(manifest, ids), HostPrograms(manifest, ids)
    print({id: report.placement for id, report in real.reports.items()})
    for entry in manifest.packages:
        for capacity in entry.functions:
            shape = (len(entry.experts), capacity, entry.hidden)
            x = np.random.default_rng(capacity).standard_normal(shape).astype(np.float16)
            found = []
            for programs in (real, host):
                number, y = programs.number(entry.id), np.full_like(x, np.nan)
                assert number is not None, real.reports[entry.id].cold
                assert programs.executor.submit([(number, x, y)]).wait() == [""]
                found.append(y.astype(np.float64))
            assert error(*found) <= TOLERANCE
