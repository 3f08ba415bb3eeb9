"""The trained example model in float32 says the same; gradients and adapters are as stock's."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import pytest
from families import FAMILIES, build
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import stream_generate
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from mlx_moe import core, replace_linear_layers, replace_moe_layers

# Before 0.32, routers let gradients reach their argsort, which MLX refuses.
needs_gradients = pytest.mark.skipif(
    tuple(map(int, version("mlx-lm").split(".")[:2])) < (0, 32),
    reason="stock mlx-lm 0.31 cannot differentiate its routers with this MLX",
)
PROMPT = "Once upon a time there was"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
LORA = {
    "rank": 4,
    "scale": 4.0,
    "dropout": 0.0,
    "keys": [f"mlp.switch_mlp.{name}" for name in PROJECTIONS],
}
TOKENS = (mx.arange(2 * 12) * 131 + 7).reshape(2, 12) % 2048


@pytest.fixture
def fresh(tiny_model_path: Path) -> Callable[[], nn.Module]:
    """Loads the example anew, its 4-bit weights with float32 scales and all else in float32."""

    def load() -> nn.Module:
        model, _ = mlx_lm.load(str(tiny_model_path))
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
        return model

    return load


@pytest.fixture
def tokenizer(tiny_model_path: Path):
    return mlx_lm.load(str(tiny_model_path), lazy=True)[1]


def _text(model: nn.Module, tokenizer, **options) -> tuple[str, int]:
    """Greedy text of 48 tokens, and how many of them came from a draft model."""
    responses = list(stream_generate(model, tokenizer, PROMPT, max_tokens=48, **options))
    return "".join(r.text for r in responses), sum(r.from_draft for r in responses)


def _no_fallbacks(replacement) -> bool:
    return not any(s["fallbacks"] for s in replacement.stats().values())


def _relative(got: mx.array, want: mx.array) -> float:
    return (mx.linalg.norm((got - want).flatten()) / mx.linalg.norm(want.flatten())).item()


@pytest.mark.parametrize("dense", [False, True], ids=["experts", "experts and dense layers"])
def test_greedy_text_is_the_same(fresh, tokenizer, dense: bool) -> None:
    stock, _ = _text(fresh(), tokenizer)
    assert len(stock.split()) > 20
    model = fresh()
    replacement = replace_moe_layers(model, backend="cpu")
    if dense:
        replace_linear_layers(model, backend="cpu")
    before = core.calls().get("swiglu_combine", 0)
    assert _text(model, tokenizer)[0] == stock
    assert core.calls()["swiglu_combine"] - before >= 48 * len(replacement.layers)
    assert _no_fallbacks(replacement)


def test_speculative_decoding(fresh, tokenizer) -> None:
    """The draft is the model itself, so that every draft is accepted."""
    stock, drafted = _text(fresh(), tokenizer, draft_model=fresh(), num_draft_tokens=3)
    model, draft = fresh(), fresh()
    replaced = [replace_moe_layers(m, backend="cpu") for m in (model, draft)]
    assert _text(model, tokenizer, draft_model=draft, num_draft_tokens=3) == (stock, drafted)
    assert drafted >= 30
    assert stock == _text(model, tokenizer)[0]
    assert all(_no_fallbacks(r) for r in replaced)


def test_a_compiled_caller_gets_stock_code() -> None:
    model = build(next(f for f in FAMILIES if f.name == "qwen3_moe"))
    tokens = TOKENS % 128
    want = model(tokens)
    mx.eval(want)
    replacement = replace_moe_layers(model, backend="cpu")
    before = core.calls()
    got = mx.compile(lambda tokens: model(tokens))(tokens)
    assert _relative(got, want) < 1e-5
    assert core.calls() == before
    assert all(set(s["fallbacks"]) == {"tracing"} for s in replacement.stats().values())


def _with_lora(model: nn.Module, trained: bool = False) -> nn.Module:
    """LoRA on the experts of the last two layers; `trained` gives B a value, too."""
    model.freeze()
    mx.random.seed(3)
    linear_to_lora_layers(model, 2, LORA)
    if trained:
        new = [
            (name, 0.3 * mx.random.normal(p.shape))
            for name, p in tree_flatten(model.trainable_parameters())
            if name.endswith("lora_b")
        ]
        assert len(new) == 6
        model.load_weights(new, strict=False)
    return model


def _loss(model: nn.Module, tokens: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")


def _train(model: nn.Module, steps: int = 8) -> list[float]:
    model.train()
    optimizer = optim.Adam(learning_rate=2e-2)
    step = nn.value_and_grad(model, _loss)
    losses = []
    for _ in range(steps):
        loss, gradients = step(model, TOKENS)
        optimizer.update(model, gradients)
        mx.eval(loss, model.parameters(), optimizer.state)
        losses.append(loss.item())
    return losses


@needs_gradients
def test_lora_on_experts_trains_as_on_stock(fresh) -> None:
    want = _train(_with_lora(fresh()))
    model = fresh()
    replace_moe_layers(model, backend="cpu")
    got = _train(_with_lora(model))
    assert got[-1] < got[0] - 0.5
    assert got == pytest.approx(want, rel=1e-4)

    model.eval()  # the trained adapters are what it now runs with
    assert _loss(model, TOKENS).item() < got[-1]


@needs_gradients
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_lora_gradients(fresh, training: bool) -> None:
    models = [_with_lora(fresh(), trained=True) for _ in range(2)]
    replace_moe_layers(models[1], backend="cpu")
    want, got = (
        dict(tree_flatten(nn.value_and_grad(m.train(training), _loss)(m, TOKENS)[1]))
        for m in models
    )
    assert got.keys() == want.keys()
    assert all(_relative(got[name], want[name]) < 1e-4 for name in want)


GRADIENTS = ("qwen3_moe", "deepseek_v3", "llama4", "gpt_oss", "phixtral", "bailing_moe")


@needs_gradients
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_full_gradients(name: str, training: bool) -> None:
    """Of every parameter: through the kernels in eval mode (fused, plain, grouped, biases)."""
    (family,) = (f for f in FAMILIES if f.name == name)
    models = [build(family).train(training) for _ in range(2)]
    replacement = replace_moe_layers(models[1], backend="cpu")
    before = core.calls()
    tokens = TOKENS % 128
    want, got = (nn.value_and_grad(m, _loss)(m, tokens)[1] for m in models)
    mx.eval(want, got)
    errors = tree_map(lambda a, b: mx.linalg.norm((a - b).flatten()).item(), got, want)
    sizes = tree_map(lambda b: mx.linalg.norm(b.flatten()).item() + 1e-6, want)
    for (path, error), (_, size) in zip(tree_flatten(errors), tree_flatten(sizes), strict=True):
        assert error < 1e-4 * size, path
    assert (core.calls() == before) == training
    fallbacks = [set(s["fallbacks"]) for s in replacement.stats().values()]
    assert fallbacks == [{"training"} if training else set()] * family.layers


@pytest.fixture
def adapters(tmp_path: Path, fresh) -> Path:
    """A directory of trained adapters as `mlx_lm.lora` writes it."""
    model = _with_lora(fresh(), trained=True)
    weights = dict(tree_flatten(model.trainable_parameters()))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": LORA}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("first", ["adapters", "replacement"])
def test_adapters_count_on_either_side_of_replacement(fresh, adapters: Path, first: str) -> None:
    plain = fresh()(TOKENS)
    want = load_adapters(fresh(), str(adapters))(TOKENS)
    assert _relative(want, plain) > 0.05
    model = fresh()
    if first == "adapters":
        load_adapters(model, str(adapters))
        replacement = replace_moe_layers(model, backend="cpu")
    else:
        replacement = replace_moe_layers(model, backend="cpu")
        mx.eval(model(TOKENS))  # what the layers remember of the bare weights must not stay
        load_adapters(model, str(adapters))
    model.eval()
    assert _relative(model(TOKENS), want) < 1e-5
    reasons = [set(s["fallbacks"]) for s in replacement.stats().values()]
    assert reasons == [set()] * 4 + [{"adapter"}] * 2


def test_fused_adapters_run_on_the_kernels(fresh, adapters: Path) -> None:
    model = fresh()
    replacement = replace_moe_layers(model, backend="cpu")
    load_adapters(model, str(adapters))
    model.eval()
    want = model(TOKENS)
    mx.eval(want)
    fallen = {name: s["fallbacks"] for name, s in replacement.stats().items()}
    for layer in model.layers[-2:]:
        switch = layer.mlp.switch_mlp
        for name in PROJECTIONS:
            switch[name] = switch[name].fuse(dequantize=True)
    before = core.calls()["swiglu_combine"]
    assert _relative(model(TOKENS), want) < 1e-5
    assert core.calls()["swiglu_combine"] - before == len(model.layers)
    assert {name: s["fallbacks"] for name, s in replacement.stats().items()} == fallen
