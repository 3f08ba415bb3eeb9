"""Plans and hand-made artifacts for small models: weight files as compiling lays them out, without
Core ML programs around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import artifacts
import mlx.nn as nn
import numpy as np

from mlx_moe import Replacement, replace_moe_layers
from mlx_moe.activations import recognise
from mlx_moe.experts_weights import expert_weights
from mlx_moe.manifest import Manifest
from mlx_moe.mil_program import StoredExpert
from mlx_moe.package_entry import TENSORS, ExpertTensors, File, PackageEntry, Tensor
from mlx_moe.package_form import functions
from mlx_moe.plan import Group, LayerPlan, Plan

BLOB = "Data/com.apple.CoreML/weights/weight.bin"
TIERS = (32, 64)


def groups_of(
    name: str,
    members: Sequence[Sequence[int]],
    tiers: Sequence[int],
    inner: int,
    *,
    splits: Sequence[int] = (),
    spill_limit: int = 1 << 30,
) -> list[Group]:
    """A group for each list of experts; `splits` are the places where inner features are cut."""
    ends = [0, *splits, inner]
    ranges = list(zip(ends, ends[1:], strict=False))
    return [
        Group(
            f"{name}.g{i}.p{p}", tuple(map(int, experts)), int(tier), part, len(ranges), spill_limit
        )
        for i, (experts, tier) in enumerate(zip(members, tiers, strict=True))
        for p, part in enumerate(ranges)
    ]


def plan_of(
    model: nn.Module,
    groups: dict[str, list[Group]],
    *,
    static_from: int = 1,
    **options: Any,
) -> Plan:
    made = artifacts.plan(model, groups, **options)
    layers = [
        replace(layer, static_from=static_from if layer.static_from else None)
        for layer in made.layers
    ]
    return replace(made, layers=tuple(layers))


def write_artifacts(model: nn.Module, plan: Plan, directory: Path) -> Path:
    """What compiling `plan` would write, but for the programs."""
    directory.mkdir(parents=True, exist_ok=True)
    modules = dict(model.named_modules())
    packages = []
    for layer in plan.layers:
        shared = layer.shared.name if layer.shared else ""
        for group in layer.all_groups:
            beside = layer.shared is not None and group in layer.shared.groups
            name, kind = (shared, "glu") if beside else (layer.name, layer.facts.kind)
            packages.append(
                _package(modules[name], name, kind, layer, group, plan.weights, directory)
            )
    manifest = Manifest(directory, plan.sha256, plan.identity, plan.weights, packages)
    manifest.save()
    return directory


def host(model: nn.Module, plan: Plan, directory: Path, **options: Any) -> Replacement:
    """Write artifacts and replace the model's layers on the host executor."""
    write_artifacts(model, plan, directory)
    return replace_moe_layers(model, plan, artifacts=directory, backend="host", **options)


def _package(
    module: Any,
    name: str,
    kind: str,
    layer: LayerPlan,
    group: Group,
    weights: str,
    directory: Path,
) -> PackageEntry:
    blob = bytearray(64)
    tensors = []
    for expert in group.experts:
        found = expert_weights(module, kind, expert, group.split, name)
        stored = StoredExpert.of(found, weights)
        placed: dict[str, Tensor] = {}
        for key, matrix in stored.matrices.items():
            scales = matrix.scales
            placed[key] = Tensor(
                _append(blob, matrix.values),
                "fp16" if scales is None else "int8",
                matrix.values.shape,
                None if scales is None else _append(blob, scales),
            )
        for key, bias in stored.biases.items():
            placed[f"{key}_bias"] = Tensor(_append(blob, bias), "fp16", bias.shape)
        tensors.append(ExpertTensors(expert, **{key: placed.get(key) for key in TENSORS}))
    path = directory / f"{group.id}.mlpackage" / BLOB
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(blob)
    activation = recognise(module, kind, name)
    return PackageEntry(
        id=group.id,
        path=f"{group.id}.mlpackage",
        layer=name,
        kind=kind,
        experts=group.experts,
        split=group.split,
        hidden=layer.facts.hidden,
        inner=group.split[1] - group.split[0],
        activation=activation.name,
        activation_parameters=activation.parameters,
        functions=functions(layer.capacities(group), 15),
        tier=group.tier,
        input="x",
        output="y",
        files={BLOB: File(len(blob), sha256(blob).hexdigest())},
        blob=BLOB,
        tensors=tuple(tensors),
        recipe="by hand",
    )


def _append(blob: bytearray, values: np.ndarray) -> int:
    """Where the values are in the blob now; entries begin at multiples of 64 bytes."""
    blob.extend(bytes(-len(blob) % 64))
    at = len(blob)
    blob.extend(np.ascontiguousarray(values).tobytes())
    return at
