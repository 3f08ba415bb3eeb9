"""Experts on disk: placeholders, what is refused, the way back, and how long a store lives."""

from __future__ import annotations

import copy
import gc
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import FAMILIES, build, quantize
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from stored_models import assert_same, expert_arrays, forwards, save, slot_bytes

from mlx_moe import (
    InvalidArgument,
    MoEError,
    UnsupportedLayer,
    load,
    replace_moe_layers,
    restore_moe_layers,
)
from mlx_moe.errors import ExpertsOnDisk, FileChanged, MemoryLimit, ModelNotFound
from mlx_moe.expert_memory import ExpertMemory
from mlx_moe.experts_weights import expert_weights
from mlx_moe.identity import identity_of_model
from mlx_moe.placeholders import is_placeholder
from mlx_moe.store_counts import counts_path

FAMILY = next(family for family in FAMILIES if family.name == "qwen3_moe")
TOKENS = (mx.arange(12)[None] * 5 + 2) % 100
LORA = {"rank": 2, "scale": 1.0, "dropout": 0.0}


@pytest.fixture(params=["bfloat16", "4-bit"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[nn.Module, Path, list[mx.array]]:
    """A model, its checkpoint, and what it says with all experts in memory."""
    model = build(FAMILY, mx.bfloat16)
    if request.param == "4-bit":
        quantize(model)
    replacement = replace_moe_layers(model, backend="cpu")
    expected = forwards(model)
    replacement.restore()
    return model, save(model, tmp_path / "model"), expected


@pytest.fixture
def stored(made: Any) -> tuple[nn.Module, Path, list[mx.array]]:
    streamed(*made[:2])
    return made


def streamed(model: nn.Module, folder: Path, limit: int | str = "40%", **how: Any) -> Any:
    memory = ExpertMemory(limit, **{"counts": False, **how})
    return replace_moe_layers(model, backend="cpu", expert_memory=memory, checkpoint=folder)


def test_parameters_become_placeholders_that_hold_nothing(made: Any) -> None:
    model, folder, _ = made
    before = [(name, a.shape, a.dtype) for name, a in tree_flatten(model.parameters())]
    resident = sum(a.nbytes for a in expert_arrays(model))
    mx.eval(model.parameters())
    gc.collect()
    active = mx.get_active_memory()
    streamed(model, folder)
    mx.eval(model.parameters())
    gc.collect()
    assert [(n, a.shape, a.dtype) for n, a in tree_flatten(model.parameters())] == before
    assert all(is_placeholder(a) for a in expert_arrays(model))
    assert mx.get_active_memory() < active - 0.95 * resident
    others = [a for n, a in tree_flatten(model.parameters()) if "switch_mlp" not in n]
    assert not any(is_placeholder(a) for a in others)


def test_adapters_elsewhere_run(stored: Any) -> None:
    model, _, expected = stored
    linear_to_lora_layers(model, 2, {**LORA, "keys": ["self_attn.q_proj"]})
    model.eval()
    assert_same(forwards(model), expected)  # a new adapter adds nothing yet


def test_a_model_is_known_again(made: Any) -> None:
    model, folder, _ = made
    before = identity_of_model(model, folder)
    streamed(model, folder)
    assert identity_of_model(model, folder) == before


def test_programs_cannot_be_made_of_placeholders(stored: Any) -> None:
    module = stored[0].model.layers[0].mlp.switch_mlp
    with pytest.raises(ExpertsOnDisk, match="the_layer.gate_proj"):
        expert_weights(module, "glu", 0, (0, 8), "the_layer")


def test_restoring_gives_the_weights_back_lazily(made: Any) -> None:
    model, folder, expected = made
    before = {name: mx.array(a) for name, a in tree_flatten(model.parameters())}
    classes = [type(module) for _, module in model.named_modules()]
    mx.eval(before)
    replacement = streamed(model, folder)
    mx.eval(model(TOKENS))
    replacement.restore()
    assert [type(module) for _, module in model.named_modules()] == classes
    now = dict(tree_flatten(model.parameters()))
    assert now.keys() == before.keys()
    assert all(mx.array_equal(now[name], before[name]) for name in before)
    again = replace_moe_layers(model, backend="cpu")
    assert_same(forwards(model), expected)
    assert "store" not in again.stats()


def test_restoring_after_gradients_that_failed(made: Any) -> None:
    model, folder, expected = made
    streamed(model, folder)
    with pytest.raises(ExpertsOnDisk):  # leaves what it traced in the model, as MLX does
        nn.value_and_grad(model, lambda m: m(TOKENS).sum())(model)
    restore_moe_layers(model)
    assert not any(is_placeholder(a) for a in expert_arrays(model))
    replace_moe_layers(model, backend="cpu")
    assert_same(forwards(model), expected)


@pytest.mark.parametrize("cast", (False, True))
def test_restoring_after_arrays_were_made_of_placeholders(cast: bool, made: Any) -> None:
    model, folder, _ = made
    up = model.model.layers[0].mlp.switch_mlp.up_proj
    key = "scales" if "scales" in up else "weight"
    dtype = mx.float32 if cast else up[key].dtype
    before = mx.array(up[key]).astype(dtype)
    mx.eval(before)
    streamed(model, folder)
    up[key] = mx.contiguous(up[key].astype(dtype))
    own = up["biases"] = mx.ones_like(up["scales"]) if "biases" in up else mx.array(0)
    restore_moe_layers(model)
    assert up[key].dtype == dtype and mx.array_equal(up[key], before)
    assert up["biases"] is own  # what came from elsewhere stays


def test_replacing_again_changes_the_limit_or_nothing(made: Any) -> None:
    model, folder, expected = made
    first = streamed(model, folder, "40%")
    assert_same(forwards(model), expected)
    asked = first.stats()["store"]["misses"]
    second = streamed(model, folder, "80%")
    assert_same(forwards(model), expected)
    assert first.stats()["store"]["misses"] == asked < 3 * second.stats()["store"]["misses"]
    limits = [r.stats()["store"]["limit_bytes"] for r in (first, second)]
    assert limits[0] < limits[1]
    third = replace_moe_layers(model, backend="cpu")  # without a word of memory: as it was
    assert third.stats()["store"]["limit_bytes"] == limits[1]
    assert_same(forwards(model), expected)
    replace_moe_layers(model, backend="stock")
    assert not any(is_placeholder(a) for a in expert_arrays(model))


def test_a_replaced_model_can_be_put_on_disk(made: Any) -> None:
    model, folder, expected = made
    replace_moe_layers(model, backend="cpu")
    streamed(model, folder)
    assert_same(forwards(model), expected)


def test_a_copy_shares_the_store(stored: Any) -> None:
    model, _, expected = stored
    other = copy.deepcopy(model)
    restore_moe_layers(model)
    del model
    gc.collect()
    assert all(is_placeholder(a) for a in expert_arrays(other))
    assert_same(forwards(other), expected)
    restore_moe_layers(other)
    assert not any(is_placeholder(a) for a in expert_arrays(other))


def test_a_store_goes_with_its_model_and_keeps_the_counts(made: Any) -> None:
    model, folder, _ = made
    replacement = streamed(model, folder, counts=True)
    mx.eval(model(TOKENS))
    layer = model.model.layers[0].mlp.switch_mlp._moe_layer.stored.layer
    path = counts_path(layer.store.counts.identity)
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else None
    del layer
    gc.disable()  # not when the collector comes by, but at once
    try:
        restore_moe_layers(model)
    finally:
        gc.enable()
    assert path.exists()
    if threads is not None:
        assert len(os.listdir("/proc/self/task")) < threads
    path.unlink()
    assert replacement.stats()["store"]["misses"] > 0  # the last figures outlive it


@pytest.mark.parametrize(
    ("how", "error", "says"),
    (
        ({"expert_memory": "40%"}, InvalidArgument, "checkpoint=PATH"),
        ({"expert_memory": "8XB", "checkpoint": "."}, InvalidArgument, "no size"),
        ({"expert_memory": "0%", "checkpoint": "."}, InvalidArgument, "no share"),
        ({"expert_memory": "lots", "checkpoint": "."}, InvalidArgument, "such as 25%, or auto"),
        ({"expert_memory": 0, "checkpoint": "."}, InvalidArgument, "more than none"),
        ({"expert_memory": 1.5, "checkpoint": "."}, InvalidArgument, "expected bytes"),
        ({"expert_memory": True, "checkpoint": "."}, InvalidArgument, "expected bytes"),
        ({"expert_memory": "9" * 400, "checkpoint": "."}, InvalidArgument, "more than any size"),
        ({"expert_memory": ExpertMemory(1, policy=None)}, InvalidArgument, "policy is None"),  # type: ignore[arg-type]
        ({"expert_memory": ExpertMemory(1, direct="x")}, InvalidArgument, "direct is 'x'"),  # type: ignore[arg-type]
        ({"expert_memory": ExpertMemory(1, policy="lfv")}, InvalidArgument, "policy 'lfv'"),
        ({"expert_memory": ExpertMemory(1, policy="pinned")}, InvalidArgument, "'pinned' is for"),
        ({"expert_memory": "1GB", "checkpoint": "no/such"}, ModelNotFound, "no/such"),
        ({"expert_memory": "1kB"}, MemoryLimit, "raise it"),
        ({"expert_memory": ExpertMemory("1GB", "lfu:9999999999")}, InvalidArgument, "lfu:TOKENS"),
    ),
)
def test_wrong_arguments_change_nothing(how: Any, error: Any, says: str, made: Any) -> None:
    model, folder, _ = made
    if says in ("raise it", "lfu:TOKENS"):
        how = {**how, "checkpoint": folder}
    parameters = tree_flatten(model.parameters())
    classes = [type(module) for _, module in model.named_modules()]
    with pytest.raises(error, match=says) as raised:
        replace_moe_layers(model, **{"backend": "cpu", **how})
    assert isinstance(raised.value, MoEError)
    assert [type(module) for _, module in model.named_modules()] == classes
    now = tree_flatten(model.parameters())
    assert all(a is b for (_, a), (_, b) in zip(now, parameters, strict=True))


def test_ranks_have_their_experts_in_memory(made: Any) -> None:
    model, folder, expected = made
    for call, given in ((replace_moe_layers, model), (load, "no/such/model")):
        with pytest.raises(InvalidArgument, match="expert_memory and group do not go together"):
            call(given, group=object(), expert_memory="1GB")
    streamed(model, folder)
    with pytest.raises(InvalidArgument, match=r"on disk or shared.*restore_moe_layers"):
        replace_moe_layers(model, group=object(), checkpoint=folder)
    assert_same(forwards(model), expected)


def test_another_checkpoint_is_refused(made: Any, tmp_path: Path) -> None:
    model, _, _ = made
    other = build(FAMILY, mx.float32)
    with pytest.raises(UnsupportedLayer, match=r"gate_proj\.(weight|scales)"):
        streamed(model, save(other, tmp_path / "other"))


def test_adapters_on_experts_are_refused_beforehand(made: Any) -> None:
    model, folder, _ = made
    linear_to_lora_layers(model, 2, {**LORA, "keys": ["mlp.switch_mlp.up_proj"]})
    with pytest.raises(UnsupportedLayer, match="adapters on them need the experts in memory"):
        streamed(model, folder)


def test_files_that_were_replaced_cannot_be_restored_from(made: Any, tmp_path: Path) -> None:
    model, folder, expected = made
    replacement = streamed(model, folder)
    for path in sorted(folder.glob("*.safetensors")):
        shutil.copy(path, tmp_path / "new")
        os.replace(tmp_path / "new", path)
    with pytest.raises(FileChanged):
        replacement.restore()
    assert_same(forwards(model), expected)  # the files that were opened are still there


def test_auto_leaves_room_for_the_other_weights(made: Any, monkeypatch: Any) -> None:
    model, folder, _ = made
    others = sum(a.nbytes for n, a in tree_flatten(model.parameters()) if "switch_mlp" not in n)
    room = 5 * slot_bytes(model)
    monkeypatch.setattr("mlx_moe.expert_memory.free_bytes", lambda: others + room)
    replacement = streamed(model, folder, "auto")
    assert replacement.stats()["store"]["limit_bytes"] == room
    monkeypatch.setattr("mlx_moe.expert_memory.free_bytes", lambda: 0)
    with pytest.raises(MemoryLimit, match="raise it"):
        streamed(model, folder, "auto")
    monkeypatch.undo()
    stats = streamed(model, folder, "auto").stats()["store"]
    assert stats["limit_bytes"] == stats["total_bytes"]
