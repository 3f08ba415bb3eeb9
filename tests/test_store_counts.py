"""Counts of expert use: what they say, their file, and reading ahead by them."""

from __future__ import annotations

import itertools
import logging
import math
import stat
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from store_model import EXPERTS, forward_for, inputs, make_layers, write_checkpoint
from test_store import opened, run_all
from test_store_prefetch import settle

from mlx_moe import store_counts
from mlx_moe.cache_replay import CHOICES, best_policy, replay
from mlx_moe.errors import CorruptFile, InvalidArgument, MoEError
from mlx_moe.identity import ModelIdentity
from mlx_moe.store_counts import (
    FEWEST,
    LARGEST,
    ExpertCounts,
    counts_path,
    load_counts,
    locked,
)
from mlx_moe.store_prefetch import Ahead, Trial

LAYERS = [("a", 4), ("b", 5)]


def test_counts_and_what_follows_what() -> None:
    counts = ExpertCounts(LAYERS)
    counts.add(0, np.array([[0, 1], [1, 2]]))
    counts.add(1, np.array([[3, 4], [3, 0]]), np.array([[0, 1], [1, 2]]))
    np.testing.assert_array_equal(counts.uses[0], [1, 2, 1, 0])
    np.testing.assert_array_equal(counts.uses[1], [1, 0, 0, 2, 1])
    expected = np.zeros((4, 5))
    for one, other in ((0, 3), (0, 4), (1, 3), (1, 4), (1, 3), (1, 0), (2, 3), (2, 0)):
        expected[one, other] += 1
    np.testing.assert_array_equal(counts.follows[0], expected)
    experts, chances = counts.likely_next(0, np.array([1, 3]))  # 3 has never been seen
    assert experts[0] == 3 and chances[0] == 0.5
    assert len(counts.likely_next(0, np.array([3]))[0]) == 0
    counts.add(1, np.tile([[3, 4]], (50, 1)), np.tile([[0, 1]], (50, 1)))  # a prompt
    np.testing.assert_array_equal(counts.follows[0], expected)


@pytest.mark.parametrize("k", ((2, 2, 2), (2, 1, 2)))
def test_tokens_counted_in_one_go_are_counted_as_one_by_one(k: Any, tmp_path: Path) -> None:
    layers = [("a", 4), ("b", 5), ("c", 6)]
    given, expected = ExpertCounts(layers), ExpertCounts(layers)
    names, read = ("stall_seconds", "prefetch_issued", "prefetch_useful"), itertools.count()
    trial = Trial(lambda: dict.fromkeys(names, 0) | {"bytes_read": next(read)})
    ahead = Ahead(given, trial, lambda *_: None)
    rng = np.random.default_rng(2)
    tokens = whole = 0
    for _ in range(60):  # whole tokens, prompts, tokens that begin or end half way
        kind, before = rng.integers(4), None
        first, last = (int(kind == 2), 3 - int(kind == 3))
        count = 3 if kind == 1 else 1
        for layer in range(first, last):
            experts = layers[layer][1]
            ids = np.array([rng.permutation(experts)[: k[layer]] for _ in range(count)])
            ahead.routed(layer, ids)
            expected.add(layer, ids, before)
            before = ids
        tokens += count == 1 and first == 0
        whole += count == 1 and last - first == 3
    ahead.save(tmp_path / "counts.npz")
    for mine, other in zip(
        (*given.uses, *given.follows), (*expected.uses, *expected.follows), strict=True
    ):
        np.testing.assert_array_equal(mine, other)
    assert len(given.recent) == whole and trial._steps == tokens


def test_the_order_of_warming_is_by_benefit_a_byte() -> None:
    counts = ExpertCounts(LAYERS)
    assert counts.empty and counts.benefit([4096, 4096]) == []
    counts.uses[0][:] = [4, 1, 3, 0]
    counts.uses[1][:] = [0, 8, 0, 0, 0]
    assert counts.benefit([4096, 4096]) == [(1, 1), (0, 0), (0, 2), (0, 1)]
    # As useful a byte, but a read of its own costs more than its bytes where they are few.
    counts.uses[1][:] = [0, 4, 1, 3, 0]
    order = counts.benefit([1 << 20, 4096], overhead=1 << 16)
    assert order[0] == (1, 1) and order.index((1, 3)) < order.index((0, 0))


def test_saved_counts_come_back_and_add_up(tmp_path: Path) -> None:
    path = tmp_path / "private" / "counts.npz"
    one, other = ExpertCounts(LAYERS), ExpertCounts(LAYERS)
    one.add(0, np.array([[0, 1]]))
    other.add(0, np.array([[1, 2]]))
    other.add(1, np.array([[1, 2]]), np.array([[1, 2]]))
    one.save(path)
    other.save(path)
    one.add(0, np.array([[3, 1]]))
    one.save(path)
    one.save(path)  # adds nothing
    found = ExpertCounts.load(path)
    np.testing.assert_array_equal(found.uses[0], [1, 3, 1, 1])
    np.testing.assert_array_equal(found.uses[1], [0, 1, 1, 0, 0])
    assert found.follows[0].sum() == 4
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {p.name for p in path.parent.iterdir()} == {"counts.npz", ".counts.npz.lock"}


def test_counts_are_halved_before_they_overflow(tmp_path: Path) -> None:
    counts = ExpertCounts(LAYERS)
    counts.uses[0][:] = [LARGEST + 10, 9, 8, 0]
    counts.save(tmp_path / "counts.npz")
    np.testing.assert_array_equal(counts.uses[0], [(LARGEST + 10) // 2, 4, 4, 0])
    counts.add(0, np.array([[1, 2]]))
    counts.save(tmp_path / "counts.npz")
    found = ExpertCounts.load(tmp_path / "counts.npz")
    np.testing.assert_array_equal(found.uses[0], [(LARGEST + 10) // 2, 5, 5, 0])


def test_files_that_are_no_use_are_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "counts.npz"
    with pytest.raises(InvalidArgument, match="no file"):
        ExpertCounts.load(path)
    assert load_counts(path, LAYERS, None) is None
    good = ExpertCounts(LAYERS, ModelIdentity("m", config="1"))
    good.add(0, np.array([[0, 1]]))
    good.save(path)
    whole = path.read_bytes()
    for data in (b"", b"PK", whole[:200], whole[: len(whole) // 2] + bytes(len(whole) // 2)):
        path.write_bytes(data)
        with pytest.raises(CorruptFile):
            ExpertCounts.load(path)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            good.save(path)
        assert "counting starts anew" in caplog.text
        np.testing.assert_array_equal(ExpertCounts.load(path).uses[0], [1, 1, 0, 0])
    for layers, identity in (
        ([("a", 4), ("b", 6)], None),
        (LAYERS, ModelIdentity("m", config="2")),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert load_counts(path, layers, identity) is None
        assert "counting starts anew" in caplog.text
    np.savez(path, meta=np.array("{}"))
    with pytest.raises(CorruptFile):
        ExpertCounts.load(path)


def test_a_place_that_cannot_be_written_is_an_error_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MoEError, match="cannot write"):
        ExpertCounts(LAYERS).save(tmp_path / "file" / "counts.npz")


def test_a_file_that_cannot_be_read_is_told_once_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "counts.npz"
    path.write_bytes(b"no counts")
    layers = make_layers(1)
    folder = write_checkpoint(tmp_path / "model", layers)
    described = [(name, EXPERTS) for name in layers]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert load_counts(path, described, None) is None
        assert caplog.text.count("counting starts anew") == 1
        for how in ("exists", "is_file", "stat"):  # as in a directory that is not ours

            def refuse(*_: Any) -> None:
                raise PermissionError(13, "Permission denied")

            with monkeypatch.context() as patch:
                patch.setattr(Path, how, refuse)
                assert load_counts(path, described, None) is None
        # What was decoded by a model whose tokens take more experts than fit here.
        counts = ExpertCounts(described)
        for _ in range(FEWEST):
            counts.decoded([np.arange(6)])
        path.unlink()
        counts.save(path)
        with opened(folder, layers, 4, counts=path, policy="auto") as store:
            assert store.policy == "lfu:32"
            run_all(store, layers, (1,))
    assert "decoded last tell nothing" in caplog.text


def test_no_forward_waits_for_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another process has it."""
    layers, path = make_layers(1), tmp_path / "counts.npz"
    folder = write_checkpoint(tmp_path / "model", layers)
    with caplog.at_level(logging.WARNING), opened(folder, layers, 8, counts=path) as store:
        with locked(path, 0):
            monkeypatch.setattr(ExpertCounts.save, "__defaults__", (None, 0.01))
            for _ in range(2):
                store._keep()
            assert caplog.text.count("another process held") == 1
            monkeypatch.setattr(ExpertCounts.save, "__defaults__", (None, 30.0))
            store._keep_at = 0.0
            begin = time.monotonic()
            run_all(store, layers, (1, 1))
            assert time.monotonic() - begin < 15 and store._keep_at == math.inf
        until = time.monotonic() + 30
        while store._keep_at == math.inf:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert path.exists()
    assert ExpertCounts.load(path).uses[0].sum() == store.counts.uses[0].sum() > 0


def test_what_is_counted_while_a_file_is_written_is_lost_neither_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "counts.npz", ExpertCounts(LAYERS)
    other.decoded([np.array([3]), np.array([4])])
    other.uses[0][:] = [LARGEST, 0, 0, 7]
    other.save(path)
    counts = ExpertCounts(LAYERS)
    ahead = Ahead(counts, Trial(lambda: {"bytes_read": 0}), lambda *_: None)

    def token(*experts: int) -> None:
        assert not ahead.lock.locked()
        for layer, expert in enumerate(experts):
            ahead.routed(layer, np.array([[expert]]))

    write = store_counts.write_npz

    def writing(*given: Any) -> None:
        write(*given)
        token(1, 2)

    token(0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(store_counts, "write_npz", writing)
        ahead.save(path)
    np.testing.assert_array_equal(counts.uses[0], [(LARGEST + 1) // 2, 1, 0, 3])
    ahead.save(path)
    found = ExpertCounts.load(path)
    np.testing.assert_array_equal(found.uses[0], [(LARGEST + 1) // 2, 1, 0, 3])
    np.testing.assert_array_equal(found.uses[1], [0, 1, 1, 0, 0])
    assert [token[0].tolist() for token in found.recent] == [[3], [0], [1]]


def test_where_counts_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLX_MOE_CACHE", str(tmp_path))
    one, other = ModelIdentity("m", config="1"), ModelIdentity("m", config="2")
    assert counts_path(one).parent == tmp_path / "counts"
    assert counts_path(one) != counts_path(other) and counts_path(one) == counts_path(one)


def test_a_store_warms_itself_by_saved_counts(tmp_path: Path) -> None:
    layers = make_layers()
    folder, path = write_checkpoint(tmp_path / "model", layers), tmp_path / "counts.npz"
    with opened(folder, layers, 4, counts=path) as store:
        (first, _), layer = store.layers.values(), next(iter(layers.values()))
        x, forward = inputs(1)[0], forward_for(first.experts, layer)
        for _ in range(3):
            first.run(x, mx.array([[6, 7]]), None, forward)
        first.run(x, mx.array([[0, 1]]), None, forward)
        first.run(x, mx.array([[0, 1]]), None, forward)
        first.run(x, mx.array([[2, 3]]), None, forward)
    with opened(folder, layers, 4, counts=path) as store:
        settle(store)
        assert store._core.resident(0) == [0, 1, 6, 7]
        run_all(store, layers, (1, 4))
        assert store.stats()["prefetch_issued"] >= 4
    with opened(folder, layers, 4, counts=path, warm=False) as store:
        assert store.stats()["prefetch_issued"] == 0
    (tmp_path / "counts.npz").write_bytes(b"no counts")
    with opened(folder, layers, 4, counts=path) as store:
        run_all(store, layers, (1,))
    assert not ExpertCounts.load(path).empty


def test_the_policy_is_chosen_by_what_was_decoded(tmp_path: Path) -> None:
    """A few experts come back after a sweep over the others: LFU keeps them, LRU does not."""
    layers = make_layers()
    folder, path = write_checkpoint(tmp_path / "model", layers), tmp_path / "counts.npz"
    with opened(folder, layers, 6, counts=path, policy="auto") as store:
        assert store.policy == "lfu:32"
        runs = list(zip(store.layers.values(), layers.values(), strict=True))
        forwards = [forward_for(stored.experts, layer) for stored, layer in runs]
        x = inputs(1)[0]
        for i in range(FEWEST + 10):
            pair = [0, 1] if i % 2 else [2 + i // 2 % 6, 2 + (i // 2 + 1) % 6]
            for (stored, _), forward in zip(runs, forwards, strict=True):
                stored.run(x, mx.array([pair]), None, forward)
        assert len(store.counts.recent) == FEWEST + 10
        trace = store.counts.trace(store._core.slot_bytes)
    assert trace is not None
    read = {name: replay(trace, store.memory, name).bytes_read for name in CHOICES}
    assert read["lru"] > min(read.values())
    assert best_policy(trace, store.memory) == min(CHOICES, key=lambda name: read[name])
    with opened(folder, layers, 6, counts=path, policy="auto") as store:
        assert store.policy == best_policy(trace, store.memory) != "lru"
        assert store.stats()["policy"] == store.policy
    # What two processes decoded is kept of both.
    one, other = ExpertCounts.load(path), ExpertCounts.load(path)
    for counts, expert in ((one, 1), (other, 2)):
        counts.decoded([np.array([expert, 0]), np.array([expert, 3])])
        counts.save(path)
    found = list(ExpertCounts.load(path).recent)
    assert len(found) == FEWEST + 12
    assert [token[0].tolist() for token in found[-2:]] == [[0, 1], [0, 2]]
