"""Activations are known by what they compute: every family's, and those that only look like it."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from families import FAMILIES, Family, build, switches
from mlx_lm.models.activations import SwigluOAI, XieLU
from switch_reference import WIDTH, glu, mlp

from mlx_moe import replace_moe_layers
from mlx_moe.activations import GATED, SINGLE, Activation, recognise
from mlx_moe.errors import UnsupportedLayer
from mlx_moe.find import switch_kind

# What each family's layers compute, as read in its file; the rest of them SwiGLU.
NOT_SWIGLU = {
    "deepseek_v41": "swiglu_clamped_inputs",
    "gemma4_text": "geglu_tanh",
    "gpt_oss": "swiglu_oai",
    "kimi_k3": "situ",
    "minimax_m3_vl": "swiglu_oai",
    "nemotron_h": "relu2",
    "phixtral": "gelu_tanh",
    "step3p5": "swiglu_clamped",
}


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_family_is_recognised_and_computes_that(family: Family) -> None:
    model = build(family)
    found = []
    for name, module in switches(model):
        kind = switch_kind(module)
        assert kind is not None
        activation = recognise(module, kind, name)
        found.append(activation.name)
        inputs = [5 * mx.random.normal((300,)) for _ in range(2 if kind == "glu" else 1)]
        stock = module.activation(*inputs[::-1])  # (up, gate)
        ours = activation(*[np.array(x) for x in inputs])
        np.testing.assert_allclose(np.array(stock), ours, rtol=1e-4, atol=1e-5)
    assert NOT_SWIGLU.get(family.name, "swiglu") in found
    assert set(found) <= {NOT_SWIGLU.get(family.name, "swiglu"), "swiglu"}


@pytest.mark.parametrize(
    "activation, name",
    [
        (nn.GELU(), "gelu_erf"),
        (nn.GELU("precise"), "gelu_tanh"),
        (nn.GELU("fast"), "gelu_sigmoid"),
        (nn.ReLU(), "relu"),
        (nn.ReLU2(), "relu2"),
        (nn.silu, "silu"),
    ],
)
def test_functions_of_one_input(activation: Any, name: str) -> None:
    assert recognise(mlp(activation=activation), "mlp", "layer") == Activation(name)


@pytest.mark.parametrize(
    "function, name",
    [
        (nn.gelu, "geglu_erf"),
        (nn.gelu_approx, "geglu_tanh"),
        (nn.relu, "reglu"),
        (nn.silu, "swiglu"),
    ],
)
def test_gated_functions_of_any_class(function: Any, name: str) -> None:
    module = glu(activation=lambda up, gate: function(gate) * up)
    assert recognise(module, "glu", "layer") == Activation(name)


def test_parameters_are_read_and_a_far_limit_is_still_a_limit() -> None:
    for limit in (0.5, 7.0, 500.0):
        module = glu(activation=SwigluOAI(alpha=1.3, limit=limit))
        expected = Activation("swiglu_oai", {"alpha": 1.3, "limit": limit})
        assert recognise(module, "glu", "layer") == expected


def test_a_replaced_layer_is_recognised() -> None:
    block = nn.Sequential(glu())
    block.eval()
    replace_moe_layers(block)
    assert recognise(block.layers[0], "glu", "layer").name == "swiglu"


class SwiGLU(nn.Module):
    """The name of another function."""

    def __call__(self, up: mx.array, gate: mx.array) -> mx.array:
        return nn.silu(gate) * up + 1e-3


@pytest.mark.parametrize(
    "module, kind, name",
    [
        (lambda: glu(activation=SwiGLU()), "glu", "SwiGLU"),
        (lambda: glu(activation=lambda up, gate: nn.silu(up) * gate), "glu", "function"),
        (lambda: mlp(activation=XieLU()), "mlp", "XieLU"),
        (lambda: mlp(activation=nn.Tanh()), "mlp", "Tanh"),
    ],
)
def test_others_are_refused_by_name(module: Any, kind: str, name: str) -> None:
    with pytest.raises(UnsupportedLayer, match=f"a.layer: the activation {name} is none of"):
        recognise(module(), kind, "a.layer")


def test_a_shared_experts_activation_is_found_in_its_forward() -> None:
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for key in ("gate_proj", "up_proj", "down_proj"):
                self[key] = nn.Linear(WIDTH, WIDTH, False)

        def __call__(self, x: mx.array) -> mx.array:
            return self.down_proj(nn.gelu(self.gate_proj(x)) * self.up_proj(x))

    assert recognise(MLP(), "glu", "shared").name == "geglu_erf"


def test_names_are_unique() -> None:
    assert not GATED.keys() & SINGLE.keys()
