"""What the tests of compiling share: a small plan for the example model, and its directory."""

from pathlib import Path

import mlx.nn as nn
from artifacts import group, plan

from mlx_moe.identity import identity_of_files
from mlx_moe.manifest import Manifest
from mlx_moe.plan import Plan

WIDTH, INNER = 192, 64  # of the example model
BLOB = "Data/com.apple.CoreML/weights/weight.bin"
LAYERS = [f"model.layers.{i}.mlp.switch_mlp" for i in range(2)]


def small_plan(model: nn.Module, path: Path) -> Plan:
    """Two groups of two layers: in tiers 32 and 64, and in two parts."""
    groups = {
        LAYERS[0]: [group("l0.g0", [5, 0], 32, (0, INNER)), group("l0.g1", [9], 64, (0, INNER))],
        LAYERS[1]: [
            group("l1.g0.p0", [31, 7], 32, (0, 32), parts=2),
            group("l1.g0.p1", [31, 7], 32, (32, INNER), parts=2),
        ],
    }
    return plan(model, groups, identity=identity_of_files(path))


def stamps(directory: Path) -> dict[str, int]:
    """When each package was written."""
    return {p.name: (p / "Manifest.json").stat().st_mtime_ns for p in directory.glob("*.mlpackage")}


def blob(manifest: Manifest, id: str) -> Path:
    return manifest.directory / manifest.package(id).path / manifest.package(id).blob
