"""A stand-in for Core ML, and compiled groups for it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_manifest import manifest

from mlx_moe import coreml_load
from mlx_moe.coreml_trial import try_package
from mlx_moe.errors import InvalidArgument, MoEError
from mlx_moe.manifest import Manifest

ON = {"ane": [9, 6], "gpu": [0, 0], "cpu": [1, 0], "other": [0, 0]}
SPLIT = {"ane": [7, 4], "gpu": [2, 2], "cpu": [0, 0], "other": [0, 0]}


class Executor:
    """Doubles every tile; refuses models that are not there."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def load(self, functions: Any, groups: int, width: int, input: str, output: str) -> int:
        for path, name in functions.values():
            if not Path(path, name or "main").exists():
                raise InvalidArgument(f"{path} does not load: no {name}")
        self.loaded.append((functions, groups, width, input, output))
        return len(self.loaded) - 1

    def submit(self, tiles: Any) -> Any:
        (_, x, out) = tiles[0]
        out[:] = 2 * x
        return SimpleNamespace(wait=lambda: [""])


def fake_core(tmp_path: Path, **changes: Any) -> Any:
    def compile(package: str) -> str:
        made = tmp_path / "system" / Path(package).name
        made.mkdir(parents=True)
        for name in ("c32", "c64", "main"):
            (made / name).touch()
        return str(made)

    plain: dict[str, Any] = {
        "coreml_missing": lambda: "",
        "coreml_compile": compile,
        "coreml_placement": lambda path, name: ON,
        "CoreMLExecutor": Executor,
    }
    return SimpleNamespace(**{**plain, **changes})


class Here:
    """Trials without a process; `fails` says how packages end."""

    def __init__(self, core: Any, fails: dict[str, str] | None = None):
        self.core, self.fails, self.asked = core, fails or {}, []

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        name = Path(request["package"]).stem
        self.asked.append(name)
        if name in self.fails:
            raise MoEError(self.fails[name])
        return try_package(request, self.core)

    def close(self) -> None:
        pass


def two_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """Of two layers, on macOS 15, and a cache of their own."""
    monkeypatch.setenv("MLX_MOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(coreml_load, "system_macos", lambda: 15)  # where tests run on 14 too
    one = manifest(tmp_path)
    other = replace(one.package("g1"), layer="model.layers.1.mlp")
    found = replace(one, packages=[one.package("g0"), other])
    found.save()
    return found
