"""Groups of a static executor that are switched off and on."""

from dataclasses import replace
from typing import Any

import numpy as np

from .cost import Array, expert_of, static_seconds
from .errors import InvalidArgument
from .follower import Follower, Ints, cold_costs, placement_of, start
from .plan import LayerPlan, Plan
from .replacement import ReplacedLayer
from .schedule import Experts, Placement, Scheduler, Unit
from .static import StaticLayer
from .static_path import StaticPath

SLOTS = (32.0, 512.0)  # capacities between which a cost is taken to be linear
LEAST_FILL = 0.1


def groups_follower(
    row: ReplacedLayer, planned: LayerPlan, plan: Plan, loads: Array | None, options: Any
) -> Follower:
    """Items are the layer's groups, and the other experts in as large groups on the cold path."""
    path: StaticPath = row._layer.static
    whole = path.layer
    assert whole is not None
    planned_groups = {group.id: group.experts for group in planned.groups}
    for group in whole.groups:
        if planned_groups.get(group.name) != tuple(group.experts.tolist()):
            raise InvalidArgument(
                f"{row.name}: group {group.name} of experts {group.experts.tolist()} is running, "
                "which is not in this plan: follow the plan that the model was replaced with"
            )
    force = [whole]  # the layer that we put on the path last
    items, count = items_of(whole)
    groups = len(whole.groups)
    scheduler = Scheduler(
        group_units(whole, planned, plan),
        Experts(count, allowed=[[item < groups, True] for item in range(count)]),
        **options,
    )
    start(scheduler, [True] * groups + [False] * (count - groups), items, loads)

    def change(placement: Placement, loads: Ints) -> None:
        on = placement.parts[:groups, 0] > 0
        if not on.any():  # without any, some forwards would not be seen again
            on[np.argmax(loads[:groups])] = True
        chosen = [g for g, is_on in zip(whole.groups, on, strict=True) if is_on]
        force[0] = replace(whole, groups=chosen)
        path.layer = force[0]

    def in_force() -> bool:
        return path.layer is force[0]  # else closed, or other layers are tried out meanwhile

    def now() -> Placement:
        running = {group.name for group in force[0].groups}
        return placement_of([g.name in running for g in whole.groups] + [False] * (count - groups))

    tokens = whole.static_from or 0
    return Follower(row.name, scheduler, tokens, items, change, in_force, now)


def items_of(layer: StaticLayer) -> tuple[Ints, int]:
    """For each expert its group's number, or that of one of as large groups of the rest; and how
    many there are."""
    items = np.empty(layer.experts, np.int64)
    for number, group in enumerate(layer.groups):
        items[group.experts] = number
    rest = np.flatnonzero(~layer.hot)
    size = max(1, int(layer.hot.sum()) // max(1, len(layer.groups)))
    items[rest] = len(layer.groups) + np.arange(rest.size) // size
    return items, int(items.max()) + 1


def group_units(layer: StaticLayer, planned: LayerPlan, plan: Plan) -> list[Unit]:
    """The static executor and the cold path, by the device's costs of a group of mean size."""
    device, expert = plan.device, expert_of(planned.facts)
    size = max(1, int(layer.hot.sum()) // len(layer.groups))
    programs = max(len(group.programs) for group in layer.groups)
    few, many = (
        float(static_seconds(device, expert, plan.weights, size, slots)) for slots in SLOTS
    )
    slot = (many - few) / (size * (SLOTS[1] - SLOTS[0]))
    dispatch = max(few - slot * size * SLOTS[0], 0.0) + (programs - 1) * device["dispatch_seconds"]
    fixed, seconds = cold_costs(device, planned)
    return [
        Unit("static", slot / max(planned.expected.fill, LEAST_FILL), dispatch=dispatch),
        Unit("cold", seconds, dispatch=size * fixed),
    ]
