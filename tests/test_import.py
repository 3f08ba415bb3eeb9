"""What importing the package brings along."""

import subprocess
import sys

import pytest

import mlx_moe

LOADED = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"


def loaded_by(statement: str) -> set[str]:
    ran = subprocess.run(
        [sys.executable, "-c", f"{statement}; {LOADED}"], capture_output=True, text=True, check=True
    )
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    "statement", ["import mlx_moe", "from mlx_moe import core", "import mlx_moe.cli"]
)
def test_the_core_and_the_command_line_start_without_mlx_lm(statement: str) -> None:
    assert loaded_by(statement).isdisjoint({"mlx", "mlx_lm", "transformers"})


def test_every_public_name_is_there() -> None:
    assert dir(mlx_moe) == sorted(mlx_moe.__all__)
    assert all(getattr(mlx_moe, name) is not None for name in mlx_moe.__all__)
    with pytest.raises(AttributeError, match="'mlx_moe' has no attribute 'replace_all'"):
        mlx_moe.replace_all  # noqa: B018
