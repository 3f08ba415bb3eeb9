"""What every test shares: no hub, one device, seeded, the example model and its artifacts."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # servers and workers are forked

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from compiled import small_plan
from hypothesis import HealthCheck, settings

from mlx_moe import attention, core, dense, layers
from mlx_moe.compile import compile_plan
from mlx_moe.manifest import Manifest
from mlx_moe.plan import Plan

# What the user has tuned or counted is no part of a test, nor are tests to leave anything there.
# Read at first use, by this process and by those that tests start.
_cache = tempfile.TemporaryDirectory(prefix="mlx-moe-tests-")
os.environ["MLX_MOE_CACHE"] = _cache.name

# Shared machines stall: a slow example is no failure, and CI draws the same examples every time.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# The kernels serve a CPU-only MLX: on a Mac, the tests put MLX there too.
mx.set_default_device(mx.cpu)


@pytest.fixture(autouse=True, scope="session")
def _kernels_at_any_size() -> Iterator[None]:
    """Tests are of small models, whose calls would be stock's; test_small.py has the limits."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention, dense, layers):
            for name in [name for name in vars(module) if name.startswith("SMALLEST")]:
                patch.setattr(module, name, 0)
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    mx.random.seed(0)
    np.random.seed(0)


@pytest.fixture(params=core.isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction set of this machine, forced."""
    monkeypatch.setenv("MLX_MOE_ISA", request.param)
    return request.param


@pytest.fixture(scope="session")
def tiny_model_path() -> Path:
    """Directory of the trained 4-bit example model (Qwen3-MoE: 6 layers, 32 experts, top-4)."""
    return Path(__file__).parent.parent / "examples" / "tiny-qwen3-moe"


@pytest.fixture(scope="session")
def tiny_model(tiny_model_path: Path) -> nn.Module:
    """The example model; what a test changes in it, it changes back."""
    return mlx_lm.load(str(tiny_model_path))[0]


@pytest.fixture(scope="session")
def tiny_plan(tiny_model: nn.Module, tiny_model_path: Path) -> Plan:
    return small_plan(tiny_model, tiny_model_path)


@pytest.fixture(scope="session")
def compiled(
    tiny_plan: Plan, tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Manifest:
    """The artifacts of `tiny_plan`, to be read; `copied` is to be changed."""
    out = tmp_path_factory.mktemp("compiled") / "artifacts"
    return compile_plan(tiny_model_path, tiny_plan, out, workers=1, progress=False)


@pytest.fixture
def copied(compiled: Manifest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled.directory, tmp_path / "artifacts"))
