"""Small models, and plans that make groups of their experts as a test asks."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from mlx_moe.devices import load_device
from mlx_moe.facts import layer_facts
from mlx_moe.identity import ModelIdentity, identity_of_model
from mlx_moe.plan import Expected, Group, LayerPlan, Plan, Shared

NOTHING = Expected(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0)


def group(id: str, experts: list[int], tier: int, split: tuple[int, int], parts: int = 1) -> Group:
    return Group(id, tuple(experts), tier, split, parts, 0)


def plan(
    model: nn.Module,
    groups: dict[str, list[Group]],
    *,
    shared: dict[str, list[Group]] | None = None,
    tiers: tuple[int, ...] = (32, 64),
    identity: ModelIdentity | None = None,
    weights: str = "fp16",
) -> Plan:
    """A plan with the given `groups`, and `shared` ones, by the layer's dotted path."""
    layers = []
    for facts in layer_facts(model):
        mine = groups.get(facts.name, [])
        beside = None
        if facts.shared is not None:
            theirs = tuple((shared or {}).get(facts.name, []))
            beside = Shared(facts.shared.name, facts.shared.inner, theirs)
        hot = bool(mine or (beside and beside.groups))
        planned: Any = {
            "facts": facts,
            "tiers": tiers,
            "groups": tuple(mine),
            "static_from": 1 if hot else None,
            "packed": (),
            "shared": beside,
            "reason": None if hot else "nothing of it is tested",
            "expected": NOTHING,
        }
        layers.append(LayerPlan(**planned))
    return Plan(
        identity=identity or identity_of_model(model),
        executor="static",
        device=load_device("m2-max"),
        chunk=512,
        weights=weights,
        options={},
        layers=tuple(layers),
    )
