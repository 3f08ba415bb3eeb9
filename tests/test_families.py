"""Every mlx-lm MoE family, stock against replaced: values, kernel calls, caches, restore."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from exact_experts import with_exact_experts
from families import FAMILIES, VOCAB, Family, build, quantize, switches
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from mlx_moe import core, replace_moe_layers

KERNELS = ("swiglu", "swiglu_combine", "grouped")
NATIVE = tuple(f for f in FAMILIES if f.native)
HALF_SAMPLE = tuple(f for f in FAMILIES if f.name in ("gpt_oss", "phixtral", "qwen3_moe"))
BATCHING = tuple(f for f in FAMILIES if f.batches)

# Relative Frobenius errors. float32: logits, another order of summation. Half precision: of one
# block, whose inputs, hidden values and results are rounded to 8 bits (bfloat16) or 11 (float16);
# and of the typical token's logits, after everything behind the block has rounded, too.
FLOAT32_ERROR = 1e-5
BLOCK_ERROR = {mx.bfloat16: 7e-3, mx.float16: 9e-4}
LOGITS_ERROR = {mx.bfloat16: 3e-2, mx.float16: 4e-3}


def _tokens(batch: int, length: int) -> mx.array:
    return (mx.arange(batch * length) * 37 + 11).reshape(batch, length) % VOCAB


def _forwards(model: nn.Module, length: int = 12) -> dict[str, mx.array]:
    """Evaluated logits of one prompt, of three at once, and of a prompt read in chunks."""
    out = {"one": model(_tokens(1, length)), "three": model(_tokens(3, length // 2))}
    cache = make_prompt_cache(model)
    tokens = _tokens(1, length)
    out["chunk"] = model(tokens[:, :5], cache=cache)
    mx.eval(out)
    out["rest"] = model(tokens[:, 5:-1], cache=cache)
    mx.eval(out)
    out["decode"] = model(tokens[:, -1:], cache=cache)
    mx.eval(out)
    return out


FORWARDS = 5
TOKENS = 2 * 12 + 3 * 6  # what _forwards shows every MoE layer


def _error(got: mx.array, want: mx.array) -> float:
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    return (mx.linalg.norm((got - want).flatten()) / mx.linalg.norm(want.flatten())).item()


def _worst(got: dict[str, mx.array], want: dict[str, mx.array]) -> float:
    return max(_error(got[name], want[name]) for name in want)


def _typical(got: dict[str, mx.array], want: dict[str, mx.array]) -> float:
    """The median over all tokens of the relative error of their logits."""
    errors = [
        mx.linalg.norm((got[n] - want[n]).astype(mx.float32), axis=-1).flatten()
        / mx.linalg.norm(want[n].astype(mx.float32), axis=-1).flatten()
        for n in want
    ]
    return mx.median(mx.concatenate(errors)).item()


def _kernel_calls(before: dict[str, int]) -> dict[str, int]:
    now = core.calls()
    delta = {name: now.get(name, 0) - before.get(name, 0) for name in KERNELS}
    return {name: n for name, n in delta.items() if n}


def _expected(family: Family, forwards: int) -> dict[str, int]:
    return {name: n * forwards for name, n in family.calls.items()}


def _assert_all_kernels(family: Family, replacement, before: dict[str, int]) -> None:
    assert _kernel_calls(before) == _expected(family, FORWARDS)
    stats = replacement.stats()
    assert len(stats) == family.layers
    assert all(not s["fallbacks"] for s in stats.values()), stats
    assert [s["calls"] for s in stats.values()] == [FORWARDS] * family.layers
    total = sum(s["kernel_calls"] for s in stats.values())
    assert total == FORWARDS * sum(family.calls.values())


def test_the_table_names_every_model_file_with_a_switch_module() -> None:
    directory = Path(mlx_lm.models.__file__).parent
    files = {
        p.stem
        for p in directory.glob("*.py")
        if p.stem != "switch_layers"
        and any(f"= {kind}(" in p.read_text() for kind in ("SwitchGLU", "SwitchMLP"))
    }
    assert {f.name for f in FAMILIES} == files and len(files) >= 34


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_table_is_right_about_stock(family: Family) -> None:
    model = build(family)
    found = [m for _, m in switches(model)]
    assert len(found) == family.layers
    assert {m["fc1" if "fc1" in m else "gate_proj"].num_experts for m in found} == {8}
    logits = _forwards(model)
    assert 0.2 < logits["one"].std().item() < 2.0
    chunks = mx.concatenate([logits[n] for n in ("chunk", "rest", "decode")], axis=1)
    assert _error(chunks, logits["one"]) < FLOAT32_ERROR


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_float32(family: Family) -> None:
    model = build(family)
    kinds = [type(m) for _, m in switches(model)]
    stock = _forwards(model)
    before = core.calls()
    replacement = replace_moe_layers(model, backend="cpu")
    got = _forwards(model)
    assert _worst(got, stock) < FLOAT32_ERROR
    _assert_all_kernels(family, replacement, before)
    assert {s["tokens"] for s in replacement.stats().values()} == {TOKENS}

    replacement.restore()
    assert [type(m) for _, m in switches(model)] == kinds
    again = _forwards(model)
    assert all(mx.array_equal(again[name], stock[name]) for name in stock)


BIASES = {
    "bailing_hybrid": "use_bias",
    "bailing_moe": "use_bias",
    "bailing_moe_linear": "use_bias",
    "ernie4_5_moe": "use_bias",
    "olmoe": "mlp_bias",
}


@pytest.mark.parametrize("name", [f.name for f in FAMILIES if f.name in BIASES])
def test_biases(name: str) -> None:
    """SwiGLU experts with biases, which these families have by choice: three grouped products."""
    (family,) = (f for f in FAMILIES if f.name == name)
    config = {**family.config, BIASES[name]: True}
    biased = replace(family, config=config, calls={"grouped": 3 * family.layers})
    model = build(biased)
    assert all("bias" in m.gate_proj for _, m in switches(model))
    stock = _forwards(model)
    before = core.calls()
    replacement = replace_moe_layers(model, backend="cpu")
    assert _worst(_forwards(model), stock) < FLOAT32_ERROR
    _assert_all_kernels(biased, replacement, before)


def _recorded(model: nn.Module) -> dict[str, list[tuple[tuple, mx.array]]]:
    """Arguments and results of every block that calls a switch module, from now on, by path."""
    records: dict[str, list[tuple[tuple, mx.array]]] = {}
    modules = dict(model.named_modules())
    for path in (name.rpartition(".")[0] for name, _ in switches(model)):
        block, calls = modules[path], records.setdefault(path, [])
        kind = type(block)

        def call(self, *args, kind=kind, calls=calls):
            calls.append((args, kind.__call__(self, *args)))
            return calls[-1][1]

        block.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return records


def _block_error(model: nn.Module, exact: nn.Module, inputs: dict[str, list[tuple]]) -> float:
    """Error of the worst block of `model` over all the recorded inputs of that block; inf where
    MLX cannot run it."""
    blocks, references = dict(model.named_modules()), dict(exact.named_modules())
    worst = 0.0
    for path, calls in inputs.items():
        got = [blocks[path](*args) for args in calls]
        want = [references[path](*args) for args in calls]
        try:
            mx.eval(got, want)
        except (ValueError, RuntimeError):  # half or global-scale experts on a CPU
            return float("inf")
        assert [a.dtype for a in got] == [a.dtype for a in want]
        worst = max(worst, _error(_flat(got), _flat(want)))
    return worst


def _flat(arrays: list[mx.array]) -> mx.array:
    return mx.concatenate([a.flatten() for a in arrays])


def _check_half(family: Family, dtype: mx.Dtype, quantization: dict | None) -> None:
    """Replaced against the same model with float32 experts, block by block on the same inputs
    (so that no rounding elsewhere flips a route), and on the logits of the typical token."""

    def fresh() -> nn.Module:
        model = build(family, dtype)
        return quantize(model, **quantization) if quantization else model

    exact, stock, model = with_exact_experts(fresh()), fresh(), fresh()
    before = core.calls()
    replacement = replace_moe_layers(model, backend="cpu")
    records = _recorded(model)
    got = _forwards(model)
    _assert_all_kernels(family, replacement, before)

    inputs = {path: [args for args, _ in calls] for path, calls in records.items()}
    ours, theirs = _block_error(model, exact, inputs), _block_error(stock, exact, inputs)
    assert ours < min(BLOCK_ERROR[dtype] * family.rounding, 1.5 * theirs)
    want = _forwards(exact)
    assert {name: a.dtype for name, a in got.items()} == {n: a.dtype for n, a in want.items()}
    assert _typical(got, want) < LOGITS_ERROR[dtype]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_bfloat16(family: Family) -> None:
    _check_half(family, mx.bfloat16, None)


@pytest.mark.parametrize("family", HALF_SAMPLE, ids=str)
def test_float16(family: Family) -> None:
    _check_half(family, mx.float16, None)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_four_bits(family: Family) -> None:
    _check_half(family, mx.bfloat16, {"group_size": 64, "bits": 4})


@pytest.mark.parametrize("family", NATIVE, ids=str)
def test_native_format(family: Family) -> None:
    _check_half(family, mx.bfloat16, family.native)


def _generated(model: nn.Module) -> tuple[dict[int, list[int]], list[mx.array]]:
    """Greedy tokens and log-probabilities of three prompts of different lengths, right-padded
    while they are read and left-padded after, in chunks of four, as mlx-lm's server does."""
    generator = BatchGenerator(model, max_tokens=3, prefill_step_size=4)
    generator.insert([[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4]])
    tokens: dict[int, list[int]] = {}
    logprobs: dict[tuple[int, int], mx.array] = {}
    while len(logprobs) < 9:
        for r in generator.next()[1]:
            tokens.setdefault(r.uid, []).append(r.token)
            logprobs[r.uid, len(tokens[r.uid])] = r.logprobs
    generator.close()
    return tokens, [logprobs[key] for key in sorted(logprobs)]


@pytest.mark.parametrize("family", BATCHING, ids=str)
def test_padded_batches(family: Family) -> None:
    model = build(family)
    tokens, logprobs = _generated(model)
    replacement = replace_moe_layers(model, backend="cpu")
    got_tokens, got_logprobs = _generated(model)
    assert got_tokens == tokens
    assert _error(mx.stack(got_logprobs), mx.stack(logprobs)) < FLOAT32_ERROR
    assert all(not s["fallbacks"] for s in replacement.stats().values())


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_plain_results(family: Family) -> None:
    """The module called for its own sake, as a block that does not combine would."""
    model = build(family)
    modules = [m for _, m in switches(model)]
    width = modules[0]["fc1" if "fc1" in modules[0] else "gate_proj"].input_dims
    x = mx.random.normal((2, 5, width))
    indices = mx.argsort(mx.random.uniform(shape=(2, 5, 8)), axis=-1)[..., : family.top_k]
    stock = [m(x, indices) for m in modules]
    mx.eval(stock)
    replace_moe_layers(model, backend="cpu")
    before = core.calls()
    got = [m(x, indices) + 0 for m in modules]
    mx.eval(got)
    for one, want in zip(got, stock, strict=True):
        assert isinstance(one, mx.array)
        assert one.shape == (2, 5, family.top_k, width)
        assert _error(one, want) < FLOAT32_ERROR
    plain = Counter(_expected(family, 1))
    plain["swiglu"] += plain.pop("swiglu_combine", 0)
    assert _kernel_calls(before) == dict(+plain)
