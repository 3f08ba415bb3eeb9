"""Policies against models by brute force, the real store against the simulation, and Belady's
optimum against every possible choice."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_moe import core
from mlx_moe.cache_policies import Belady, Lfu, Lru, Pinned, Simulation, next_uses, waves
from mlx_moe.errors import InvalidArgument, MemoryLimit

Steps = list[list[int]]


def random_steps(rng: np.random.Generator, experts: int, most: int, count: int) -> Steps:
    """Forwards of distinct experts, some of them popular."""
    weights = 1.0 / np.arange(1, experts + 1)
    weights /= weights.sum()
    sizes = rng.integers(1, most + 1, count)
    return [sorted(rng.choice(experts, n, replace=False, p=weights).tolist()) for n in sizes]


def by_definition(
    steps: Steps,
    sizes: list[int],
    budget: int,
    kind: str,
    period: int = 1,
    pinned: Any = (),
    initial: Any = None,
) -> list[tuple[int, ...]]:
    """(misses, experts in memory) after each forward, from the definitions alone: the whole past
    is looked at for every decision."""
    there: set[int] = set()
    past: list[int] = []
    results = []

    def worth(expert: int) -> Any:
        uses = [i for i, e in enumerate(past, 1) if e == expert]
        last = uses[-1] if uses else 0
        if kind == "pinned":
            return expert in pinned, last, expert
        if kind == "lru":
            return last, expert
        count = (
            0 if initial is None else int(initial[expert])
        )  # in 256ths, halved after every `period` uses of any expert
        for i, e in enumerate(past, 1):
            count += 256 * (e == expert)
            if i % period == 0:
                count //= 2
        return count, last, expert

    for step in steps:
        past += step
        missing = [e for e in step if e not in there]
        for expert in missing:
            while sum(sizes[e] for e in there) + sizes[expert] > budget:
                there.remove(min(there - set(step), key=worth))
            there.add(expert)
        results.append((len(missing), *sorted(there)))
    return results


def simulated(steps: Steps, sizes: list[int], budget: int, policy: Any) -> list[tuple[int, ...]]:
    bank = Simulation(sizes, budget, policy)
    return [(bank.access(step).misses, *np.flatnonzero(bank.there).tolist()) for step in steps]


@pytest.mark.parametrize("kind", ("lru", "lfu", "pinned"))
def test_simulated_policies_are_what_their_definitions_say(kind: str) -> None:
    for seed in range(25):
        rng = np.random.default_rng(seed)
        experts, most = int(rng.integers(4, 12)), int(rng.integers(1, 4))
        steps = random_steps(rng, experts, most, 60)
        sizes = rng.integers(1, 4, experts).tolist()
        budget = int(rng.integers(3 * most, sum(sizes) + 3))
        period, pinned = int(rng.integers(1, 20)), {0, 3}
        initial = rng.integers(0, 2000, experts) if seed % 2 else None
        policy = {
            "lru": lambda n=experts: Lru(n),
            "lfu": lambda n=experts, p=period, i=initial: Lfu(n, p, i),
            "pinned": lambda n=experts, p=pinned: Pinned(n, p),
        }[kind]()
        expected = by_definition(steps, sizes, budget, kind, period, pinned, initial)
        assert simulated(steps, sizes, budget, policy) == expected


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two layers of 6 experts: a page a slot in the first, three in the second."""
    path = tmp_path_factory.mktemp("policies") / "model.safetensors"
    tensors = {"a": mx.zeros((6, 8, 256)), "b": mx.zeros((6, 24, 128))}
    mx.save_safetensors(str(path), tensors)
    layers = [(n, [("dense", 0, 0, [[n], [], [], [], []])]) for n in tensors]
    return [str(path)], layers


@pytest.mark.parametrize("kind", ("lru", "lfu", "pinned"))
def test_the_store_decides_as_the_simulation(checkpoint: Any, kind: str) -> None:
    paths, layers = checkpoint
    for seed in range(8):
        rng = np.random.default_rng(seed)
        period, pinned = int(rng.integers(1, 20)), [0, 3, 8]
        counts = rng.integers(0, 2000, 12 * (seed % 2))
        budget = int(rng.integers(9, 26)) * 4096
        store = core.Store(
            paths, layers, budget, policy=kind, period=period, counts=counts, pinned=pinned
        )
        assert store.slot_bytes == [8192, 12288]
        policy: Any = Lru(12)
        if kind != "lru":
            policy = (
                Lfu(12, period, counts if len(counts) else None)
                if kind == "lfu"
                else Pinned(12, pinned)
            )
        bank = Simulation([8192] * 6 + [12288] * 6, budget, policy)
        for step in random_steps(rng, 6, 3, 150):
            layer = int(rng.integers(2))
            store.acquire(layer, np.array(step, np.int32)).release()
            bank.access(np.array(step) + 6 * layer)
            there = [e + 6 * n for n in range(2) for e in store.resident(n)]
            assert there == np.flatnonzero(bank.there).tolist()
        stats = store.stats()
        for name in ("hits", "misses", "evictions"):
            assert stats[name] == getattr(bank.total, name)
        assert stats["resident_bytes"] == bank.used
        store.close()


def fewest_misses(steps: Steps, slots: int) -> int:
    """Over every possible choice of what to evict."""

    @cache
    def best(at: int, there: frozenset[int]) -> int:
        if at == len(steps):
            return 0
        wanted = frozenset(steps[at])
        missing = len(wanted - there)
        states = {there | wanted}
        while any(len(state) > slots for state in states):
            states = {s - {e} for s in states for e in s - wanted if len(s) > slots} | {
                s for s in states if len(s) <= slots
            }
        return missing + min(best(at + 1, state) for state in states)

    return best(0, frozenset())


@settings(max_examples=60)
@given(st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=2), max_size=14), st.integers(2, 4))
def test_belady_misses_least_of_all(forwards: list[set[int]], slots: int) -> None:
    steps = [sorted(step) for step in forwards]
    uses = np.array([e for step in steps for e in step], np.int64)
    bank = Simulation([1] * 6, slots, Belady(6, uses))
    for step in steps:
        bank.access(step)
    assert bank.total.misses == fewest_misses(steps, slots)
    for policy in (Lru(6), Lfu(6, 3), Pinned(6, [1])):
        other = Simulation([1] * 6, slots, policy)
        for step in steps:
            other.access(step)
        assert other.total.misses >= bank.total.misses


def test_next_uses() -> None:
    never = np.iinfo(np.int64).max
    found = next_uses(np.array([3, 1, 3, 2, 1, 3]))
    np.testing.assert_array_equal(found, [2, 4, 5, never, never, never])
    assert len(next_uses(np.empty(0, np.int64))) == 0


def test_waves_cover_each_expert_once_and_fit() -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        wanted = np.sort(rng.choice(40, int(rng.integers(1, 30)), replace=False))
        there = rng.random(len(wanted)) < 0.4
        most = int(rng.integers(1, 32))
        parts = waves(wanted, there, most)
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), wanted)
        if len(wanted) <= most:
            assert len(parts) == 1
        else:  # two parts fit together: one is computed, one is read
            assert all(len(part) <= max(1, most // 2) for part in parts)
            size = max(1, most // 2)
            early = np.concatenate(parts[: -(-int(there.sum()) // size)] or [np.empty(0)])
            assert set(wanted[there]) <= set(early)


def test_wrong_arguments() -> None:
    with pytest.raises(MemoryLimit, match="3 experts of 6 bytes"):
        Simulation([2, 2, 2], 5, Lru(3)).access([0, 1, 2])
    with pytest.raises(InvalidArgument, match="period"):
        Lfu(3, 0)


@pytest.mark.parametrize("kind", ("lru", "lfu", "pinned"))
def test_the_cores_replay_counts_as_the_simulation(kind: str) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        period, pinned = int(rng.integers(1, 20)), [0, 3, 8]
        counts = rng.integers(0, 2000, 12 * (seed % 2))
        budget = int(rng.integers(9, 26)) * 4096
        policy: Any = Lru(12)
        if kind != "lru":
            policy = (
                Lfu(12, period, counts if len(counts) else None)
                if kind == "lfu"
                else Pinned(12, pinned)
            )
        bank = Simulation([8192] * 6 + [12288] * 6, budget, policy)
        steps = random_steps(rng, 6, 3, 100)
        layers = rng.integers(0, 2, len(steps)).astype(np.int32)
        for step, layer in zip(steps, layers.tolist(), strict=True):
            bank.access(np.array(step) + 6 * layer)
        given = (
            np.array([6, 6], np.int32),
            np.array([8192, 12288]),
            layers,
            np.concatenate([[0], np.cumsum([len(step) for step in steps])]),
            np.concatenate(steps).astype(np.int32),
        )
        found = core.replay(
            *given, budget, policy=kind, period=period, counts=counts, pinned=pinned
        )
        for name in ("hits", "misses", "evictions", "bytes_read"):
            assert found[name] == getattr(bank.total, name)


def test_the_cores_replay_refuses_what_cannot_be() -> None:
    experts, sizes = np.array([4], np.int32), np.array([4096])
    one, two = np.array([0], np.int32), np.array([0, 2])
    ids = np.array([1, 2], np.int32)
    core.replay(experts, sizes, one, two, ids, 8192)
    for wrong, says in (
        ((experts, sizes, one, two, ids, 4096), "exceed 4096"),
        ((experts, sizes, one + 1, two, ids, 8192), "layer 1 of 1"),
        ((experts, sizes, one, two, ids + 2, 8192), "expert 4 of 4"),
        ((experts, sizes, one, two - 1, ids, 8192), "offsets"),
        ((experts, sizes, one, two, ids[:1], 8192), "offsets"),
        ((experts, np.array([1, 2]), one, two, ids, 8192), "sizes"),
        ((experts * 0, sizes, one, two, ids, 8192), "no experts"),
        ((experts.astype(np.int64), sizes, one, two, ids, 8192), "int32"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            core.replay(*wrong)
