"""What calibrations and plans say of an expert layer."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from .json_fields import Fields

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
        take = Fields(value, what)
        weights = take.fields("weights")
        shared = take.optional("shared", take.fields)
        positive = partial(weights.count, least=1)
        return cls(
            take.text("name"),
            take.text("family"),
            take.one_of("kind", KINDS),
            experts := take.count("experts", 1),
            take.count("top_k", 1, experts),
            take.count("hidden", 1),
            take.count("inner", 1),
            take.text("activation"),
            take.flag("biases"),
            WeightFacts(
                weights.optional("mode", weights.text),
                weights.optional("bits", positive),
                weights.optional("group_size", positive),
                weights.text("dtype"),
            ),
            None if shared is None else SharedFacts(shared.text("name"), shared.count("inner", 1)),
        )
