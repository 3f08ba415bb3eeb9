"""What calibrations and plans say of an expert layer."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import CorruptFile

KINDS = ("glu", "mlp")


@dataclass(frozen=True)
class WeightFacts:
    """How a layer's weights are kept.

    Attributes:
        mode: of quantisation ("affine", "mxfp4", ...), None if not quantised.
        bits: per weight (the most, where projections differ), None if not quantised.
        group_size: weights to a scale, None if not quantised.
        dtype: of the values ("bfloat16"), or the mode of floating-point formats.
    """

    mode: str | None
    bits: int | None
    group_size: int | None
    dtype: str


@dataclass(frozen=True)
class SharedFacts:
    """An expert beside the layer that every token of it passes, down(silu(gate(x)) * up(x)).

    Attributes:
        name: dotted path of the module that has gate_proj, up_proj and down_proj.
        inner: its features between the projections.
    """

    name: str
    inner: int


@dataclass(frozen=True)
class LayerFacts:
    """One expert layer.

    Attributes:
        name: dotted path of the module in the model.
        family: model file (mlx-lm's name for the architecture) of the calling block.
        kind: "glu" (gate, up, down) or "mlp" (fc1, fc2).
        experts, top_k: experts in all, and for each token.
        hidden, inner: features of the input, and between the projections.
        activation: name of the class or function between the projections.
        biases: whether the projections add one.
    """

    name: str
    family: str
    kind: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    activation: str
    biases: bool
    weights: WeightFacts
    shared: SharedFacts | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any, what: str) -> "LayerFacts":
        """Facts as `to_json` wrote them, further keys ignored.

        Raises:
            CorruptFile: a fact is missing or cannot be; names `what` and the fact.
        """
        facts = _checked(value, cls, what)
        facts["weights"] = WeightFacts(
            **_checked(facts["weights"], WeightFacts, f"{what}: weights")
        )
        if facts["shared"] is not None:
            shared = SharedFacts(**_checked(facts["shared"], SharedFacts, f"{what}: shared"))
            facts["shared"] = shared
        if facts["kind"] not in KINDS:
            raise CorruptFile(f"{what}: kind is {facts['kind']!r}; expected one of {KINDS}")
        if facts["top_k"] > facts["experts"]:
            raise CorruptFile(
                f"{what}: top_k is {facts['top_k']}, more than its {facts['experts']} experts"
            )
        return cls(**facts)


_TEXT = {"name", "family", "kind", "activation", "dtype"}
_COUNTS = {"experts", "top_k", "hidden", "inner"}
_OPTIONAL_COUNTS = {"bits", "group_size"}


def _checked(value: Any, cls: Any, what: str) -> dict[str, Any]:
    """The fields of dataclass `cls` from a JSON object, each of its type."""
    if not isinstance(value, dict):
        raise CorruptFile(f"{what}: expected an object, found {value!r}")
    facts = {}
    for field in fields(cls):
        if field.name not in value:
            raise CorruptFile(f"{what}: {field.name!r} is missing")
        fact = facts[field.name] = value[field.name]
        if not _possible(field.name, fact):
            raise CorruptFile(f"{what}: {field.name!r} cannot be {fact!r}")
    return facts


def _possible(name: str, fact: Any) -> bool:
    if name in _TEXT:
        return isinstance(fact, str) and fact != ""
    if name in _COUNTS or (name in _OPTIONAL_COUNTS and fact is not None):
        return isinstance(fact, int) and not isinstance(fact, bool) and 0 < fact < 1 << 53
    if name == "biases":
        return isinstance(fact, bool)
    if name == "mode":
        return fact is None or isinstance(fact, str)
    return True  # objects, checked on their own
