"""Forwards through the expert store have the bits of forwards with all experts in memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from store_model import (
    EXPERTS,
    FORMATS,
    TOP_K,
    forward_for,
    found_experts,
    inputs,
    make_layers,
    resident,
    write_checkpoint,
)

from mlx_moe import core
from mlx_moe.errors import InvalidArgument, MemoryLimit, StoreBusy, StoreClosed
from mlx_moe.store import ExpertStore
from mlx_moe.store import _figures as store_figures
from mlx_moe.store_counts import ExpertCounts
from mlx_moe.store_files import Checkpoint
from mlx_moe.store_prefetch import Ahead, Trial
from mlx_moe.store_report import StoreReport

POLICIES = ("lru", "lfu", "lfu:1", "pinned")


def opened(folder: Path, layers: Any, slots: int, kind: str = "glu", **options: Any) -> ExpertStore:
    checkpoint = Checkpoint.open(folder)
    experts = found_experts(checkpoint, layers, kind)
    page = slot_bytes(checkpoint, experts)
    return ExpertStore(
        checkpoint,
        experts,
        slots * page,
        top_k=dict.fromkeys(layers, TOP_K),
        pinned=[(0, 1), (1, 2)],
        **options,
    )


def slot_bytes(checkpoint: Checkpoint, experts: Any) -> int:
    paths = [str(path) for path in checkpoint.paths]
    sources = [(x.name, [p.source() for p in x.projections.values()]) for x in experts]
    store = core.Store(paths, sources, 1 << 30)
    assert len(set(store.slot_bytes)) == 1
    store.close()
    return store.slot_bytes[0]


def assert_same(found: mx.array, expected: mx.array) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    bits = [
        np.array(a.view(mx.uint16 if a.itemsize == 2 else mx.uint32)) for a in (found, expected)
    ]
    np.testing.assert_array_equal(*bits)


def run_all(store: ExpertStore, layers: Any, tokens: tuple[int, ...], summed: bool = True) -> None:
    """Several forwards of every layer, each against the layer's own arrays."""
    for seed, count in enumerate(tokens):
        for (name, layer), stored in zip(layers.items(), store.layers.values(), strict=True):
            x, ids, scores = inputs(count, seed=seed)
            weights = scores if summed else None
            forward = forward_for(stored.experts, layer)
            expected = resident(layer, stored.experts, forward, x, ids, weights)
            assert_same(store.layers[name].run(x, ids, weights, forward), expected)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", (TOP_K, 3, 5, 8, 2 * EXPERTS))
def test_bits_do_not_depend_on_policy_and_budget(tmp_path: Path, policy: str, slots: int) -> None:
    layers = make_layers()
    folder = write_checkpoint(tmp_path, layers)
    with opened(folder, layers, slots, policy=policy, direct=slots % 2 == 0) as store:
        for summed in (True, False):
            run_all(store, layers, (1, 1, 2, 9, 1, 40), summed)
        stats = store.stats()
    assert stats["resident_bytes"] <= stats["limit_bytes"]
    assert (stats["evictions"] == 0) == (slots == 2 * EXPERTS)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("stacked", (True, False), ids=("stacked", "per expert"))
def test_bits_of_every_format(tmp_path: Path, fmt: str, stacked: bool) -> None:
    layers = make_layers(1, fmt)
    folder = write_checkpoint(tmp_path, layers, stacked)
    with opened(folder, layers, 3) as store:
        run_all(store, layers, (1, 7))


@pytest.mark.parametrize("kind", ("glu", "mlp"))
def test_bits_with_biases_and_other_activations(tmp_path: Path, kind: str) -> None:
    layers = make_layers(1, kind=kind, bias=True)
    folder = write_checkpoint(tmp_path, layers)
    with opened(folder, layers, 3, kind) as store:
        run_all(store, layers, (1, 7, 30))
        run_all(store, layers, (7,), summed=False)


@pytest.mark.parametrize(("kind", "bias"), (("glu", False), ("glu", True), ("mlp", True)))
def test_bits_of_prompts_longer_than_the_kernels_sum_at_a_time(
    kind: str, bias: bool, tmp_path: Path
) -> None:
    layers = make_layers(kind=kind, bias=bias)
    folder = write_checkpoint(tmp_path, layers)
    with opened(folder, layers, 4, kind) as store:
        run_all(store, layers, (2060, 1))
        run_all(store, layers, (2060,), summed=False)


@pytest.mark.parametrize("slots", (2 * TOP_K - 1, TOP_K))
def test_an_error_that_is_kept_keeps_no_slots(slots: int, tmp_path: Path) -> None:
    """Its traceback has the frames, and these had the matrices; with few slots in waves."""
    layers = make_layers(1)
    folder = write_checkpoint(tmp_path, layers)
    (layer,) = layers.values()
    with opened(folder, layers, slots, timeout=0.1) as store:
        (stored,) = store.layers.values()
        forward = forward_for(stored.experts, layer)

        class Fails:
            def whole(self, x: Any, ids: Any, scores: Any, matrices: Any) -> mx.array:
                def fail(_: Any) -> None:
                    raise KeyError("inner")

                try:
                    fail(matrices)
                except KeyError:
                    raise ValueError("not computed")  # noqa: B904

            def rows(self, x: Any, ids: Any, matrices: Any) -> mx.array:
                return self.whole(x, ids, None, matrices)

        def callers(mine: int) -> None:
            raise IndexError("what the caller handles")

        kept = []
        for pairs in ([[0, 1]], [[0, 1], [2, 3]]):
            x = inputs(len(pairs))[0]
            try:
                callers(5)
            except IndexError as error:
                with pytest.raises(ValueError, match="not computed") as raised:
                    stored.run(x, mx.array(pairs), None, Fails())  # type: ignore[arg-type]
                trace = error.__traceback__
                assert trace and trace.tb_next and trace.tb_next.tb_frame.f_locals == {"mine": 5}
            kept.append(raised.value)
            ids = mx.array([[4, 5]])
            x = inputs(1)[0]
            found = stored.run(x, ids, None, forward)
            assert_same(found, resident(layer, stored.experts, forward, x, ids, None))
        assert len(kept) == 2


def test_stats_say_whether_reads_still_go_past_the_page_cache() -> None:
    class Reader:
        direct = True

        def stats(self) -> dict[str, Any]:
            return {"hits": 0, "misses": 0, "prefetch_useful": 0}

    reader: Any = Reader()
    ahead = Ahead(ExpertCounts([("a", 1)]), Trial(reader.stats), lambda *_: None)
    report = StoreReport(reader, {})
    assert store_figures(report, reader, ahead)["direct"] is True
    reader.direct = False  # as when the filesystem refused one
    assert store_figures(report, reader, ahead)["direct"] is False


def test_threads_share_a_store(tmp_path: Path) -> None:
    layers = make_layers()
    folder = write_checkpoint(tmp_path, layers)
    failed: list[BaseException] = []

    def work(store: ExpertStore) -> None:
        try:
            run_all(store, layers, (1, 5, 1))
        except BaseException as error:
            failed.append(error)

    with opened(folder, layers, 5) as store:
        threads = [threading.Thread(target=work, args=(store,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert not failed


def test_counts_say_what_happened(tmp_path: Path) -> None:
    layers = make_layers(1)
    folder = write_checkpoint(tmp_path, layers)
    with opened(folder, layers, 3, prefetch=False) as store:
        (stored,) = store.layers.values()
        forward = forward_for(stored.experts, next(iter(layers.values())))
        x = inputs(1)[0]
        for ids in ([0, 1], [0, 1], [1, 2], [3, 0]):
            stored.run(x, mx.array([ids]), None, forward)
        stats = store.stats()
        assert stats["hits"] == 4 and stats["misses"] == 4  # 3 evicts 1, and 0 is still there
        assert stats["evictions"] == 1
        assert stats["hit_rate"] == 0.5
        each = sum(np.array(a).nbytes for a in expert_arrays(next(iter(layers.values()))))
        assert stats["bytes_read"] == 4 * each
        assert stats["stall_seconds"] > 0
        np.testing.assert_array_equal(store.counts.uses[0][:4], [3, 3, 1, 1])


def expert_arrays(layer: Any) -> list[mx.array]:
    arrays = [a for linear in layer.children().values() for a in linear.values()]
    return [a[0].view(mx.uint16) if a.dtype == mx.bfloat16 else a[0] for a in arrays]


def test_a_limit_below_one_token_is_refused_by_name(tmp_path: Path) -> None:
    layers = make_layers()
    folder = write_checkpoint(tmp_path, layers)
    with pytest.raises(MemoryLimit, match=r"layers\.0.*2 experts take"):
        opened(folder, layers, 1)


def test_wrong_arguments(tmp_path: Path) -> None:
    layers = make_layers(1)
    folder = write_checkpoint(tmp_path, layers)
    for policy in ("best", "lfu:x", "lfu:", "lfu:0", "lru:3", "pinned:2", ""):
        with pytest.raises(InvalidArgument, match="polic"):
            opened(folder, layers, 4, policy=policy)
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(InvalidArgument, match="given the experts to pin"):
        ExpertStore(checkpoint, found_experts(checkpoint, layers), 1 << 20, policy="pinned")
    with opened(folder, layers, 4) as store:
        (stored,) = store.layers.values()
        forward = forward_for(stored.experts, next(iter(layers.values())))
        with pytest.raises(InvalidArgument, match="expert 8 of 8"):
            stored.run(inputs(1)[0], mx.array([[0, 8]]), None, forward)
    with pytest.raises(StoreClosed):
        stored.run(inputs(1)[0], mx.array([[0, 1]]), None, forward)


def test_matrices_keep_their_slots(tmp_path: Path) -> None:
    """Experts stay while any of their matrices does; only those acquired can be routed to."""
    layers = make_layers(1)
    folder = write_checkpoint(tmp_path, layers)
    (layer,) = layers.values()
    with opened(folder, layers, 3, timeout=0.1) as store:
        (stored,) = store.layers.values()
        reader = store._core
        held = reader.acquire(0, np.array([1, 2], np.int32))
        matrices = held.matrices
        held.release()
        with pytest.raises(InvalidArgument, match="released"):
            _ = held.matrices
        with pytest.raises(StoreBusy, match="waited 0.1 s"):
            reader.acquire(0, np.array([3, 4], np.int32))
        x, _, _ = inputs(1)
        ids = mx.array([[1, 2]])
        forward = forward_for(stored.experts, layer)
        found = forward.whole(x, ids, None, matrices)
        assert_same(found, resident(layer, stored.experts, forward, x, ids, None))
        with pytest.raises(InvalidArgument, match="expert 3 is routed to"):
            forward.whole(x, mx.array([[1, 3]]), None, matrices)
        with pytest.raises(InvalidArgument, match="not packed"):
            core.Packed(matrices[0], [1])
        del matrices
        reader.acquire(0, np.array([3, 4], np.int32)).release()
