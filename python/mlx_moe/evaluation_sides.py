"""What an evaluation compares: one loaded model that acts as stock, all cold, or limited."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from .find import named_modules
from .static import Importance, Overflow, Split, StaticLayer

COUNTS = ("assignments", "hot", "cold", "spilled", "pruned", "padding")


@dataclass
class Side:
    """One way to run the model.

    Attributes:
        name: in tables and JSON.
        active: has the model run so while open; outputs must be evaluated before it closes.
        factor: of capacity, None as planned.
        random: drops at random, as a control.
        counts: as `counted`, of what ran while open.
    """

    name: str
    active: Callable[[], AbstractContextManager[None]]
    factor: float | None = None
    random: bool = False
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    def run(self, model: Any, layers: Sequence[Any], unit: Any) -> Any:
        """The outputs of one unit, with what the layers counted meanwhile added to `counts`."""
        before = counted(layers)
        with self.active():
            outputs = unit.run(model)
        for name, count in counted(layers).items():
            self.counts[name] += count - before[name]
        return outputs


class Shuffled(StaticLayer):
    """Drops overflow at random: the control of a rule that says which assignments matter."""

    random: np.random.Generator

    def split(self, ids: Any, importance: Any = None) -> Split:
        if importance is not None:
            importance = self.random.random(importance.size, np.float32)
        return super().split(ids, importance)


@contextmanager
def stock_classes(model: Any) -> Iterator[None]:
    """Every replaced module runs mlx-lm's own code while open; nothing is restored or loaded."""
    replaced = [m for m in named_modules(model).values() if hasattr(type(m), "_moe_base")]
    classes = [type(module) for module in replaced]
    try:
        for module in replaced:
            module.__class__ = type(module)._moe_base
        yield
    finally:
        for module, own in zip(replaced, classes, strict=True):
            module.__class__ = own


def expert_layers(model: Any) -> list[Any]:
    """What replacement keeps on each replaced expert layer of `model`."""
    kept = (module.__dict__.get("_moe_layer") for module in named_modules(model).values())
    return list({id(layer): layer for layer in kept if layer is not None}.values())


def limited(
    layer: StaticLayer,
    factor: float | None,
    overflow: Overflow,
    importance: Importance,
    seed: int | None = None,
) -> StaticLayer:
    """A static layer over the same programs with another capacity and rule.

    Args:
        factor: tiles take at most this share of an expert's tier; above 1, further tiles of
            the same program. None: as planned.
        seed: of a control that drops at random; None for one that drops by importance.
    """
    options = {f.name: getattr(layer, f.name) for f in fields(layer) if f.init}
    # The norm is to be had in every family; the control throws it away.
    options |= {"overflow": overflow, "importance": importance if seed is None else "norm"}
    if factor is not None:
        options["groups"] = [replace(group, spill_limit=0) for group in layer.groups]
    copy = StaticLayer(**options) if seed is None else Shuffled(**options)
    if isinstance(copy, Shuffled):
        copy.random = np.random.default_rng(seed)
    if factor is not None:
        for group in layer.groups:
            copy.most[group.experts] = int(factor * group.capacities[-1])
    return copy


def counted(layers: Sequence[Any]) -> dict[str, int]:
    """Assignments that the layers have seen so far and what became of them, over all layers.

    Those of forwards that did not take the static path are cold.
    """
    total = dict.fromkeys(COUNTS, 0)
    for layer in layers:
        counts = layer.counters.as_dict()
        static = counts.get("static", {})
        for name in ("hot", "spilled", "pruned", "padding"):
            total[name] += static.get(name, 0)
        total["assignments"] += counts["tokens"] * (layer.top_k or 0)
    total["cold"] = total["assignments"] - total["hot"] - total["spilled"] - total["pruned"]
    return total
