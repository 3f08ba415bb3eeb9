"""Whole models whose experts stay on disk say, bit for bit, what they say with them in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import FAMILIES, Family, build, quantize
from mlx.utils import tree_flatten
from stored_models import EXPERTS, assert_same, forwards, one_an_expert, save, slot_bytes

from mlx_moe import UnsupportedLayer, replace_moe_layers
from mlx_moe.errors import MemoryLimit
from mlx_moe.expert_memory import ExpertMemory
from mlx_moe.store_files import Checkpoint
from mlx_moe.store_names import tensor_names

BY_NAME = {family.name: family for family in FAMILIES}
# Fused, any activation with biases, two matrices.
VARIED = ("qwen3_moe", "gpt_oss", "phixtral")
POLICIES = ("lru", "lfu", "lfu:1")


def streamed(model: nn.Module, folder: Path, limit: int | str, policy: str = "auto") -> Any:
    memory = ExpertMemory(limit, policy, counts=False)
    return replace_moe_layers(model, backend="cpu", expert_memory=memory, checkpoint=folder)


def made(family: Family, dtype: mx.Dtype = mx.bfloat16) -> nn.Module:
    model = build(family, dtype)
    return model if family.native is None else quantize(model, **family.native)


def with_all_in_memory(model: nn.Module) -> list[mx.array]:
    replacement = replace_moe_layers(model, backend="cpu")
    expected = forwards(model)
    replacement.restore()
    return expected


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_family(family: Family, tmp_path: Path) -> None:
    model = made(family)
    folder = save(model, tmp_path)
    expected = with_all_in_memory(model)
    replacement = streamed(model, folder, "40%")
    chosen = [row.top_k for row in replacement.layers]  # before any forward
    assert_same(forwards(model), expected)
    assert chosen == [row._layer.top_k for row in replacement.layers]
    sizes = replacement.layers[0]._layer.stored.layer.store._core.slot_bytes
    least = max(k * size for k, size in zip(chosen, sizes, strict=True))
    with pytest.raises(MemoryLimit, match="raise it"):
        streamed(model, folder, least - 1)
    stats = replacement.stats()
    store = stats.pop("store")
    assert len(stats) == family.layers and not any(s["fallbacks"] for s in stats.values())
    assert 0 < store["resident_bytes"] <= store["limit_bytes"] < store["total_bytes"]
    assert store["evictions"] > 0


@pytest.mark.parametrize("name", [name for name in VARIED if name in BY_NAME])
def test_every_limit_and_policy(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    model = made(family)
    folder = save(model, tmp_path)
    expected = with_all_in_memory(model)
    size = slot_bytes(model)
    for slots in (family.top_k, family.top_k + 1, EXPERTS, EXPERTS * family.layers):
        for policy in POLICIES:
            replacement = streamed(model, folder, slots * size, policy)
            assert_same(forwards(model), expected)
            stats = replacement.stats()["store"]
            assert (stats["limit_bytes"], stats["policy"]) == (slots * size, policy)
            assert (stats["evictions"] == 0) == (slots == EXPERTS * family.layers)


# What unconverted checkpoints call the projections, and the experts instead of the module.
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
SAME = {name: name for name in MIXTRAL}
STACKED = {
    "mixtral": MIXTRAL,
    "minimax": MIXTRAL,
    "qwen3_moe": SAME,
    "deepseek_v3": SAME,
    "olmoe": SAME,
    "nemotron_h": {"fc1": "up_proj", "fc2": "down_proj"},
}


@pytest.mark.parametrize("name", [name for name in STACKED if name in BY_NAME])
def test_tensors_that_the_loader_stacks_are_read_one_by_one(name: str, tmp_path: Path) -> None:
    model = made(BY_NAME[name])
    expected = with_all_in_memory(model)
    arrays = one_an_expert(dict(tree_flatten(model.parameters())), STACKED[name])
    folder = save(arrays, tmp_path)
    loaded = build(BY_NAME[name], mx.bfloat16)
    loaded.load_weights(list(loaded.sanitize(dict(arrays)).items()))
    streamed(loaded, folder, "40%")
    assert_same(forwards(loaded), expected)


def llama4(arrays: dict[str, mx.array]) -> None:
    for name in [name for name in arrays if name.endswith("experts.gate_proj.weight")]:
        prefix = name.removesuffix("gate_proj.weight")
        gate, up, down = (arrays.pop(f"{prefix}{p}_proj.weight") for p in ("gate", "up", "down"))
        arrays[prefix + "gate_up_proj"] = mx.concatenate([gate, up], axis=1).swapaxes(1, 2)
        arrays[prefix + "down_proj"] = down.swapaxes(1, 2)


def granitemoe(arrays: dict[str, mx.array]) -> None:
    for name in [name for name in arrays if name.endswith("switch_mlp.gate_proj.weight")]:
        prefix = name.removesuffix("switch_mlp.gate_proj.weight")
        gate, up, down = (
            arrays.pop(f"{prefix}switch_mlp.{p}_proj.weight") for p in ("gate", "up", "down")
        )
        arrays[prefix + "input_linear.weight"] = mx.concatenate([gate, up], axis=1)
        arrays[prefix + "output_linear.weight"] = down


def deepseek_v3(arrays: dict[str, mx.array]) -> None:
    """Published weights: fp8 with a scale to each block of 128 by 128."""
    split = one_an_expert(arrays, SAME)
    arrays.clear()
    for name, array in split.items():
        arrays[name] = array
        if ".experts." in name:
            arrays[name] = mx.to_fp8(array)
            blocks = [-(-size // 128) for size in array.shape]
            arrays[f"{name}_scale_inv"] = mx.ones(blocks, mx.bfloat16)


def awq(arrays: dict[str, mx.array]) -> None:
    """As qwen3_moe's are called there; mlx-lm makes weights of them after `sanitize`."""
    for name in [name for name in arrays if "switch_mlp" in name]:
        arrays[name.replace(".weight", ".qweight")] = arrays.pop(name)


@pytest.mark.parametrize(
    ("name", "publish"),
    (
        ("llama4", llama4),
        ("granitemoe", granitemoe),
        ("deepseek_v3", deepseek_v3),
        ("qwen3_moe", awq),
    ),
    ids=("llama4", "granitemoe", "fp8", "awq"),
)
def test_what_the_loader_transforms_is_refused_with_the_command_that_mends_it(
    name: str, publish: Any, tmp_path: Path
) -> None:
    model = build(BY_NAME[name], mx.bfloat16)
    arrays = dict(tree_flatten(model.parameters()))
    publish(arrays)
    folder = save(arrays, tmp_path / "published")
    parameters = tree_flatten(model.parameters())
    classes = [type(module) for _, module in model.named_modules()]
    with pytest.raises(UnsupportedLayer, match="computed while the model is loaded") as error:
        streamed(model, folder, "40%")
    assert f"mlx_lm.convert --hf-path {folder} --mlx-path {folder}-mlx" in str(error.value)
    assert [type(module) for _, module in model.named_modules()] == classes
    now = tree_flatten(model.parameters())
    assert all(a is b for (_, a), (_, b) in zip(now, parameters, strict=True))

    if publish is not awq:  # what convert writes: the parameters of the loaded model
        weights = {k: mx.contiguous(v) for k, v in model.sanitize(dict(arrays)).items()}
        model.load_weights(list(weights.items()))
        expected = with_all_in_memory(model)
        streamed(model, save(model, tmp_path / "converted"), "40%")
        assert_same(forwards(model), expected)


class Loader:
    """What a family's loader may do to tensors."""

    @staticmethod
    def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        parts = [weights["one"], weights["two"]]
        return {
            "renamed": weights["one"],
            "stacked": mx.stack(parts),
            "stacked otherwise": mx.stack(parts, axis=1),
            "stack of another thing": mx.stack([parts[0], parts[1] * 2]),
            "joined": mx.concatenate(parts),
            "cast": weights["two"].astype(mx.float16),
            "first of a stack": mx.stack(parts)[0],
        }


def test_only_whole_tensors_and_stacks_of_them_are_traced(tmp_path: Path) -> None:
    folder = save({"one": mx.ones((2, 2)), "two": mx.zeros((2, 2))}, tmp_path)
    stock = mx.stack
    found = tensor_names(Loader(), Checkpoint.open(folder))  # type: ignore[arg-type]
    assert found == {"renamed": ("one",), "stacked": ("one", "two")}
    assert mx.stack is stock
