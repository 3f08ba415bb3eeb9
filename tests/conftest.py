"""What every test shares: no hub, one device, seeded, the example model's directory."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # servers and workers are forked

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings

from mlx_moe import attention, dense, layers

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


@pytest.fixture(scope="session")
def tiny_model_path() -> Path:
    """Directory of the trained 4-bit example model (Qwen3-MoE: 6 layers, 32 experts, top-4)."""
    return Path(__file__).parent.parent / "examples" / "tiny-qwen3-moe"
