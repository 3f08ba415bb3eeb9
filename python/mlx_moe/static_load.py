"""Open a plan and its artifacts for a model: all checks first, then programs in an executor."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from . import hub, tune_profile
from .activations import recognise
from .errors import CorruptArtifact, InvalidArgument
from .facts import layer_facts
from .identity import identity_of_model
from .manifest import Manifest
from .package_entry import PackageEntry
from .plan import Group as PlannedGroup
from .plan import LayerPlan, Plan, read_plan
from .static import EXECUTORS, Group, Importance, Overflow, StaticLayer
from .static_programs import Programs, open_programs

# Facts that must be the model's; the others say how it was calibrated.
FACTS = ("kind", "experts", "hidden", "inner", "activation", "biases", "weights", "shared")

logger = logging.getLogger("mlx_moe")


@dataclass
class Opened:
    """A plan that fits the model.

    Attributes:
        plan: as loaded.
        backend: whose executor its programs are for, "host" or "coreml"; None for neither.
        static: static layers by module name, the shared experts' too; empty where the plan's
            static path is not taken.
        programs: what the static layers run; None without any.
        note: why the static path is not taken, or what came of its programs; or None.
    """

    plan: Plan
    backend: str | None
    static: dict[str, StaticLayer] = field(default_factory=dict)
    programs: Programs | None = None
    note: str | None = None

    def residency(self, name: str) -> str:
        """A cell of the table of what was replaced, for a plan of a static executor."""
        planned = self.plan.layer(name)
        if not planned.groups:
            return "no static path"
        of_all = f"of {planned.facts.experts} experts hot"
        if self.programs is None:
            return f"{len(planned.hot)} {of_all} in the plan, none here"
        count = int(self.static[name].hot.sum()) if name in self.static else 0
        placement = self.programs.placement([group.id for group in planned.groups])
        return f"{count} {of_all}" + (f"; {placement}" if placement else "")


def open_plan(
    model: nn.Module,
    plan: Any,
    artifacts: str | Path | None,
    backend: str,
    overflow: Overflow,
    importance: Importance,
    files: str | Path | None,
    stored: Mapping[str, Any] | None = None,
) -> Opened:
    """Read and check a plan, and load its programs where a backend runs them.

    Args:
        plan: as `read_plan` takes it; `artifacts` can be hf://user/repo/... too.
        backend: as for `replace_moe_layers`.
        files: the model's directory, where known.
        stored: layers whose experts are about to be on disk, as for `identity_of_model`.

    Raises:
        IdentityMismatch: the plan is another model's.
        InvalidArgument: the plan's layers are not the model's, artifacts are missing or were
            compiled from another plan.
        CorruptFile: plan or artifacts are not what was written.
    """
    loaded = read_plan(plan)
    what = f"the plan {plan}" if isinstance(plan, str | Path) else "the plan"
    loaded.check_model(identity_of_model(model, files, stored), what)
    check_layers(model, loaded, what)
    opened = Opened(loaded, backend if backend in EXECUTORS else None)
    if loaded.executor == "cpu":
        if opened.backend:
            raise InvalidArgument(
                f"{what} is for the CPU kernels alone; backend={backend!r} runs plans for a static "
                "executor: plan for an Apple device (mlx_moe plan --device ...)"
            )
        return opened
    if not opened.backend:
        opened.note = (
            f"{what} is for a static executor, and none is in use here: all experts stay on the "
            "cold path; backend coreml runs its programs in Core ML (macOS), host on the CPU, to "
            "test them"
        )
        logger.info("%s", opened.note)
        return opened
    if not any(layer.all_groups for layer in loaded.layers):
        opened.note = (
            f"{what} has a static path on no layer ({loaded.layers[0].reason}): all experts stay "
            "on the cold path"
        )
        logger.info("%s", opened.note)
        return opened
    if artifacts is None:
        raise InvalidArgument(
            f"{what} needs its artifacts: give the directory that `mlx_moe compile` wrote "
            "(--artifacts DIR, artifacts=DIR)"
        )
    rules = overflow, importance
    opened.static, opened.programs = load_programs(
        model, loaded, hub.resolve(artifacts), opened.backend, *rules
    )
    opened.note = opened.programs.summary()
    if opened.note:
        logger.info("%s", opened.note)
    if backend == "coreml" and (tuned := tune_profile.better_than(loaded.device)):
        logger.warning(
            "%s was made with the numbers of %s, and this machine was tuned (%s): plan again, so "
            "that no layer takes a static path that measured slower",
            what,
            loaded.device.name,
            tuned.name,
        )
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
    model: nn.Module,
    plan: Plan,
    directory: Path,
    backend: str,
    overflow: Overflow,
    importance: Importance,
) -> tuple[dict[str, StaticLayer], Programs]:
    """The static layers of a plan, and their programs in one executor."""
    manifest = Manifest.load(directory)
    manifest.check_plan(plan)
    manifest.verify()
    modules = dict(model.named_modules())
    parts = [part for layer in plan.layers for part in static_parts(layer)]
    ids = [group.id for part in parts for group in part.groups]
    for part in parts:
        check_activation(modules[part.name], part, [manifest.package(g.id) for g in part.groups])
        for group in part.groups:
            check_package(manifest, part, group)
    programs = open_programs(backend, manifest, ids)
    static: dict[str, StaticLayer] = {}
    for part in parts:
        planned = [load_group(programs, part.layer, g) for g in merged(part.groups)]
        groups = [group for group in planned if group is not None]
        static[part.name] = StaticLayer(
            part.name,
            programs.executor,
            groups,
            part.experts,
            part.layer.static_from,
            overflow,
            importance,
            len(planned) - len(groups),
        )
    return static, programs


@dataclass(frozen=True)
class StaticPart:
    """A layer's experts, or the shared expert beside them, with groups in the plan."""

    layer: LayerPlan
    name: str
    kind: str
    experts: int
    groups: Sequence[PlannedGroup]


def static_parts(layer: LayerPlan) -> list[StaticPart]:
    parts = [StaticPart(layer, layer.name, layer.facts.kind, layer.facts.experts, layer.groups)]
    if layer.shared is not None:
        parts.append(StaticPart(layer, layer.shared.name, "glu", 1, layer.shared.groups))
    return [part for part in parts if part.groups]


def check_activation(module: Any, part: StaticPart, entries: Sequence[PackageEntry]) -> None:
    """Raise CorruptArtifact unless the programs have the module's activation."""
    found = recognise(module, part.kind, part.name)
    for entry in entries:
        if (entry.activation, entry.activation_parameters) != (found.name, found.parameters):
            raise CorruptArtifact(
                f"{part.name}: the program {entry.id!r} has the activation {entry.activation} "
                f"{entry.activation_parameters}, the layer {found.name} {found.parameters}; "
                "compile again"
            )


def check_package(manifest: Manifest, part: StaticPart, group: PlannedGroup) -> None:
    """Raise CorruptArtifact unless a group's package is of its experts, split and capacities."""
    entry, layer = manifest.package(group.id), part.layer
    capacities = layer.capacities(group)
    wanted = (part.name, group.experts, group.split, layer.facts.hidden, capacities)
    found = (entry.layer, entry.experts, entry.split, entry.hidden)
    if wanted != (*found, tuple(sorted(entry.functions))):
        raise CorruptArtifact(
            f"{manifest.directory}: the package {group.id!r} is {found}, and the plan's group "
            f"{wanted}; compile again"
        )


def merged(groups: Sequence[PlannedGroup]) -> list[list[PlannedGroup]]:
    """The parts of each group together, in the order of their splits."""
    by_experts: dict[tuple[int, ...], list[PlannedGroup]] = {}
    for group in groups:
        by_experts.setdefault(group.experts, []).append(group)
    return [sorted(parts, key=lambda g: g.split) for parts in by_experts.values()]


def load_group(programs: Programs, layer: LayerPlan, parts: Sequence[PlannedGroup]) -> Group | None:
    """A group whose programs are in the executor; None if one of them is not."""
    numbers = [programs.number(part.id) for part in parts]
    found = tuple(n for n in numbers if n is not None)
    if len(found) < len(numbers):
        return None
    first = parts[0]
    experts = np.array(first.experts, np.int32)
    return Group(first.id, experts, layer.capacities(first), found, first.spill_limit)
