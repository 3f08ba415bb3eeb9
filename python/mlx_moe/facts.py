"""Read the facts of a model's expert layers."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .errors import NoMoELayers
from .find import family_of, find_modules, named_modules, switch_kind
from .layer_facts import LayerFacts, SharedFacts, WeightFacts
from .layers import PROJECTIONS
from .probe import WIDTH
from .top_k import of_layer
from .weights import columns, describe, own_class, quantisation, shallow_copy

SHARED = ("shared_expert", "shared_experts", "shared_mlp")
SHARED_CHILDREN = ("gate_proj", "up_proj", "down_proj")


def layer_facts(model: nn.Module, top_k: dict[str, int] | None = None) -> list[LayerFacts]:
    """The facts of every expert layer, in the model's order.

    Args:
        model: any MLX module; replaced layers are described as the stock ones that they are.
        top_k: experts per token by a layer's name, where its block does not say.

    Raises:
        NoMoELayers: the model has no expert layers.
    """
    found = find_modules(model, lambda m: switch_kind(m) is not None)
    if not found:
        raise NoMoELayers(f"{type(model).__module__}.{type(model).__name__} has no expert layers")
    modules = named_modules(model)
    told = {name: of_layer(modules, name) for name, _, _ in found} | (top_k or {})
    return [_facts(*layer, told[layer[0]] or 1) for layer in found]


def _facts(name: str, module: Any, parent: Any, top_k: int) -> LayerFacts:
    kind = switch_kind(module)
    assert kind is not None
    linears = [_plain(module[child]) for child in PROJECTIONS[kind]]
    experts, inner, _ = linears[0]["weight"].shape
    hidden = columns(linears[0])
    return LayerFacts(
        name=name,
        family=family_of(parent)[0],
        kind=kind,
        experts=int(experts),
        top_k=top_k,
        hidden=hidden,
        inner=int(inner),
        activation=_callable_name(module.activation),
        biases=any("bias" in linear for linear in linears),
        weights=_weights(linears),
        shared=_shared(name, parent, hidden),
    )


def _plain(linear: Any) -> Any:
    return linear.get("linear", linear)  # adapters wrap their base layer


def _callable_name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _weights(linears: list[Any]) -> WeightFacts:
    dtype, _ = describe(linears[0])
    bits = [describe(linear)[1] for linear in linears]
    quantised = [linear for linear in linears if "scales" in linear]
    if not quantised:
        return WeightFacts(None, None, None, dtype)
    first = quantised[0]
    mode, _, group_size = quantisation(first)
    most = max(b for b in bits if b is not None)
    return WeightFacts(mode, most, group_size, describe(first)[0])


def _shared(name: str, parent: Any, hidden: int) -> SharedFacts | None:
    """The expert beside the layer that every token passes, if it computes SwiGLU of as wide x."""
    for child in SHARED:
        module = parent.get(child)
        if (
            isinstance(module, nn.Module)
            and all(_has_no_bias(module.get(part)) for part in SHARED_CHILDREN)
            and _is_swiglu_mlp(module)
            and columns(_plain(module["gate_proj"])) == hidden
        ):
            path = name.rpartition(".")[0]
            inner = int(_plain(module["gate_proj"])["weight"].shape[0])
            return SharedFacts(f"{path}.{child}" if path else child, inner)
    return None


def _has_no_bias(linear: Any) -> bool:
    return isinstance(linear, nn.Module) and "weight" in _plain(linear) and "bias" not in linear


def _is_swiglu_mlp(module: Any) -> bool:
    """Whether the module's own forward, on small weights, is down(silu(gate(x)) * up(x))."""
    with mx.stream(mx.cpu):
        twin = shallow_copy(module, own_class(module))
        weights = []
        for seed, child in enumerate(SHARED_CHILDREN):
            linear = nn.Linear(WIDTH, WIDTH, bias=False)
            weight = mx.random.normal((WIDTH, WIDTH), key=mx.random.key(seed)) / WIDTH**0.5
            linear["weight"] = weight
            twin[child] = linear
            weights.append(weight.T)
        x = 4 * mx.random.normal((2, WIDTH), key=mx.random.key(3))
        gate, up, down = weights
        expected = ((x @ gate) * mx.sigmoid(x @ gate) * (x @ up)) @ down
        try:
            found = twin(x)
            return found.shape == expected.shape and bool(mx.allclose(found, expected, 1e-3, 1e-3))
        except Exception:  # other arguments, other children: not one that we know
            return False
