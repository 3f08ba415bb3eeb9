"""Which expert runs where, in which tier and group: the file between planning and running."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from . import hub
from .devices import Device
from .durable import digest, write_json
from .errors import CorruptFile, InvalidArgument
from .identity import ModelIdentity, check_same
from .json_fields import Fields
from .layer_facts import LayerFacts
from .plan_check import check_layer, check_plan
from .tiers import LARGEST_CHUNK

FORMAT, VERSION = "mlx_moe.plan", 1
WEIGHTS = ("fp16", "int8")


@dataclass(frozen=True)
class Group:
    """Experts of one layer and tier that share one static program and one dispatch.

    Attributes:
        id: unique in the plan, and a file name.
        experts: in the order of their tiles; 0 for a shared expert.
        tier: the most slots an expert of it has in a tile.
        split: the range of inner features that this program computes.
        parts: programs whose sum is the experts' output; above 1 where one package cannot hold
            an expert, then each has the same experts and its own split.
        spill_limit: with more assignments than this beyond capacity, all experts of the group
            together, another tile of the same program beats the cold path.
    """

    id: str
    experts: tuple[int, ...]
    tier: int
    split: tuple[int, int]
    parts: int
    spill_limit: int

    @classmethod
    def from_json(cls, value: Any, where: str) -> "Group":
        take = Fields(value, where, {f.name for f in fields(cls)})
        start, end = take.counts("split", 2)
        return cls(
            take.text("id"),
            take.counts("experts"),
            take.count("tier", 1),
            (start, end),
            take.count("parts", 1),
            take.count("spill_limit"),
        )


@dataclass(frozen=True)
class Shared:
    """An expert that sees every token; without groups it stays where the model runs it."""

    name: str
    inner: int
    groups: tuple[Group, ...] = ()

    @classmethod
    def from_json(cls, value: Any, where: str) -> "Shared":
        take = Fields(value, where, {f.name for f in fields(cls)})
        return cls(take.text("name"), take.count("inner", 1), _groups(take, where))


@dataclass(frozen=True)
class Expected:
    """What the plan was chosen for, means over the calibration's chunks.

    Attributes:
        gini: of the experts' loads: 0 flat, towards 1 all on one.
        top_quarter: share of assignments of the fullest quarter of the experts.
        fill: share of the hot experts' slots, at their own tiers, that are used.
        padding: share of the slots dispatched, at the tiers taken at run time, that are empty.
        overflow: share of the hot experts' assignments that the static path leaves to the cold one.
        hot: share of all assignments that the static path computes.
        bytes: of weights that the plan keeps beside the model's own.
        static_ms: of a layer's experts for a full chunk as planned, cold path and all.
        cold_ms: of the same all on the cold path.
    """

    gini: float
    top_quarter: float
    fill: float
    padding: float
    overflow: float
    hot: float
    bytes: int
    static_ms: float
    cold_ms: float

    @classmethod
    def from_json(cls, value: Any, where: str) -> "Expected":
        names = [f.name for f in fields(cls)]
        take = Fields(value, where, set(names))
        numbers: dict[str, Any] = {
            name: take.count(name) if name == "bytes" else take.number(name) for name in names
        }
        return cls(**numbers)


@dataclass(frozen=True)
class LayerPlan:
    """One expert layer's part.

    Attributes:
        facts: of the layer (their `shared` is what the model has, planned or not).
        tiers: capacities of the layer's groups, ascending.
        groups: the hot experts.
        static_from: tokens from which the static path (executor "cpu": the packed copies) is
            faster; None for never.
        packed: executor "cpu": experts to keep prepacked for the kernels.
        shared: the layer's shared expert, if it has one.
        reason: why there is no static path (packed copies), else None.
        expected: by the device's numbers.
    """

    facts: LayerFacts
    tiers: tuple[int, ...]
    groups: tuple[Group, ...]
    static_from: int | None
    packed: tuple[int, ...]
    shared: Shared | None
    reason: str | None
    expected: Expected

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def hot(self) -> tuple[int, ...]:
        """Experts on the static executor, ascending."""
        return tuple(sorted({expert for group in self.groups for expert in group.experts}))

    @property
    def all_groups(self) -> tuple[Group, ...]:
        """Of the routed experts, then of the shared one."""
        return self.groups + (self.shared.groups if self.shared else ())

    def capacities(self, group: Group) -> tuple[int, ...]:
        """What a group's program is compiled for, ascending: the layer's tiers up to its own."""
        return tuple(sorted({tier for tier in self.tiers if tier < group.tier} | {group.tier}))

    def to_json(self) -> dict[str, Any]:
        planned = asdict(self)
        return planned.pop("facts") | planned

    @classmethod
    def from_json(cls, value: Any, where: str) -> "LayerPlan":
        own = {f.name for f in fields(cls)} - {"facts"}
        take = Fields(value, where, own | {f.name for f in fields(LayerFacts)})
        shared = take("shared")
        layer = cls(
            LayerFacts.from_json(value, where),
            take.counts("tiers"),
            _groups(take, where),
            take.optional("static_from", partial(take.count, least=1)),
            take.counts("packed"),
            None if shared is None else Shared.from_json(shared, f"{where}.shared"),
            take.optional("reason", take.text),
            Expected.from_json(take("expected"), f"{where}.expected"),
        )
        check_layer(layer, where)
        return layer


def _groups(take: Fields, where: str) -> tuple[Group, ...]:
    items = enumerate(take.items("groups"))
    return tuple(Group.from_json(value, f"{where}.groups[{i}]") for i, value in items)


@dataclass(frozen=True)
class Plan:
    """A model's plan.

    Attributes:
        identity: the model.
        executor: "static", or "cpu" where hot means prepacked for the CPU kernels.
        device: whose numbers were used, with all of them.
        chunk: tokens of a prefill chunk that it is made for.
        weights: of the static programs, "fp16" or "int8".
        options: what `make_plan` was asked for; `force_hot` is not null where experts were made
            hot without asking whether that is faster.
        layers: in the model's order.
    """

    identity: ModelIdentity
    executor: str
    device: Device
    chunk: int
    weights: str
    options: dict[str, Any]
    layers: tuple[LayerPlan, ...] = field(default_factory=tuple)

    def layer(self, name: str) -> LayerPlan:
        """The layer of a dotted path; InvalidArgument if the plan has none."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        names = ", ".join(layer.name for layer in self.layers)
        raise InvalidArgument(f"the plan has no layer {name!r}, only {names}")

    def groups(self) -> Iterator[tuple[LayerPlan, Group]]:
        """Every group of every layer, shared experts' too."""
        for layer in self.layers:
            for group in layer.all_groups:
                yield layer, group

    def check_model(self, found: ModelIdentity, what: str = "the plan") -> None:
        """Raise IdentityMismatch unless `found` is the model that was calibrated."""
        check_same(self.identity, found, what)

    @property
    def sha256(self) -> str:
        """Of the canonical JSON: two plans with the same one are the same."""
        return digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        plan = {
            "format": FORMAT,
            "version": VERSION,
            "identity": self.identity.to_json(),
            "executor": self.executor,
            "device": self.device.as_dict(),
            "chunk": self.chunk,
            "weights": self.weights,
            "options": self.options,
            "layers": [layer.to_json() for layer in self.layers],
        }
        return json.loads(json.dumps(plan))  # as it reads back: lists for tuples

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all."""
        try:
            write_json(Path(path), self.to_json())
        except OSError as error:
            raise InvalidArgument(f"cannot write {path}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read and check a plan.

        Raises:
            InvalidArgument: there is no such file.
            CorruptFile: it is no plan; names the field.
        """
        try:
            value = json.loads(Path(path).read_bytes())
        except FileNotFoundError as error:
            raise InvalidArgument(f"there is no plan {path}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise CorruptFile(f"{path} is not JSON: {error}; plan again") from error
        try:
            return cls.from_json(value)
        except CorruptFile as error:
            raise CorruptFile(f"{path}: {error}; plan again") from None

    @classmethod
    def from_json(cls, value: Any) -> "Plan":
        """The plan that `to_json` wrote; CorruptFile names the field that cannot be."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise CorruptFile(f"this is not a {FORMAT} file")
        if value.get("version") != VERSION:
            raise CorruptFile(
                f"version is {value.get('version')!r} of {FORMAT}; this mlx_moe reads {VERSION}"
            )
        take = Fields(value, "", {"format", "version", *(f.name for f in fields(cls))})
        device = Device.from_dict(take("device"), "device")
        layers = enumerate(take.items("layers"))
        plan = cls(
            ModelIdentity.from_json(take("identity")),
            take.one_of("executor", (device.executor,)),
            device,
            take.count("chunk", 1, LARGEST_CHUNK),
            take.one_of("weights", WEIGHTS),
            take.fields("options").value,
            tuple(LayerPlan.from_json(layer, f"layers[{i}]") for i, layer in layers),
        )
        check_plan(plan)
        return plan


def read_plan(plan: Plan | dict[str, Any] | str | Path) -> Plan:
    """A plan given as itself, as its JSON, or as its file, which can be hf://user/repo/...

    Raises:
        InvalidArgument: it is none of these, or there is no such file.
        CorruptFile: the file or JSON is no plan.
    """
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, dict):
        return Plan.from_json(plan)
    if not isinstance(plan, str | Path):
        raise InvalidArgument(
            f"plan is a {type(plan).__name__}; expected a Plan, or the path of a plan.json"
        )
    return Plan.load(hub.resolve(plan))
