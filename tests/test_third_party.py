"""Expert layers that know nothing of mlx-lm are found, and replaced, by their shape."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from foreign_experts import (
    Block,
    DoublingExperts,
    GatedExperts,
    SwiGLU,
    TanhGLU,
    TwoMatrixExperts,
)

from mlx_moe import UnsupportedLayer, core, replace_moe_layers

DIMS, HIDDEN, EXPERTS = 64, 96, 6

CASES = {
    "swiglu": (lambda: GatedExperts(DIMS, HIDDEN, EXPERTS, SwiGLU()), {"swiglu": 1}),
    "swiglu, bias": (lambda: GatedExperts(DIMS, HIDDEN, EXPERTS, SwiGLU(), True), {"grouped": 3}),
    "tanh": (lambda: GatedExperts(DIMS, HIDDEN, EXPERTS, TanhGLU()), {"grouped": 3}),
    "two matrices": (lambda: TwoMatrixExperts(DIMS, HIDDEN, EXPERTS, nn.gelu), {"grouped": 2}),
    "relu, bias": (
        lambda: TwoMatrixExperts(DIMS, HIDDEN, EXPERTS, nn.relu, True),
        {"grouped": 2},
    ),
}


def _calls_since(before: dict[str, int]) -> dict[str, int]:
    now = core.calls()
    names = ("swiglu", "swiglu_combine", "grouped")
    delta = {n: now.get(n, 0) - before.get(n, 0) for n in names}
    return {n: d for n, d in delta.items() if d}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (40,)], ids=str)
def test_replaced_by_shape(case: str, shape: tuple[int, ...]) -> None:
    make, expected = CASES[case]
    model = Block(make(), DIMS, EXPERTS).eval()
    mx.eval(model.parameters())
    x = mx.random.normal((*shape, DIMS))
    stock = model(x)
    mx.eval(stock)
    kind = type(model.experts)

    replacement = replace_moe_layers(model, backend="cpu")
    assert [(r.name, r.experts, r.top_k, r.backend) for r in replacement.layers] == [
        ("experts", EXPERTS, 2, "cpu")
    ]
    before = core.calls()
    got = model(x)
    mx.eval(got)
    assert mx.linalg.norm(got - stock).item() < 1e-5 * mx.linalg.norm(stock).item()
    assert _calls_since(before) == expected
    assert replacement.stats()["experts"]["fallbacks"] == {}
    assert isinstance(model.experts, kind)

    replacement.restore()
    assert type(model.experts) is kind
    assert mx.array_equal(model(x), stock)


def test_another_computation_is_refused_and_left_alone() -> None:
    model = Block(DoublingExperts(DIMS, HIDDEN, EXPERTS, SwiGLU()), DIMS, EXPERTS).eval()
    x = mx.random.normal((3, DIMS))
    stock = model(x)
    with pytest.raises(UnsupportedLayer, match="experts: DoublingExperts"):
        replace_moe_layers(model, backend="cpu")
    assert type(model.experts) is DoublingExperts

    replacement = replace_moe_layers(model, backend="cpu", strict=False)
    assert [r.backend for r in replacement.layers] == ["stock"]
    assert mx.array_equal(model(x), stock)


def test_one_refused_layer_leaves_all_layers_stock() -> None:
    good = Block(GatedExperts(DIMS, HIDDEN, EXPERTS, SwiGLU()), DIMS, EXPERTS)
    bad = Block(DoublingExperts(DIMS, HIDDEN, EXPERTS, SwiGLU()), DIMS, EXPERTS)
    model = nn.Sequential(good, bad)
    with pytest.raises(UnsupportedLayer):
        replace_moe_layers(model, backend="cpu")
    assert type(good.experts) is GatedExperts
