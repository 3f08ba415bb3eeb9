"""What must hold in a plan that others may have changed."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .errors import CorruptFile
from .json_fields import FILE_NAME
from .tiers import STEP, slots_of

if TYPE_CHECKING:
    from .plan import Group, LayerPlan, Plan


def check_plan(plan: "Plan") -> None:
    """What holds across layers."""
    for what, names in (
        ("name", [layer.name for layer in plan.layers]),
        ("group id", [group.id for _, group in plan.groups()]),
    ):
        if twice := repeated(names):
            raise CorruptFile(f"layers: {what} {twice[0]!r} twice")
    most = slots_of(plan.chunk)
    for i, layer in enumerate(plan.layers):
        largest = max((*layer.tiers, *(group.tier for group in layer.all_groups)), default=0)
        if largest > most:
            raise CorruptFile(f"layers[{i}].tiers: {largest}, and no chunk fills more than {most}")
        if plan.executor == "cpu" and layer.all_groups:
            raise CorruptFile(f"layers[{i}].groups: executor cpu has no static programs")
        if plan.executor == "static" and layer.packed:
            raise CorruptFile(f"layers[{i}].packed: executor static prepacks nothing")


def check_layer(layer: "LayerPlan", where: str) -> None:
    """What holds within a layer."""
    tiers, experts = layer.tiers, layer.facts.experts
    if any(t % STEP or t == 0 for t in tiers) or any(a >= b for a, b in zip(tiers, tiers[1:])):  # noqa: B905
        raise CorruptFile(f"{where}.tiers: expected ascending multiples of {STEP}, found {tiers}")
    if repeated(layer.packed) or any(expert >= experts for expert in layer.packed):
        raise CorruptFile(f"{where}.packed: an expert twice, or not one of {experts}")
    check_groups(layer.groups, experts, layer.facts.inner, where)
    for i, group in enumerate(layer.groups):
        if group.tier not in tiers:
            raise CorruptFile(f"{where}.groups[{i}].tier: {group.tier} is not one of {tiers}")
    if layer.shared is not None:
        check_groups(layer.shared.groups, 1, layer.shared.inner, f"{where}.shared")
    active = bool(layer.all_groups or layer.packed)
    if active != (layer.static_from is not None):
        raise CorruptFile(
            f"{where}.static_from: {layer.static_from} with "
            f"{'some' if active else 'no'} hot experts"
        )
    if not active and layer.reason is None:
        raise CorruptFile(f"{where}.reason: nothing is hot, and no reason given")


def check_groups(groups: Sequence["Group"], experts: int, inner: int, where: str) -> None:
    """Every expert is in one tier, and its inner features in one program each."""
    splits: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    parts: dict[tuple[int, ...], set[int]] = defaultdict(set)
    tiers: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for i, group in enumerate(groups):
        at = f"{where}.groups[{i}]"
        if not FILE_NAME.fullmatch(group.id):
            raise CorruptFile(f"{at}.id: {group.id!r} cannot be a file's name")
        if not group.experts or repeated(group.experts) or max(group.experts) >= experts:
            raise CorruptFile(
                f"{at}.experts: {group.experts} has one twice, none, or one not of {experts}"
            )
        if group.tier % STEP:
            raise CorruptFile(f"{at}.tier: {group.tier} is not a multiple of {STEP}")
        if not 0 <= group.split[0] < group.split[1] <= inner:
            raise CorruptFile(f"{at}.split: {group.split} is not a range in {inner}")
        splits[group.experts].append(group.split)
        parts[group.experts].add(group.parts)
        tiers[group.experts].add(group.tier)
    if twice := repeated([expert for members in splits for expert in members]):
        raise CorruptFile(f"{where}.groups: expert {twice[0]} in two groups of other experts")
    for members, ranges in splits.items():
        ends = [0, *(end for _, end in sorted(ranges))]
        if [start for start, _ in sorted(ranges)] != ends[:-1] or ends[-1] != inner:
            raise CorruptFile(
                f"{where}.groups: the splits {sorted(ranges)} of experts {members} do not cover "
                f"[0, {inner}] once"
            )
        if parts[members] != {len(ranges)} or len(tiers[members]) > 1:
            raise CorruptFile(
                f"{where}.groups: {len(ranges)} programs of experts {members} have parts "
                f"{sorted(parts[members])} and tiers {sorted(tiers[members])}"
            )


def repeated(values: Iterable[Any]) -> list[Any]:
    seen: set[Any] = set()
    return [value for value in values if value in seen or seen.add(value)]  # type: ignore[func-returns-value]
