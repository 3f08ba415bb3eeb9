"""Experts on disk where something comes between: interrupts, refusals, changes in place."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from foreign_experts import GatedExperts, SwiGLU
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from stored_models import assert_same, forwards, save
from test_stream_ops import bank_of, banked, made

import mlx_moe
from mlx_moe import (
    InvalidArgument,
    UnsupportedLayer,
    bank_store,
    replace,
    replace_moe_layers,
    store_bank,
    store_names,
)
from mlx_moe.errors import ExpertsOnDisk, FileChanged, StoreClosed
from mlx_moe.patch import replaced_models


@pytest.fixture
def stored(tmp_path: Path) -> tuple[nn.Module, Path, list[mx.array]]:
    model, folder, expected = made("qwen3_moe", tmp_path)
    banked(model, folder, "26%")
    return model, folder, expected


@pytest.mark.parametrize("after", (False, True))
def test_an_interrupt_between_two_slots(after: bool, stored: Any, monkeypatch: Any) -> None:
    model, _, expected = stored
    store, calls = bank_of(model).store, []
    take = store._take

    def interrupted(*given: Any) -> None:
        calls.append(1)
        if after:
            take(*given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        if not after:
            take(*given)

    monkeypatch.setattr(store, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        forwards(model)
    monkeypatch.undo()
    assert_same(forwards(model), expected)
    held = store.slot_of[store.slot_of >= 0].tolist()
    assert sorted(held + store.banks[0].free) == list(range(store.banks[0].slots))


def test_an_interrupt_before_there_is_a_handle_of_a_read(stored: Any, monkeypatch: Any) -> None:
    model, _, expected = stored
    read, running = store_bank.File.read, []
    submit = ThreadPoolExecutor.submit

    def slow(*given: Any) -> None:
        running.append(1)
        time.sleep(0.3)
        read(*given)
        running.pop()

    def interrupted(*given: Any) -> None:
        submit(*given)
        while not running:
            time.sleep(0.001)
        raise KeyboardInterrupt

    monkeypatch.setattr(store_bank.File, "read", slow)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        forwards(model)
    assert not running
    monkeypatch.undo()
    assert_same(forwards(model), expected)


def test_nothing_writes_to_slots_after_interrupts(stored: Any, monkeypatch: Any) -> None:
    model, _, expected = stored
    read, running, both = store_bank.File.read, [], threading.Event()

    def slow(*given: Any) -> None:
        running.append(1)
        both.wait(60)
        read(*given)
        running.pop()

    def interrupt() -> None:
        while not running:
            time.sleep(0.001)
        for _ in range(2):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)  # until the main thread has seen it
        both.set()

    monkeypatch.setattr(store_bank.File, "read", slow)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            forwards(model)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not running
    thread.join()
    monkeypatch.undo()
    assert_same(forwards(model), expected)


def test_a_closed_or_forked_store_says_so(stored: Any, monkeypatch: Any) -> None:
    model, folder, _ = stored
    store = bank_of(model).store
    monkeypatch.setattr(bank_store.os, "getpid", lambda: 0)
    store.lock = None  # nobody may be left to give it back
    with pytest.raises(StoreClosed, match="parent process"):
        forwards(model)
    monkeypatch.undo()
    store.close()
    with pytest.raises(StoreClosed, match="closed"):
        store.files.read([])
    store.check_files()
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes() + b" ")
    with pytest.raises(FileChanged):
        store.check_files()


def test_a_refused_plan_closes_the_store(tmp_path: Path, monkeypatch: Any) -> None:
    model, folder, _ = made("qwen3_moe", tmp_path)
    opened, open_store = [], replace.open_store

    def noted(*given: Any) -> Any:
        opened.append(open_store(*given))
        return opened[-1]

    def refused(*_: Any) -> None:
        raise InvalidArgument("no plan")

    monkeypatch.setattr(replace, "open_store", noted)
    monkeypatch.setattr(replace, "open_plan", refused)
    with pytest.raises(InvalidArgument, match="no plan"):
        replace_moe_layers(model, object(), backend="auto", expert_memory="50%", checkpoint=folder)
    with pytest.raises(StoreClosed):
        layer = next(iter(opened[0].stored.values())).layer
        layer.store._core.acquire(0, mx.array([0], mx.int32))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = GatedExperts(64, 64, 8, SwiGLU())


def test_layers_of_other_code_are_left_alone(tmp_path: Path) -> None:
    model, _, _ = made("qwen3_moe", tmp_path / "other")
    model.other = Block()
    folder = save(model, tmp_path / "model")
    before = model.other.experts.up_proj.weight
    with pytest.raises(UnsupportedLayer, match=r"other\.experts.*GatedExperts"):
        banked(model, folder, "50%")
    replacement = replace_moe_layers(
        model, backend="stock", expert_memory="50%", checkpoint=folder, strict=False
    )
    assert [row.backend for row in replacement.layers if "other" in row.name] == ["stock"]
    assert model.other.experts.up_proj.weight is before
    forwards(model)


@pytest.mark.parametrize("key", ("scales", "biases"))
def test_changes_in_place_are_noticed(key: str, stored: Any) -> None:
    model = stored[0]
    linear = model.model.layers[1].mlp.switch_mlp.down_proj
    linear[key] *= 0
    with pytest.raises(ExpertsOnDisk, match=f"layers.1.*down_proj.{key} was changed"):
        forwards(model)


def load_by_stock(path: str, how: Any) -> None:
    with replaced_models("auto", lambda _: None, {"expert_memory": "50%"}):
        mlx_lm.load(path, **how)


LOADERS: dict[str, Any] = {
    "load": lambda path, how: mlx_moe.load(path, expert_memory="50%", **how),
    "load for a GPU": lambda path, how: mlx_moe.load(
        path, expert_memory="50%", backend="stock", **how
    ),
    "run": load_by_stock,
}


@pytest.mark.parametrize("kind", ("lora", "full"))
@pytest.mark.parametrize("loader", LOADERS)
def test_adapters_of_experts_are_refused_at_loading(
    kind: str, loader: str, tiny_model_path: Path, tmp_path: Path
) -> None:
    model, _ = mlx_moe.load(tiny_model_path, lazy=True)
    lora = {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": ["mlp.switch_mlp.up_proj"]}
    if kind == "lora":
        linear_to_lora_layers(model, 1, lora)
    name = "model.layers.5.mlp.switch_mlp.up_proj"
    wanted = f"{name}.lora_a" if kind == "lora" else f"{name}.scales"
    arrays = {n: a * 2 for n, a in tree_flatten(model.parameters()) if n == wanted}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), arrays)
    config = {"fine_tune_type": kind, "num_layers": 1, "lora_parameters": lora}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ExpertsOnDisk, match=name):
        LOADERS[loader](str(tiny_model_path), {"adapter_path": str(tmp_path)})


def test_two_threads_look_for_names() -> None:
    stock = mx.stack

    class Files:
        def load(self) -> dict[str, mx.array]:
            return {}

    class Model:
        def __init__(self, seconds: float):
            self.seconds = seconds

        def sanitize(self, weights: Any) -> Any:
            time.sleep(self.seconds)
            return weights

    try:
        threads = []
        for seconds in (0.2, 0.4):
            given: Any = (Model(seconds), Files())
            threads.append(threading.Thread(target=store_names.tensor_names, args=given))
            threads[-1].start()
        for thread in threads:
            thread.join()
        assert mx.stack is stock
    finally:
        mx.stack = stock  # type: ignore[assignment]
