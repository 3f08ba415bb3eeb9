"""Experts in slots of MLX's arrays: the bits of stock, on MLX's CPU device."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import FAMILIES, build, quantize
from stored_models import assert_same, expert_arrays, forwards, save

from mlx_moe import bank_store, core, replace_moe_layers, store_bank_ops
from mlx_moe.cli.report import store_summary
from mlx_moe.errors import ExpertsOnDisk, FileChanged, MemoryLimit, ReadFailed, StoreClosed
from mlx_moe.expert_memory import ExpertMemory
from mlx_moe.placeholders import is_placeholder

NAMES = ("qwen3_moe", "gpt_oss", "phixtral", "bailing_moe", "step3p5", "muse_spark")
BY_NAME = {family.name: family for family in FAMILIES}
TOKENS = (mx.arange(12)[None] * 5 + 2) % 100


def made(name: str, folder: Path) -> tuple[nn.Module, Path, list[mx.array]]:
    """A 4-bit model in f32, which stock computes too, its checkpoint and its outputs."""
    model = quantize(build(BY_NAME[name]), 32, 4)
    expected = forwards(model)
    return model, save(model, folder), expected


def banked(model: nn.Module, folder: Path, limit: int | str, **how: Any) -> Any:
    memory = ExpertMemory(limit, **{"counts": False, **how})
    return replace_moe_layers(model, backend="stock", expert_memory=memory, checkpoint=folder)


def bank_of(model: nn.Module) -> Any:
    return next(m for m in model.modules() if "_moe_layer" in m.__dict__)._moe_layer.stored.layer


@pytest.mark.parametrize("name", [name for name in NAMES if name in BY_NAME])
def test_bits_are_stocks_at_every_limit(name: str, tmp_path: Path) -> None:
    model, folder, expected = made(name, tmp_path)
    before = core.calls()
    for limit, policy in (("26%", "lru"), ("40%", "lfu:1"), ("80%", "lru"), ("100%", "lfu")):
        replacement = banked(model, folder, limit, policy=policy)
        assert_same(forwards(model), expected)
        assert all(is_placeholder(a) for a in expert_arrays(model))
        stats = replacement.stats()["store"]
        assert stats["resident_bytes"] <= stats["limit_bytes"]
        assert {"26%": stats["evictions"] > 0, "100%": not stats["evictions"]}.get(limit, True)
        assert {row.backend for row in replacement.layers} == {"mlx"}
    assert core.calls() == before
    replacement.restore()
    assert_same(forwards(model), expected)


def test_where_all_fit_nothing_is_read_on_the_host(tmp_path: Path, monkeypatch: Any) -> None:
    model, folder, expected = made("qwen3_moe", tmp_path)
    replacement = banked(model, folder, "100%")
    asked = replacement.stats()["store"]["bytes_read"]
    monkeypatch.setattr("mlx_moe.store_bank_ops.evaluate", lambda *_: pytest.fail("host read"))
    assert_same(forwards(model), expected)
    stats = replacement.stats()["store"]
    assert stats["bytes_read"] == asked == stats["total_bytes"]
    assert stats["misses"] == stats["evictions"] == 0
    assert store_summary(stats).endswith("in memory since the start")
    block = model.model.layers[0].mlp  # what never moves can be traced
    x = mx.random.normal((1, 3, 64))
    assert_same([mx.compile(block)(x)], [block(x)])


def test_slots_that_a_queued_graph_reads_are_not_overwritten(tmp_path: Path) -> None:
    model, folder, _ = made("qwen3_moe", tmp_path)
    blocks = [layer.mlp.switch_mlp for layer in model.model.layers]
    x = mx.random.normal((4, 64))
    pairs = [mx.array([[e, (e + 1) % 8]] * 4, mx.uint32) for e in range(8)]
    expected = [block(x, ids) for block in blocks for ids in pairs]
    mx.eval(expected)
    banked(model, folder, "26%")
    # All of it is queued before any of it runs, and every layer asks for the slots of the others.
    found = [block(x, ids) for block in blocks for ids in pairs]
    assert_same(found, expected)


def test_that_test_sees_slots_that_are_overwritten(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(bank_store, "evaluate", lambda *_: None)
    monkeypatch.setattr(store_bank_ops, "begin", lambda *_: None)
    with pytest.raises(AssertionError):
        test_slots_that_a_queued_graph_reads_are_not_overwritten(tmp_path)


def compiled(model: nn.Module) -> None:
    mx.eval(mx.compile(model.model.layers[0].mlp)(mx.ones((1, 3, 64))))


def gradients(model: nn.Module) -> None:
    mx.eval(mx.grad(lambda x: model.model.layers[0].mlp(x).sum())(mx.ones((1, 3, 64))))


def trained(model: nn.Module) -> None:
    model.train()
    model(TOKENS)


@pytest.mark.parametrize("use", (compiled, gradients, trained))
def test_what_needs_the_weights_is_refused(use: Any, tmp_path: Path) -> None:
    model, folder, expected = made("qwen3_moe", tmp_path)
    banked(model, folder, "40%")
    with pytest.raises(ExpertsOnDisk, match="without expert_memory"):
        use(model)
    model.eval()
    assert_same(forwards(model), expected)


def test_threads(tmp_path: Path) -> None:
    model, folder, _ = made("qwen3_moe", tmp_path)
    block = model.model.layers[0].mlp.switch_mlp
    x = mx.random.normal((4, 64))
    ids = [mx.array([[e, (e + 3) % 8]] * 4, mx.uint32) for e in range(8)]
    expected = [block(x, i) for i in ids]
    mx.eval(expected)
    banked(model, folder, "26%")
    found: dict[int, list[mx.array]] = {}

    def run(number: int) -> None:
        with mx.stream(mx.cpu):
            ys = [block(x, i) for _ in range(4) for i in ids]
            mx.eval(ys)
            found[number] = ys

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for ys in found.values():
        assert_same(ys, expected * 4)


def test_faults(tmp_path: Path) -> None:
    model, folder, expected = made("qwen3_moe", tmp_path)
    with pytest.raises(MemoryLimit, match="raise it"):
        banked(model, folder, "1kB")
    banked(model, folder, "26%")
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    bank_of(model).store.files.check()
    shard.write_bytes(data)  # the same bytes, but written
    with pytest.raises(FileChanged):
        forwards(model)
    banked(model, folder, "26%")
    files = bank_of(model).store.files.files
    os.truncate(shard, 64)
    for file in files:
        file.state = file._now()
    with pytest.raises(ReadFailed, match="ends before"):
        forwards(model)
    shard.write_bytes(data)
    for file in files:
        file.state = file._now()
    assert_same(forwards(model), expected)  # what was not read is read now
    bank_of(model).store.close()
    with pytest.raises(StoreClosed):
        forwards(model)


def test_a_store_goes_with_its_model(tmp_path: Path) -> None:
    model, folder, _ = made("qwen3_moe", tmp_path)
    gc.collect()
    before = mx.get_active_memory()
    replacement = banked(model, folder, "100%")
    forwards(model)
    gc.disable()
    try:
        replacement.restore()
        stats = replacement.stats()
    finally:
        gc.enable()
    assert "store" in stats and stats["store"]["resident_bytes"] > 0
    assert mx.get_active_memory() <= before
