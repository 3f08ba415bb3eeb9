"""The trained example model with most assignments on static programs says the same."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import stream_generate
from static_models import TIERS, groups_of, host, plan_of

from mlx_moe import Replacement, calibrate, replace_linear_layers, replace_moe_layers
from mlx_moe.plan import Plan

DATA = Path(__file__).parent.parent / "examples" / "data"
LAYERS, INNER, GROUP = 6, 64, 8
CHUNK = 256


@pytest.fixture(scope="module")
def model(tiny_model_path: Path) -> nn.Module:
    """The example with f32 activations; its dense layers, no part of the tests, on the kernels."""
    model, _ = mlx_lm.load(str(tiny_model_path))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    replace_linear_layers(model)
    return model


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: Path):
    return mlx_lm.load(str(tiny_model_path), lazy=True)[1]


def texts() -> list[str]:
    """20 texts of every kind that there is."""
    files = sorted(DATA.glob("*.text.jsonl"))
    lines = [path.read_text().splitlines() for path in files]
    return [json.loads(lines[i % len(files)][i // len(files)])["text"] for i in range(20)]


@pytest.fixture(scope="module")
def tokens(tokenizer) -> mx.array:
    return mx.array(tokenizer.encode("\n".join(texts())))[None, : 4 * CHUNK]


@pytest.fixture(scope="module")
def loads(model, tokens) -> np.ndarray:
    """Mean assignments of each expert [layers, experts] in a chunk."""
    replaced = replace_moe_layers(model)
    found = calibrate(model, [tokens[0].tolist()], chunk=CHUNK)
    replaced.restore()
    return np.stack([found.loads(layer).mean(axis=0) for layer in range(LAYERS)])


@pytest.fixture(scope="module")
def plan(model, loads) -> Plan:
    """24 of 32 experts hot, the fullest in the largest tier."""
    groups = {}
    for layer in range(LAYERS):
        order = np.argsort(-loads[layer])[:24].reshape(-1, GROUP)
        name = f"model.layers.{layer}.mlp.switch_mlp"
        groups[name] = groups_of(f"l{layer}", order.tolist(), (64, 64, 32), INNER)
    return plan_of(model, groups, tiers=TIERS)


def relative(got: mx.array, want: mx.array) -> float:
    return (mx.linalg.norm(got - want) / mx.linalg.norm(want)).item()


def check_hot(replacement: Replacement) -> None:
    """A run in which little was hot shows nothing."""
    counts = [stats["static"] for stats in replacement.stats().values()]
    hot = sum(c["hot"] for c in counts)
    others = sum(c["cold"] + c["spilled"] for c in counts)
    assert len(counts) == LAYERS
    assert hot > others, f"{hot} assignments hot, {others} not"
    assert not sum(c["recomputed_tiles"] + c["failed_tiles"] + c["pruned"] for c in counts)


def test_a_run_without_hot_experts_fails_its_check(model, plan, tmp_path, tokens) -> None:
    replacement = host(model, plan, tmp_path)
    with pytest.raises(AssertionError, match="0 assignments hot"):
        check_hot(replacement)
    for module in model.modules():
        if "_moe_layer" in module.__dict__:
            module._moe_layer.static.layer.most[:] = 0
    model(tokens[:, :64])
    with pytest.raises(AssertionError, match="^0 assignments hot, 1536 not"):
        check_hot(replacement)
    replacement.restore()


def test_logits_of_spilling_are_those_of_the_cold_path(model, plan, tmp_path, tokens) -> None:
    replacement = replace_moe_layers(model)
    want = [model(tokens[:, i : i + CHUNK]) for i in range(0, 4 * CHUNK, CHUNK)]
    mx.eval(want)
    replacement.restore()
    replacement = host(model, plan, tmp_path)
    got = [model(tokens[:, i : i + CHUNK]) for i in range(0, 4 * CHUNK, CHUNK)]
    mx.eval(got)
    check_hot(replacement)
    replacement.restore()
    assert all(relative(g, w) <= 2e-3 for g, w in zip(got, want, strict=True))
    assert any(relative(g, w) > 1e-6 for g, w in zip(got, want, strict=True))


def test_greedy_texts_are_the_same_where_the_choice_is_clear(
    model, plan, tmp_path, tokenizer
) -> None:
    cold = replace_moe_layers(model)
    prompts = [tokenizer.encode(text)[:40] for text in texts()]
    runs = []
    for prompt in prompts:
        answer = [r.token for r in stream_generate(model, tokenizer, prompt, max_tokens=24)]
        logits = model(mx.array(prompt + answer)[None])[0]
        mx.eval(logits)
        runs.append((prompt + answer, logits[len(prompt) - 1 : -1], answer))
    cold.restore()
    replacement = host(model, plan, tmp_path)
    steps = 0
    for sequence, want, answer in runs:
        got = model(mx.array(sequence)[None])[0][-len(answer) - 1 : -1]
        top = mx.sort(want, axis=-1)[:, -2:]
        margins = np.array(top[:, 1] - top[:, 0])
        errors = np.array(mx.abs(got - want).max(axis=-1))
        chosen = np.array(got.argmax(axis=-1))
        for step, token in enumerate(answer):
            if margins[step] < 2 * errors[step]:
                break
            assert chosen[step] == token
            steps += 1
    check_hot(replacement)
    replacement.restore()
    assert steps > 300, "hardly any choice was clear"


def test_restored_logits_are_bit_equal(model, plan, tmp_path, tokens) -> None:
    part = tokens[:, :32]
    replace_moe_layers(model).restore()
    want = model(part)
    mx.eval(want)
    replacement = host(model, plan, tmp_path)
    model(part)
    replacement.restore()
    assert mx.array_equal(model(part), want)
