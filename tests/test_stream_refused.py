"""What needs the weights of experts on disk is refused by name, and leaves the model as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.utils import linear_to_lora_layers
from stored_models import assert_same, forwards
from test_stream import LORA, TOKENS, made, stored

from mlx_moe.errors import ExpertsOnDisk

__all__ = ["made", "stored"]  # fixtures


def grad(model: nn.Module) -> None:
    embed = model.model.embed_tokens

    def loss(x: mx.array) -> mx.array:
        return model.model.layers[0].mlp(x).sum()

    mx.eval(mx.grad(loss)(embed(TOKENS).astype(mx.float32)))


def train(model: nn.Module) -> None:
    model.train()
    try:
        mx.eval(model(TOKENS))
    finally:
        model.eval()


def compiled(model: nn.Module) -> None:
    mx.eval(mx.compile(model.model.layers[0].mlp)(mx.ones((1, 3, 64), mx.bfloat16)))


def adapters(keys: list[str] | None) -> Callable[[nn.Module], None]:
    return lambda model: linear_to_lora_layers(model, 2, {**LORA, "keys": keys} if keys else LORA)


def without_expert_weights(change: Callable[[nn.Module], Any]) -> Callable[[nn.Module], None]:
    """Something that goes unnoticed until the next forward."""

    def run(model: nn.Module) -> None:
        change(model)
        mx.eval(model(TOKENS))

    return run


def load_others(model: nn.Module) -> None:
    weights = [(n, mx.zeros_like(a)) for n, a in tree_flatten(model.parameters())]
    model.load_weights(weights)


def cast_by_hand(model: nn.Module) -> None:
    up = model.model.layers[0].mlp.switch_mlp.up_proj
    key = "scales" if "scales" in up else "weight"
    up[key] = up[key].astype(mx.float32)


def lora_by_hand(model: nn.Module) -> None:
    from mlx_lm.tuner.lora import LoRASwitchLinear

    switch = model.model.layers[0].mlp.switch_mlp
    switch.up_proj = LoRASwitchLinear.from_base(switch.up_proj, r=2)


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "training": train,
    "gradients": grad,
    "compile": compiled,
    "adapters": adapters(None),
    "adapters on one projection": adapters(["mlp.switch_mlp.up_proj"]),
    "adapters by hand": without_expert_weights(lora_by_hand),
    "other weights": load_others,
    "another dtype": lambda model: model.set_dtype(mx.float32),
    "another dtype of one": lambda model: model.model.layers[0].mlp.switch_mlp.set_dtype(
        mx.float32
    ),
    "all read and put back": lambda model: model.update(
        tree_map(mx.contiguous, model.parameters())
    ),
    "set by hand": without_expert_weights(cast_by_hand),
    "dequantised": lambda model: mlx_lm.utils.dequantize_model(model),
    "quantised": lambda model: nn.quantize(model, 32, 4),
    "one projection called": lambda model: model.model.layers[0].mlp.switch_mlp.up_proj(
        mx.ones((1, 1, 1, 64)), mx.zeros((1, 2), mx.uint32)
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_the_weights_is_refused_by_name(what: str, stored: Any) -> None:
    model, _, expected = stored
    is_quantised = "scales" in model.model.layers[0].mlp.switch_mlp.up_proj
    if what == ("quantised" if is_quantised else "dequantised"):
        pytest.skip("stock does nothing either")
    with pytest.raises(ExpertsOnDisk, match="without expert_memory"):
        REFUSED[what](model)
    if what in ("adapters", "adapters on one projection", "adapters by hand", "set by hand"):
        return
    assert_same(forwards(model), expected)


SAVERS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "save_weights": lambda m, p: m.save_weights(str(p / "w.safetensors")),
    "save_weights npz": lambda m, p: m.save_weights(str(p / "w.npz")),
    "save_model": lambda m, p: mlx_lm.utils.save_model(p / "model", m),
    "save_safetensors": lambda m, p: mx.save_safetensors(
        str(p / "w.safetensors"), dict(tree_flatten(m.parameters()))
    ),
    "save_safetensors by name": lambda m, p: mx.save_safetensors(
        str(p / "w.safetensors"), arrays=dict(tree_flatten(m.parameters()))
    ),
    "save_gguf": lambda m, p: mx.save_gguf(str(p / "w.gguf"), dict(tree_flatten(m.parameters()))),
    "savez of a copy": lambda m, p: mx.savez(
        str(p / "w.npz"), **dict(tree_flatten(copy.deepcopy(m).parameters()))
    ),
    "save": lambda m, p: mx.save(str(p / "w.npy"), m.model.layers[0].mlp.switch_mlp.up_proj.weight),
    "save_model, which empties it first": lambda m, p: mlx_lm.utils.save_model(
        p / "model", m, donate_model=True
    ),
    "mlx_lm.utils.save": lambda m, p: mlx_lm.utils.save(p / "model", p, m, None, {}),
    "read arrays": lambda m, p: save_made(m, p, mx.contiguous),
    "cast arrays": lambda m, p: save_made(m, p, lambda a: a.astype(mx.float32)),
    "sliced arrays": lambda m, p: save_made(m, p, lambda a: a[1:] + 0),
    "one dequantised": lambda m, p: mx.save(
        str(p / "w.npy"), dequantised(m.model.layers[0].mlp.switch_mlp.up_proj)
    ),
    "one read array": lambda m, p: mx.save(
        str(p / "w.npy"), mx.contiguous(m.model.layers[0].mlp.switch_mlp.up_proj.weight)
    ),
}


def save_made(model: nn.Module, folder: Path, change: Callable[[mx.array], mx.array]) -> None:
    arrays = dict(tree_flatten(tree_map(change, model.parameters())))
    mx.eval(arrays)
    mx.save_safetensors(str(folder / "w.safetensors"), arrays)


def dequantised(linear: nn.Module) -> mx.array:
    if "scales" not in linear:
        return linear.weight * 2
    arrays = [linear[key] for key in ("weight", "scales", "biases")]  # `.scales` is refused
    group_size = 8 * arrays[0].shape[-1] // arrays[1].shape[-1]
    return mx.dequantize(*arrays, group_size, bits=4)


def test_placeholders_cannot_be_saved(stored: Any, tmp_path: Path) -> None:
    model, _, expected = stored
    parameters = tree_flatten(model.parameters())
    for how, write in SAVERS.items():
        with pytest.raises(ExpertsOnDisk, match="stays in the checkpoint's files"):
            write(model, tmp_path)
            pytest.fail(how)
        written = [path for path in tmp_path.rglob("*.*") if path.is_file()]
        assert not [path for path in written if path.parent.name != "model"], how
        now = tree_flatten(model.parameters())
        assert all(a is b for (_, a), (_, b) in zip(now, parameters, strict=True)), how
    assert_same(forwards(model), expected)
    mx.save(str(tmp_path / "w.npy"), model.model.embed_tokens.weight)  # all else can


@pytest.mark.parametrize(
    "array",
    [mx.full((3, 5), mx.nan), mx.full((2, 7, 3), 255, mx.uint8), mx.array(mx.nan)],
    ids=["not computed yet", "a white picture", "a number"],
)
def test_arrays_of_nan_that_are_no_experts_are_saved(
    array: mx.array, stored: Any, tmp_path: Path
) -> None:
    del stored  # whose placeholders are there
    mx.save(str(tmp_path / "w.npy"), array)
    assert mx.array_equal(mx.load(str(tmp_path / "w.npy")), array, equal_nan=True)
