"""Experts that stay in the checkpoint's files and are read into slots when they are routed to."""

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import core
from .cache_policies import ONE
from .cache_replay import TOKENS, best_policy, store_policy
from .errors import MemoryLimit, MoEError
from .identity import ModelIdentity
from .machine import memory_bytes
from .store_counts import ExpertCounts, load_counts
from .store_files import Checkpoint, StoredExperts, expert_bytes, slot_bytes
from .store_prefetch import Ahead, Trial
from .store_report import StoreReport
from .store_run import StoredLayer

log = logging.getLogger(__name__)

READERS = 4  # threads
TIMEOUT = 60.0  # seconds to wait for slots that other forwards hold
KEEP = 60.0  # seconds between two savings of the counts while tokens are decoded


class ExpertStore:
    """The routed experts of a model, in memory as far as a limit allows.

    Safe with several threads. Closed when nothing refers to it any more; `close`, or use as a
    context manager, does it earlier.

    Attributes:
        checkpoint: whose files it reads.
        memory: the limit in bytes, of all slots together.
        policy: by which experts go.
        counts: how often experts were used, kept online.
        report: its figures, which outlive it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layers: Sequence[StoredExperts],
        memory: int,
        *,
        top_k: Mapping[str, int] | None = None,
        policy: str = "auto",
        pinned: Sequence[tuple[int, int]] = (),
        counts: str | Path | None = None,
        identity: ModelIdentity | None = None,
        prefetch: bool = True,
        warm: bool = True,
        readers: int = READERS,
        direct: bool | None = None,
        timeout: float = TIMEOUT,
    ):
        """Open the files and begin to read the most used experts.

        Args:
            checkpoint: as `Checkpoint.open` read it.
            layers: as `stored_experts` found them, in the order in which a token passes them.
            memory: bytes of slots.
            top_k: experts a token by a layer's name; the limit must hold those of any layer.
            policy: "lru", "lfu", "lfu:TOKENS" (counts are halved after so many tokens), "pinned",
                or "auto": the one that would have read least for the tokens that were decoded
                last, as kept with the counts; "lfu:32" while there are too few.
            pinned: (layer, expert) that go last under "pinned".
            counts: the file that counts are kept in between runs, see `counts_path`.
            identity: the model; counts of another one are not used.
            prefetch: read ahead while decoding, for as long as it helps.
            warm: read the most used experts at once, in the background.
            readers: threads that read.
            direct: read past the page cache; None: where that cannot hold what the slots do not.
            timeout: seconds to wait for slots that other forwards hold.

        Raises:
            MemoryLimit: the limit cannot hold one token's experts of a layer.
            CorruptFile, ReadFailed, FileChanged: see errors.
        """
        self.checkpoint, self.memory = checkpoint, int(memory)
        self.experts = list(layers)
        self._top_k = dict(top_k or {})
        first = np.concatenate([[0], np.cumsum([x.experts for x in layers])])
        if direct is None:
            direct = expert_bytes(checkpoint, self.experts) + self.memory > (memory_bytes() or 0)
        self._path = None if counts is None else Path(counts)
        described = [(x.name, x.experts) for x in layers]
        found = None if self._path is None else load_counts(self._path, described, identity)
        self.counts = found or ExpertCounts(described, identity)
        sizes = [slot_bytes(checkpoint, layer) for layer in layers]
        self._check_limit(sizes)
        self.policy = self._choose(sizes) if policy == "auto" else policy
        kind, tokens = store_policy(self.policy, bool(pinned))
        uses = sum(self._top_k.get(layer.name, 1) for layer in layers)
        self._core = core.Store(
            [str(path) for path in checkpoint.paths],
            [(x.name, [p.source() for p in x.projections.values()]) for x in layers],
            self.memory,
            policy=kind,
            period=tokens * uses,
            counts=self._expected(tokens) if kind == "lfu" else [],
            pinned=[int(first[layer]) + expert for layer, expert in pinned],
            readers=readers,
            direct=direct,
            timeout=timeout,
        )
        self.ahead = Ahead(self.counts, Trial(self._core.stats), self._core.prefetch)
        if not prefetch:
            self.ahead.trial.decided = False
        facts = {
            "policy": self.policy,
            "limit_bytes": self.memory,
            "total_bytes": self.total_bytes,
        }
        self.report = StoreReport(self, facts)
        self._keep_at, self._warned = time.monotonic() + KEEP, False
        kept = (os.getpid(), self._core, self.ahead, self.report, self._path)
        self._finish = weakref.finalize(self, _finish, *kept)
        if warm and not self.counts.empty:
            self.warm()

    @property
    def layers(self) -> dict[str, StoredLayer]:
        """By name; `run` of each is the forward of one expert layer. Made anew at each look: they
        refer to the store."""
        return {x.name: StoredLayer(self, i, x) for i, x in enumerate(self.experts)}

    def _choose(self, sizes: list[int]) -> str:
        """The policy that would have been best for what was decoded last."""
        usual = f"lfu:{TOKENS}"
        try:
            trace = self.counts.trace(sizes)
            return usual if trace is None else best_policy(trace, self.memory)
        except MoEError as error:  # tokens of another top-k, or no tokens of this model
            log.warning("the tokens decoded last tell nothing of this run: %s", error)
            return usual

    def _expected(self, tokens: int) -> list[int]:
        """What lfu's counts begin with: as if so many tokens had been like those of before."""
        if self.counts.empty:
            return []
        found: list[int] = []
        for layer, uses in zip(self.experts, self.counts.uses, strict=True):
            share = uses / max(1, int(uses.sum()))
            found += (share * ONE * tokens * self._top_k.get(layer.name, 1)).astype(int).tolist()
        return found

    def _check_limit(self, sizes: list[int]) -> None:
        for layer, size in zip(self.experts, sizes, strict=True):
            needed = self._top_k.get(layer.name, 1)
            if needed * size > self.memory:
                raise MemoryLimit(
                    f"{layer.name}: one token's {needed} experts take {needed * size:,} bytes, and "
                    f"the limit of expert memory is {self.memory:,}; raise it"
                )

    @property
    def total_bytes(self) -> int:
        """Slots for every expert: a limit beyond that is of no use."""
        sizes = self._core.slot_bytes
        return sum(x.experts * size for x, size in zip(self.experts, sizes, strict=True))

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._core.direct

    def warm(self) -> None:
        """Read the most used experts into free room, in the background."""
        sizes, left = self._core.slot_bytes, self.memory
        for layer, expert in self.counts.benefit(sizes):
            if sizes[layer] <= left:
                left -= sizes[layer]
                self._core.prefetch(layer, np.array([expert], np.int32), warm=True)

    def stats(self) -> dict[str, Any]:
        """Counts since it was opened: `core.Store.stats`, hit_rate, policy, limit and total of
        bytes, and whether reads ahead are on (None: still tried)."""
        return _figures(self.report, self._core, self.ahead)

    def check_files(self) -> None:
        """Raise FileChanged if a file was replaced since it was opened: call it once the other
        weights are loaded, which come from the same paths."""
        self._core.check_files()

    def save_counts(self) -> None:
        """Add the counts to their file, if there is one."""
        if self._path is not None:
            self.ahead.save(self._path)

    def keep_counts(self) -> None:
        """Save the counts now and then, so that a process that is killed has kept most of them;
        in the background, so that no forward waits for a disk or another process."""
        if self._path is None or time.monotonic() < self._keep_at:
            return
        self._keep_at = math.inf
        try:
            threading.Thread(target=self._keep, name="mlx_moe counts", daemon=True).start()
        except RuntimeError:  # the system starts no thread
            self._keep_at = time.monotonic() + KEEP

    def _keep(self) -> None:
        try:
            self.save_counts()
            self._warned = False
        except MoEError as error:
            log.log(logging.DEBUG if self._warned else logging.WARNING, "%s", error)
            self._warned = True
        finally:
            self._keep_at = time.monotonic() + KEEP

    def close(self) -> None:
        """Stop reading and keep the counts; a failure to write them is logged."""
        self._finish()

    def __enter__(self) -> "ExpertStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExpertStore":
        return self  # a copied model reads from the same store


def _finish(
    process: int, reader: core.Store, ahead: Ahead, report: StoreReport, path: Path | None
) -> None:
    """What closing takes, without the store itself."""
    if os.getpid() != process:  # a forked child has neither its threads nor its counts
        return
    report.final = _figures(report, reader, ahead)
    reader.close()
    if path is not None:
        _logged(lambda: ahead.save(path))


def _figures(report: StoreReport, reader: core.Store, ahead: Ahead) -> dict[str, Any]:
    found = reader.stats() | {"direct": reader.direct}  # which a filesystem can refuse at any read
    return report.figures(found, ahead.trial.decided)


def _logged(save: Callable[[], None]) -> None:
    try:
        save()
    except MoEError as error:
        log.warning("%s", error)


__all__ = ["Checkpoint", "ExpertStore", "StoredExperts", "StoredLayer"]
