"""Calls too small to gain from a kernel are left to stock code, and counted."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchGLU
from switch_reference import calls_since

from mlx_moe import attention, core, dense, layers, replace_linear_layers, replace_moe_layers

WIDTH, HIDDEN, TOP_K = 64, 96, 2
TOKEN = TOP_K * 3 * WIDTH * HIDDEN  # multiplications of one token


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = SwitchGLU(WIDTH, HIDDEN, 4)

    def __call__(self, x: mx.array) -> mx.array:
        return self.experts(x, mx.zeros((*x.shape[:-1], TOP_K), mx.uint32))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH)

    def __call__(self, x: mx.array) -> mx.array:
        q = x[None, None]
        return mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0)


def prepare(model: nn.Module, dtype: mx.Dtype, quantised: bool) -> nn.Module:
    model.set_dtype(dtype)
    if quantised:
        nn.quantize(model, 32, 4)
    model.eval()
    mx.eval(model.parameters())
    return model


def counts(stats: dict) -> tuple[int, int, dict]:
    return stats["calls"], stats["small"], stats["fallbacks"]


@pytest.mark.parametrize(
    ("dtype", "quantised", "limit"),
    [
        (mx.float32, False, "SMALLEST"),
        (mx.float32, True, "SMALLEST_QUANTISED"),
        (mx.bfloat16, True, "SMALLEST_PACKED"),
    ],
)
def test_experts(
    dtype: mx.Dtype, quantised: bool, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepare(Experts(), dtype, quantised)
    x = mx.random.normal((3, WIDTH)).astype(dtype)
    expected = model(x)
    mx.eval(expected)
    replacement = replace_moe_layers(model)
    before = core.calls()
    monkeypatch.setattr(layers, limit, 3 * TOKEN + 1)
    assert mx.array_equal(model(x), expected)
    assert calls_since(before) == {}
    assert counts(replacement.stats()["experts"]) == (1, 1, {})
    monkeypatch.setattr(layers, limit, 3 * TOKEN)
    mx.eval(model(x))
    assert calls_since(before) == {"swiglu": 1}
    assert counts(replacement.stats()["experts"]) == (2, 1, {})


def half(model: nn.Module) -> None:
    model.set_dtype(mx.bfloat16)


def global_scales(model: nn.Module) -> None:
    nn.quantize(model, 16, 4, mode="nvfp4")
    for name in ("gate_proj", "up_proj", "down_proj"):
        model.experts[name].global_scale = mx.ones(4)


@pytest.mark.parametrize("change", [half, global_scales])
def test_experts_that_stock_cannot_run_are_never_small(
    change: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("SMALLEST", "SMALLEST_PACKED"):
        monkeypatch.setattr(layers, limit, 1 << 60)
    model = Experts()
    change(model)
    model.eval()
    replacement = replace_moe_layers(model)
    mx.eval(model(mx.ones((1, WIDTH), mx.bfloat16)))
    assert counts(replacement.stats()["experts"]) == (1, 0, {})


@pytest.mark.parametrize(
    ("dtype", "limit"), [(mx.float32, "SMALLEST"), (mx.bfloat16, "SMALLEST_PACKED")]
)
def test_a_dense_layer(dtype: mx.Dtype, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare(nn.Sequential(nn.Linear(WIDTH, HIDDEN)), dtype, True)
    x = mx.random.normal((3, WIDTH)).astype(dtype)
    replacement = replace_linear_layers(model)
    before = core.calls()
    for smallest in (3 * WIDTH * HIDDEN + 1, 3 * WIDTH * HIDDEN):
        monkeypatch.setattr(dense, limit, smallest)
        mx.eval(model(x))
    assert calls_since(before) == {"linear": 1}
    assert counts(replacement.stats()["layers.0"]) == (2, 1, {})


def test_the_attention_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare(Attention(), mx.float32, False)
    replacement = replace_linear_layers(model)
    for smallest in (5 * 5 * WIDTH + 1, 5 * 5 * WIDTH):
        monkeypatch.setattr(attention, "SMALLEST", smallest)
        mx.eval(model(mx.random.normal((5, WIDTH))))
    stats = replacement.stats()[attention.NAME]
    assert counts(stats) == (2, 1, {}) and stats["kernel_calls"] == 2
