"""Open a plan and its artifacts for a model: all checks first, then programs in an executor."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from . import core, hub
from .activations import recognise
from .errors import CorruptArtifact, InvalidArgument
from .facts import layer_facts
from .identity import identity_of_model
from .manifest import Manifest
from .package_entry import TENSORS, PackageEntry
from .plan import Group as PlannedGroup
from .plan import LayerPlan, Plan, read_plan
from .static import Group, Importance, Overflow, StaticLayer

# Facts that must be the model's; the others say how it was calibrated.
FACTS = ("kind", "experts", "hidden", "inner", "activation", "biases", "weights", "shared")

logger = logging.getLogger("mlx_moe")


@dataclass
class Opened:
    """A plan that fits the model.

    Attributes:
        plan: as loaded.
        static: static layers by module name, the shared experts' too; empty where the plan's
            static path is not taken.
        note: why it is not taken, or None.
    """

    plan: Plan
    static: dict[str, StaticLayer]
    note: str | None = None

    def residency(self, name: str) -> str:
        """A cell of the table of what was replaced, for a plan of a static executor."""
        planned = self.plan.layer(name)
        if not planned.groups:
            return "no static path"
        hot = f"{len(planned.hot)} of {planned.facts.experts} experts hot"
        return hot if name in self.static else f"{hot} in the plan, none here"


def open_plan(
    model: nn.Module,
    plan: Any,
    artifacts: str | Path | None,
    host: bool,
    overflow: Overflow,
    importance: Importance,
    files: str | Path | None,
) -> Opened:
    """Read and check a plan, and load its programs where `host`.

    Args:
        plan: as `read_plan` takes it; `artifacts` can be hf://user/repo/... too.
        files: the model's directory, where known.

    Raises:
        IdentityMismatch: the plan is another model's.
        InvalidArgument: the plan's layers are not the model's, artifacts are missing or were
            compiled from another plan.
        CorruptFile: plan or artifacts are not what was written.
    """
    loaded = read_plan(plan)
    what = f"the plan {plan}" if isinstance(plan, str | Path) else "the plan"
    loaded.check_model(identity_of_model(model, files), what)
    check_layers(model, loaded, what)
    opened = Opened(loaded, {})
    if loaded.executor == "cpu":
        if host:
            raise InvalidArgument(
                f"{what} is for the CPU kernels alone; backend='host' runs plans for a static "
                "executor: plan for an Apple device (mlx_moe plan --device ...)"
            )
        return opened
    if not host:
        opened.note = (
            f"{what} is for a static executor, and none is in use here: all experts stay on the "
            "CPU kernels; backend host runs the plan on the CPU, to test it"
        )
        logger.info("%s", opened.note)
        return opened
    if not any(layer.all_groups for layer in loaded.layers):
        opened.note = (
            f"{what} has a static path on no layer ({loaded.layers[0].reason}): all experts stay "
            "on the CPU kernels"
        )
        logger.info("%s", opened.note)
        return opened
    if artifacts is None:
        raise InvalidArgument(
            f"{what} needs its artifacts: give the directory that `mlx_moe compile` wrote "
            "(--artifacts DIR, artifacts=DIR)"
        )
    opened.static = load_programs(model, loaded, hub.resolve(artifacts), overflow, importance)
    return opened


def check_layers(model: nn.Module, plan: Plan, what: str) -> None:
    """Raise InvalidArgument unless the plan's layers are the model's, fact by fact."""
    found = {facts.name: facts for facts in layer_facts(model)}
    planned = {layer.name: layer.facts for layer in plan.layers}
    if found.keys() != planned.keys():
        names = sorted(found.keys() ^ planned.keys())
        where = "the plan" if names[0] in planned else "the model"
        raise InvalidArgument(
            f"{what} has {len(planned)} layers and the model {len(found)}; {names[0]} is only in "
            f"{where}: plan this model again"
        )
    for name, facts in found.items():
        for key in FACTS:
            here, there = getattr(facts, key), getattr(planned[name], key)
            if here != there:
                raise InvalidArgument(
                    f"{name}: {key} is {here!r}, and {what} was made for {there!r}; plan this "
                    "model again"
                )


def load_programs(
    model: nn.Module, plan: Plan, directory: Path, overflow: Overflow, importance: Importance
) -> dict[str, StaticLayer]:
    """The static layers of a plan, their programs in one host executor."""
    manifest = Manifest.load(directory)
    manifest.check_plan(plan)
    manifest.verify()
    executor = core.HostExecutor()
    modules = dict(model.named_modules())
    static: dict[str, StaticLayer] = {}
    for layer in plan.layers:
        parts = [(layer.name, layer.facts.kind, layer.facts.experts, layer.groups)]
        if layer.shared is not None:
            parts.append((layer.shared.name, "glu", 1, layer.shared.groups))
        for name, kind, experts, groups in parts:
            if not groups:
                continue
            check_activation(modules[name], kind, name, [manifest.package(g.id) for g in groups])
            static[name] = StaticLayer(
                name,
                executor,
                [load_group(executor, manifest, layer, name, g) for g in merged(groups)],
                experts,
                layer.static_from,
                overflow,
                importance,
            )
    return static


def check_activation(module: Any, kind: str, name: str, entries: Sequence[PackageEntry]) -> None:
    """Raise CorruptArtifact unless the programs have the module's activation."""
    found = recognise(module, kind, name)
    for entry in entries:
        if (entry.activation, entry.activation_parameters) != (found.name, found.parameters):
            raise CorruptArtifact(
                f"{name}: the program {entry.id!r} has the activation {entry.activation} "
                f"{entry.activation_parameters}, the layer {found.name} {found.parameters}; "
                "compile again"
            )


def merged(groups: Sequence[PlannedGroup]) -> list[list[PlannedGroup]]:
    """The parts of each group together, in the order of their splits."""
    by_experts: dict[tuple[int, ...], list[PlannedGroup]] = {}
    for group in groups:
        by_experts.setdefault(group.experts, []).append(group)
    return [sorted(parts, key=lambda g: g.split) for parts in by_experts.values()]


def load_group(
    executor: Any,
    manifest: Manifest,
    layer: LayerPlan,
    name: str,
    parts: Sequence[PlannedGroup],
) -> Group:
    """A group whose programs are in the executor."""
    first, capacities = parts[0], layer.capacities(parts[0])
    programs = []
    for part in parts:
        entry = manifest.package(part.id)
        wanted = (name, part.experts, part.split, layer.facts.hidden, capacities)
        found = (entry.layer, entry.experts, entry.split, entry.hidden)
        if wanted != (*found, tuple(sorted(entry.functions))):
            raise CorruptArtifact(
                f"{manifest.directory}: the package {part.id!r} is {found}, and the plan's group "
                f"{wanted}; compile again"
            )
        programs.append(load_program(executor, manifest.directory, entry))
    experts = np.array(first.experts, np.int32)
    return Group(first.id, experts, capacities, tuple(programs), first.spill_limit)


def load_program(executor: Any, directory: Path, entry: PackageEntry) -> int:
    """The executor's number for a package, run from its weight file."""

    def place(tensor: Any) -> tuple[int, int | None] | None:
        return None if tensor is None else (tensor.offset, tensor.scale_offset)

    try:
        return int(
            executor.load(
                str(directory / entry.path / entry.blob),
                entry.hidden,
                entry.inner,
                entry.activation,
                sorted(entry.functions),
                [tuple(place(getattr(e, key)) for key in TENSORS) for e in entry.tensors],
                entry.activation_parameters,
            )
        )
    except InvalidArgument as error:
        raise CorruptArtifact(f"{entry.layer}: group {entry.id!r}: {error}") from error
