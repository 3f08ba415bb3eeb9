"""The attention product on the kernels against stock MLX in float32."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_moe
from mlx_moe import attention, core


class Attend(nn.Module):
    """The smallest model with attention: a linear layer and the product."""

    def __init__(self, **options):
        super().__init__()
        self.o_proj = nn.Linear(64, 64)
        self.options = options

    def __call__(self, q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, **self.options)


def arrays(queries, keys, heads=6, shared=2, batch=2, width=48, dtype=mx.float32):
    shapes = ((batch, heads, queries, width), *[(batch, shared, keys, width)] * 2)
    return [mx.random.normal(s).astype(dtype) for s in shapes]


def masks(batch, heads, queries, keys):
    return {
        "none": None,
        "causal": "causal",
        "bool": mx.random.uniform(shape=(batch, 1, queries, keys)) < 0.7,
        "additive": mx.random.normal((queries, keys)),
        "row": mx.random.normal((batch, heads, 1, keys)),
    }


def replaced(model):
    model.eval()
    mlx_moe.replace_linear_layers(model, backend="cpu")
    return model


def counters(model):
    """What the attention product of a replaced model has done."""
    return model._moe_attention.counters.as_dict()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 4096)  # several blocks of queries
    mx.random.seed(1)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "additive", "row"])
@pytest.mark.parametrize("queries, keys", [(1, 70), (37, 37), (20, 53)])
def test_equals_stock(queries, keys, kind, sinks):
    mask = masks(2, 6, queries, keys)[kind]
    options = {"mask": mask, "sinks": mx.random.normal((6,)) if sinks else None}
    inputs = arrays(queries, keys)
    want = Attend(**options)(*inputs)
    model = replaced(Attend(**options))
    before = core.calls().get("grouped", 0)
    got = model(*inputs)
    kernels = core.calls()["grouped"] - before
    assert kernels >= 2 and kernels % 2 == 0
    assert counters(model) == {
        "calls": 1,
        "tokens": 2 * queries,
        "kernel_calls": kernels,
        "small": 0,
        "fallbacks": {},
    }
    assert mx.allclose(got, want, 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision(dtype):
    inputs = arrays(40, 40, dtype=dtype)
    want = Attend(mask="causal")(*[a.astype(mx.float32) for a in inputs])
    got = replaced(Attend(mask="causal"))(*inputs)
    stock = Attend(mask="causal")(*inputs)

    def error(y):
        d = np.array((y.astype(mx.float32) - want), dtype=np.float64)
        return np.linalg.norm(d) / np.linalg.norm(np.array(want, dtype=np.float64))

    assert got.dtype == dtype
    assert error(got) <= 1.5 * error(stock)


def test_keys_in_a_larger_buffer():
    """As a KV cache hands them over: slices of what was allocated ahead."""
    q, k, v = arrays(3, 30)
    room = mx.zeros((2, 2, 64, 48))
    long_k, long_v = room + 0, room + 0
    long_k[:, :, :30], long_v[:, :, :30] = k, v
    want = Attend(mask="causal")(q, k, v)
    got = replaced(Attend(mask="causal"))(q, long_k[:, :, :30], long_v[:, :, :30])
    assert mx.allclose(got, want, 1e-5, 1e-5)


def test_only_inside_the_model_and_until_restored():
    inputs = arrays(8, 8)
    model = replaced(Attend())
    before = core.calls().get("grouped", 0)
    Attend()(*inputs)
    assert core.calls().get("grouped", 0) == before
    stock = Attend()(*inputs)
    mlx_moe.restore_linear_layers(model)
    assert type(model) is Attend
    assert mx.array_equal(model(*inputs), stock)
    assert core.calls().get("grouped", 0) == before


def test_gradients_are_stocks():
    inputs = arrays(12, 12)

    def loss(model):
        return mx.grad(lambda q, k, v: (model(q, k, v) ** 2).sum(), argnums=(0, 1, 2))(*inputs)

    model = replaced(Attend(mask="causal"))
    for got, want in zip(loss(model), loss(Attend(mask="causal")), strict=True):
        assert mx.abs(want).max() > 0.1
        assert mx.allclose(got, want, 1e-4, 1e-4)
    assert counters(model)["kernel_calls"] >= 2 and counters(model)["fallbacks"] == {}


def test_compiled_callers_get_stock():
    inputs = arrays(8, 8)
    model = replaced(Attend())
    got = mx.compile(lambda *a: model(*a))(*inputs)
    assert mx.allclose(got, Attend()(*inputs), 1e-6, 1e-6)
    assert counters(model)["fallbacks"] == {"tracing": 1}


def test_training_runs_stock():
    inputs = arrays(8, 8)
    model = replaced(Attend()).train()
    before = core.calls()
    assert mx.array_equal(model(*inputs), Attend()(*inputs))
    assert core.calls() == before


def test_another_wrapper_around_ours_stays(monkeypatch):
    replaced(Attend())
    ours, seen = mx.fast.scaled_dot_product_attention, []

    def wrapper(*args, **kwargs):
        seen.append(args)
        return ours(*args, **kwargs)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", wrapper)
    model = replaced(Attend())
    model(*arrays(8, 8))
    assert len(seen) == 1 and counters(model)["calls"] == 1


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.0},
        {"scale": -0.1},
        {"mask": "causal", "queries": 12, "keys": 5},  # the first queries see nothing
        {"mask": "bogus"},
        {"mask": mx.zeros((1, 1, 1, 8, 8))},
        {"mask": mx.zeros((8, 8)), "dtype": mx.bfloat16},
    ],
)
def test_unusual_calls_are_stocks(options):
    options = {"queries": 8, "keys": 8, "dtype": mx.float32, "scale": 0.2, **options}
    inputs = arrays(options.pop("queries"), options.pop("keys"), dtype=options.pop("dtype"))

    class Call(nn.Module):
        def __init__(self):
            super().__init__()
            self.o_proj = nn.Linear(64, 64)

        def __call__(self):
            y = mx.fast.scaled_dot_product_attention(*inputs, **options)
            mx.eval(y)
            return y

    def outcome(model):
        try:
            return model()
        except ValueError as error:
            return str(error)

    want, got = outcome(Call()), outcome(replaced(Call()))
    if isinstance(want, str):
        assert got == want
    else:
        assert mx.array_equal(got, want, equal_nan=True)


@pytest.mark.parametrize("shared, batch", [(1, 1), (1, 2), (6, 1)])
def test_any_number_of_shared_heads(shared, batch):
    inputs = arrays(9, 9, shared=shared, batch=batch)
    want = Attend(mask="causal")(*inputs)
    assert mx.allclose(replaced(Attend(mask="causal"))(*inputs), want, 1e-5, 1e-5)


def test_padding_rows_are_finite():
    """The first queries of a left-padded sequence see no key at all."""
    mask = mx.tri(10, dtype=mx.bool_) & (mx.arange(10) >= 4)
    inputs = arrays(10, 10)
    want = Attend(mask=mask)(*inputs)
    got = replaced(Attend(mask=mask))(*inputs)
    assert not mx.isnan(want).any()
    assert mx.allclose(got, want, 1e-5, 1e-5)


def test_forward_derivatives_are_stocks():
    q, k, v = arrays(12, 12)
    tangent = mx.random.normal(q.shape)

    def derivative(model):
        return mx.jvp(lambda q: model(q, k, v), [q], [tangent])[1][0]

    assert mx.allclose(derivative(replaced(Attend())), derivative(Attend()), 1e-4, 1e-4)


def test_restored_under_a_model_that_was_replaced_later():
    inner = Attend()
    outer = nn.Sequential(inner)
    outer.eval()
    mlx_moe.replace_linear_layers(inner, backend="cpu")
    mlx_moe.replace_linear_layers(outer, backend="cpu")
    mlx_moe.restore_linear_layers(outer)
    assert type(inner) is Attend and type(outer) is nn.Sequential
    assert type(inner.o_proj) is nn.Linear
