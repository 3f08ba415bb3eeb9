"""Which experts of a model are in slots of MLX's arrays, under a limit."""

import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .cache_policies import Lfu, Lru, Policy
from .cache_replay import store_policy
from .custom import evaluate
from .errors import MemoryLimit, StoreClosed
from .identity import ModelIdentity
from .store import _logged
from .store_bank import Bank, BankFiles, Shapes
from .store_counts import ExpertCounts, load_counts
from .store_files import Checkpoint, StoredExperts
from .store_report import StoreReport

AHEAD = ("prefetch_useful", "prefetch_issued", "prefetch_wasted", "prefetch_dropped")
COUNTS = ("hits", "misses", "evictions", "bytes_read", "stall_seconds", *AHEAD)


class BankStore:
    """The experts of a model in slots of MLX arrays; what `ExpertStore` is to the CPU kernels.

    Attributes:
        checkpoint, memory, policy, counts, report: as of `ExpertStore`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        experts: Sequence[StoredExperts],
        shapes: Mapping[str, Shapes],
        memory: int,
        *,
        top_k: Mapping[str, int],
        policy: str = "auto",
        counts: Path | None = None,
        identity: ModelIdentity | None = None,
    ):
        """shapes: of one expert's arrays by a layer's name. The others: as for `ExpertStore`."""
        self.checkpoint, self.memory, self.experts = checkpoint, memory, list(experts)
        described = [(x.name, x.experts) for x in experts]
        found = None if counts is None else load_counts(counts, described, identity)
        self.counts = found or ExpertCounts(described, identity)
        self.first = np.concatenate([[0], np.cumsum([x.experts for x in experts])])
        self.policy = "lru" if policy == "auto" else policy
        self._order = _policy(self.policy, int(self.first[-1]), sum(top_k.values()) or 1)
        self.banks = self._make_banks(shapes, top_k)
        self.files = BankFiles(checkpoint)
        self.slot_of = np.full(int(self.first[-1]), -1, np.int32)
        self.queued: list[list[mx.array]] = [[] for _ in experts]
        self.lock, self._process = threading.RLock(), os.getpid()
        sizes = np.repeat([b.slot for b in self.banks], [x.experts for x in self.experts])
        facts = {"policy": self.policy, "limit_bytes": memory, "total_bytes": self.total_bytes}
        self.report = StoreReport(self, facts | {"direct": False})
        self.figures = Figures(self.report, sizes, self.slot_of)
        kept = (os.getpid(), self.files, self.counts, counts, self.figures)
        self._finish = weakref.finalize(self, _finish, *kept)
        self._warm()

    def _make_banks(self, shapes: Mapping[str, Shapes], top_k: Mapping[str, int]) -> list[Bank]:
        """A bank for each shape of expert, with its share of the limit; one entry a layer."""
        size = {name: _nbytes(own) for name, own in shapes.items()}
        self.total_bytes = sum(size[x.name] * x.experts for x in self.experts)
        made: dict[Any, Bank] = {}
        for x in self.experts:
            own = shapes[x.name]
            alike = [y for y in self.experts if shapes[y.name] == own]
            if (key := tuple(own.items())) in made:
                continue
            count = sum(y.experts for y in alike)
            share = self.memory * size[x.name] * count // self.total_bytes
            slots, needed = share // size[x.name], max(top_k.get(y.name, 1) for y in alike)
            if slots < needed:
                raise MemoryLimit(
                    f"{x.name}: one token's {needed} experts take {needed * size[x.name]:,} bytes, "
                    f"and its share of the limit of expert memory is {share:,}; raise it"
                )
            made[key] = Bank(own, min(slots, count))
        keys = [tuple(shapes[x.name].items()) for x in self.experts]
        return [made[key] for key in keys]

    def _warm(self) -> None:
        """The most used experts, before the first token; all where all fit."""
        ranked = self.counts.benefit([bank.slot for bank in self.banks])
        for layer, x in enumerate(self.experts):
            if self.fits(layer):
                ranked += [(layer, expert) for expert in range(x.experts)]
        self._fill(pair for pair in dict.fromkeys(ranked) if self.banks[pair[0]].free)

    def fits(self, layer: int) -> bool:
        """Whether there is a slot for every expert of the layer's bank, so that none ever goes."""
        bank = self.banks[layer]
        pairs = zip(self.experts, self.banks, strict=True)
        return bank.slots >= sum(x.experts for x, b in pairs if b is bank)

    def slots(self, layer: int) -> NDArray[np.int32]:
        return self.slot_of[self.first[layer] : self.first[layer + 1]]

    def acquire(self, layer: int, wanted: NDArray[np.int64]) -> NDArray[np.int32]:
        """Read those of `wanted` (distinct) that are not there; the slot of each expert, [E]."""
        self.files.check_open()
        begin = time.perf_counter()
        for expert in wanted.tolist():
            self._order.used(int(self.first[layer]) + expert)
        missing = wanted[self.slots(layer)[wanted] < 0]
        self.figures.add(hits=len(wanted) - len(missing), misses=len(missing))
        if len(missing):
            held = (self.first[layer] + wanted).tolist()
            self._fill(((layer, expert) for expert in missing.tolist()), held)
            self.figures.add(stall_seconds=time.perf_counter() - begin)
        return self.slots(layer)

    def check_process(self) -> None:
        """Before the lock, which nobody may be left to give back in a forked child."""
        if os.getpid() != self._process:
            raise StoreClosed("the expert store belongs to the parent process; open one here")

    def _fill(self, pairs: Iterable[tuple[int, int]], held: Sequence[int] = ()) -> None:
        """Read these (layer, expert) into slots; all of them, or none is there."""
        taken: list[tuple[int, int, int]] = []
        try:
            for layer, expert in pairs:
                self._take(layer, expert, held, taken)
            wanted = [(self.experts[layer], e, self.banks[layer], s) for layer, e, s in taken]
            self.files.read(wanted)
        except BaseException:
            self._give_back(taken)
            raise
        self.figures.add(bytes_read=sum(bank.slot for _, _, bank, _ in wanted))

    def _take(
        self, layer: int, expert: int, held: Sequence[int], taken: list[tuple[int, int, int]]
    ) -> None:
        """Give an expert a free slot, or that of what goes first by the policy.

        An interrupt can come between any two lines: what is in `taken` is given back then.
        """
        bank = self.banks[layer]
        if not bank.free:
            mine = self._experts_of(bank)
            there = mine[(self.slot_of[mine] >= 0) & ~np.isin(mine, held)]
            victim = int(there[self._order.first(there)])
            owner = int(np.searchsorted(self.first, victim, side="right")) - 1
            evaluate(*self.queued[owner])  # graphs that still read the slot
            self.queued[owner].clear()
            slot = int(self.slot_of[victim])
            self.slot_of[victim] = -1
            bank.free.append(slot)
            self.figures.add(evictions=1)
        taken.append((layer, expert, bank.free[-1]))
        self.slot_of[self.first[layer] + expert] = bank.free.pop()

    def _give_back(self, taken: Sequence[tuple[int, int, int]]) -> None:
        """What is in these slots is nobody's; free is what no expert has."""
        for layer, expert, _ in taken:
            self.slot_of[self.first[layer] + expert] = -1
        for bank in self.banks:
            used = set(self.slot_of[self._experts_of(bank)].tolist())
            bank.free = [slot for slot in reversed(range(bank.slots)) if slot not in used]

    def _experts_of(self, bank: Bank) -> NDArray[np.int64]:
        """The numbers, over all layers, of the experts that can be in a bank."""
        first, layers = self.first, range(len(self.banks))
        return np.concatenate(
            [np.arange(first[i], first[i + 1]) for i in layers if self.banks[i] is bank]
        )

    def stats(self) -> dict[str, Any]:
        """As `ExpertStore.stats`; nothing is read ahead here."""
        return self.figures.stats()

    def check_files(self) -> None:
        self.files.check(path_too=True)

    def close(self) -> None:
        self._finish()


class Figures:
    """What a store did, without the store."""

    def __init__(self, report: StoreReport, sizes: NDArray[Any], slot_of: NDArray[np.int32]):
        """sizes: slot bytes of each expert. slot_of: below 0 where it is in none."""
        self.report, self._sizes, self._slot_of = report, sizes, slot_of
        self._counts: dict[str, Any] = dict.fromkeys(COUNTS, 0)

    def add(self, **counts: float) -> None:
        for name, count in counts.items():
            self._counts[name] += count

    def stats(self) -> dict[str, Any]:
        there = self._slot_of >= 0
        now = {"resident_experts": int(there.sum()), "resident_bytes": self._sizes[there].sum()}
        return self.report.figures(self._counts | {k: int(v) for k, v in now.items()}, False)


def _finish(
    process: int, files: BankFiles, counts: ExpertCounts, path: Path | None, figures: Figures
) -> None:
    """What closing takes, without the store itself."""
    if os.getpid() != process:
        return
    figures.report.final = figures.stats()
    files.close()
    if path is not None:
        _logged(lambda: counts.save(path))


def _policy(name: str, experts: int, uses: int) -> Policy:
    kind, tokens = store_policy(name)
    return Lru(experts) if kind == "lru" else Lfu(experts, tokens * uses)


def _nbytes(shapes: Shapes) -> int:
    return sum(int(np.prod(shape)) * dtype.size for shape, dtype in shapes.values())
