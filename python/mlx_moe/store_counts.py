"""How often each expert was used, and after which, kept between runs for reading ahead."""

import fcntl
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cache import LOCK, cache_dir
from .cache_trace import MOST_EXPERTS as MOST
from .cache_trace import Trace, TracedLayer, TraceRecorder
from .durable import digest, scratch_path
from .errors import CorruptFile, MoEError
from .identity import ModelIdentity, check_same
from .json_fields import Fields, is_count
from .npz_file import Arrays, read_npz, write_npz

log = logging.getLogger(__name__)

FORMAT, VERSION = "mlx_moe.counts", 1
LARGEST = 1 << 22  # of a count; then all of a layer are halved: old habits fade
RECENT, FEWEST = 256, 64  # decoded tokens that are kept, and that a policy is chosen by
PAIRED_TOKENS = 4  # forwards of so few tokens show what follows what
TIMEOUT, POLL = 5.0, 0.02  # seconds: to wait for a file that others write, and between two tries
Counted = NDArray[np.uint32]

_told: dict[Path, tuple[int, int, str]] = {}  # the state of a file when it was last logged


@dataclass
class _Merged:
    """What is written: the counts when it was put together, with others' the total, the last
    tokens, and how many this process had decoded by then."""

    own: list[Counted]
    total: list[Counted]
    recent: list[list[NDArray[np.int64]]]
    decoded: int


class ExpertCounts:
    """Counts of a model's expert layers. `save` adds to what other processes saved meanwhile.

    Attributes:
        recent: the routing of the last tokens decoded, each [k] of every layer.
        layers: (name, experts) of each layer, in the model's order.
        uses: [E] of each layer, tokens that went to each expert.
        follows: [E, E of the next layer] for each layer but the last: how often a token that was
            routed to the one was routed to the other next.
    """

    def __init__(self, layers: Sequence[tuple[str, int]], identity: ModelIdentity | None = None):
        self.layers, self.identity = [(name, int(experts)) for name, experts in layers], identity
        sizes = np.array([experts for _, experts in self.layers], np.int64)
        pairs = sizes[:-1] * sizes[1:]
        # One array each, so that a token is counted in all layers at once; others are views.
        self._uses, self._follows = (np.zeros(int(n.sum()), np.uint32) for n in (sizes, pairs))
        self._first, self._first_pair = np.cumsum(sizes) - sizes, np.cumsum(pairs) - pairs
        self.uses = np.split(self._uses, np.cumsum(sizes)[:-1])
        parts = np.split(self._follows, np.cumsum(pairs)[:-1]) if len(pairs) else []
        self.follows = [part.reshape(-1, n) for part, n in zip(parts, sizes[1:], strict=True)]
        self.recent: deque[list[NDArray[np.int64]]] = deque(maxlen=RECENT)
        self._saved = self._copy()  # what of it is in the file already
        self._decoded = self._decoded_saved = 0  # tokens, and those of them in the file

    def _copy(self) -> list[Counted]:
        return [a.copy() for a in (*self.uses, *self.follows)]

    def add(self, layer: int, ids: Any, before: Any = None) -> None:
        """One forward of a layer: ids [T, k], and those of the same tokens one layer before."""
        if len(ids) > PAIRED_TOKENS:
            counted = np.bincount(ids.ravel(), minlength=len(self.uses[layer]))
            self.uses[layer] += counted.astype(np.uint32)
            return
        for token, chosen in enumerate(ids):  # distinct within a token
            self.uses[layer][chosen] += 1
            if before is not None and len(before) == len(ids):
                self.follows[layer - 1][before[token][:, None], chosen] += 1

    def add_token(self, first: int, token: list[NDArray[Any]]) -> None:
        """One token: its distinct experts [k] of each layer from `first` on."""
        if len({len(ids) for ids in token}) > 1:
            for i, ids in enumerate(token):
                self.add(first + i, ids[None], token[i - 1][None] if i else None)
            return
        ids = np.array(token, np.int64)  # [layers, k]
        last = first + len(token)
        self._uses[self._first[first:last, None] + ids] += 1
        width = np.array([experts for _, experts in self.layers[first + 1 : last]], np.int64)
        rows = self._first_pair[first : last - 1, None] + ids[:-1] * width[:, None]
        self._follows[rows[:, :, None] + ids[1:, None, :]] += 1

    def decoded(self, token: list[NDArray[Any]]) -> None:
        """One token passed every layer, with these experts [k] of each."""
        self.recent.append([np.sort(ids).astype(np.int64) for ids in token])
        self._decoded += 1

    def trace(self, sizes: Sequence[int]) -> Trace | None:
        """The recent tokens as a trace; None for too few to judge by. sizes: slots' bytes."""
        if len(self.recent) < FEWEST:
            return None
        layers = [
            TracedLayer(name, experts, len(ids), size)
            for (name, experts), ids, size in zip(self.layers, self.recent[-1], sizes, strict=True)
        ]
        recorder = TraceRecorder(layers, self.identity)
        for token in self.recent:
            for layer, ids in enumerate(token):
                recorder.add(layer, ids[None])
        return recorder.trace()

    def likely_next(self, layer: int, ids: Any) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Experts of the next layer by the probability that one token, here at ids [k], uses them.

        Returns (experts, probabilities), the likely ones first.
        """
        counted = self.follows[layer]
        rows = counted[np.ix_(np.unique(ids), np.arange(counted.shape[1]))].astype(np.float64)
        totals = rows.sum(axis=1, keepdims=True)
        known = totals[:, 0] > 0
        if not known.any():
            return np.empty(0, np.int64), np.empty(0)
        # A row's sum is its expert's uses times the experts a token takes next.
        shares = (rows[known] / totals[known]).mean(axis=0)
        order = np.argsort(-shares, kind="stable")
        return order, shares[order]

    @property
    def empty(self) -> bool:
        return not any(uses.any() for uses in self.uses)

    def benefit(self, sizes: Sequence[int], overhead: int = 64 << 10) -> list[tuple[int, int]]:
        """(layer, expert) in the order in which having them saves most time a byte.

        sizes: slot bytes of each layer. overhead: bytes that could be read in the time that a read
        costs whatever its size.
        """
        ranked: list[tuple[float, int, int]] = []
        for layer, (uses, size) in enumerate(zip(self.uses, sizes, strict=True)):
            shares = uses / max(1, int(uses.sum()))
            worth = shares * len(uses) * (size + overhead) / size
            ranked += [(-w, layer, e) for e, w in enumerate(worth.tolist()) if w > 0]
        return [(layer, expert) for _, layer, expert in sorted(ranked)]

    def save(
        self,
        path: str | Path,
        lock: AbstractContextManager[Any] | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        """Add what was counted since the last save to the file; whole or not at all.

        Private to the user. Raises MoEError if it cannot be written, or if another process holds
        its lock for longer.

        Args:
            lock: of what counts; not held while a file is waited for, read or written.
            timeout: seconds to wait for other processes.
        """
        path, lock = Path(path), nullcontext() if lock is None else lock
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(path, timeout):
                found = load_counts(path, self.layers, self.identity)
                with lock:
                    merged = self._merged(found)
                self._write(path, merged)
                with lock:
                    self._adopt(merged)
        except OSError as error:
            if isinstance(error, MoEError):
                raise
            raise MoEError(f"cannot write {path}: {error}") from error

    def _merged(self, found: "ExpertCounts | None") -> "_Merged":
        """With what others saved meanwhile."""
        own, recent = self._copy(), list(self.recent)
        total = [array.copy() for array in own]
        if found is not None:
            added = min(self._decoded - self._decoded_saved, len(recent))
            recent = [*found.recent, *recent[len(recent) - added :]][-RECENT:]
            others = (*found.uses, *found.follows)
            for mine, saved, there in zip(total, self._saved, others, strict=True):
                # Halved since: what is left of it.
                mine -= np.minimum(saved, mine)
                mine += there
        for array in total:
            while array.size and int(array.max()) > LARGEST:
                array //= 2
        return _Merged(own, total, recent, self._decoded)

    def _write(self, path: Path, merged: "_Merged") -> None:
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "identity": None if self.identity is None else self.identity.to_json(),
            "layers": self.layers,
        }
        n = len(self.layers)
        arrays: dict[str, NDArray[Any]] = {f"uses.{i}": merged.total[i] for i in range(n)}
        arrays |= {f"follows.{i}": merged.total[n + i] for i in range(n - 1)}
        lengths = [[len(ids) for ids in token] for token in merged.recent]
        arrays["recent_lengths"] = np.array(lengths, np.int32).reshape(-1, n)
        flat = [ids for token in merged.recent for ids in token]
        arrays["recent"] = np.concatenate([np.empty(0, np.int64), *flat]).astype(np.uint16)
        scratch = scratch_path(path)  # made first, so that it is private from its first byte
        os.close(os.open(scratch, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
        write_npz(path, meta, arrays)

    def _adopt(self, merged: "_Merged") -> None:
        """Take what was written, and what was counted while it was."""
        counted = zip((*self.uses, *self.follows), merged.own, merged.total, strict=True)
        for own, before, total in counted:
            own += total - before  # modulo 2**32, where that is below 0
        since = min(self._decoded - merged.decoded, RECENT)
        later = list(self.recent)[len(self.recent) - since :]
        self.recent = deque([*merged.recent, *later], maxlen=RECENT)
        self._saved, self._decoded_saved = merged.total, merged.decoded

    @classmethod
    def load(cls, path: str | Path) -> "ExpertCounts":
        """Read a file that `save` wrote; InvalidArgument if there is none, CorruptFile if it is
        another kind of file or its numbers cannot be."""
        meta, arrays = read_npz(path, FORMAT, VERSION)
        try:
            take = Fields(meta)
            identity = take.optional("identity", lambda k: ModelIdentity.from_json(take(k), k))
            layers = [(name, experts) for name, experts in take.items("layers")]
            if not all(isinstance(name, str) and is_count(n) and n <= MOST for name, n in layers):
                raise take.wrong("layers", "names, each with a number of experts")
            sizes = [experts for _, experts in layers]
            for i, shape in enumerate(zip(sizes, sizes[1:])):  # noqa: B905
                arrays.check(f"follows.{i}", np.uint32, shape)
            counts = cls(layers, identity)
            for kind, own in (("uses", counts.uses), ("follows", counts.follows)):
                for i, array in enumerate(own):
                    array[...] = arrays.take(f"{kind}.{i}", np.uint32, array.shape)
            counts.recent.extend(_recent(arrays, counts.layers))
        except (TypeError, ValueError) as error:
            raise CorruptFile(f"{path}: {error}") from error
        counts._saved = counts._copy()
        return counts


def _recent(arrays: Arrays, layers: list[tuple[str, int]]) -> Iterator[list[NDArray[np.int64]]]:
    """The tokens of a file; ValueError where they cannot be."""
    lengths = arrays.take("recent_lengths", np.int32, (None, len(layers))).astype(np.int64)
    if len(lengths) > RECENT or (lengths < 1).any():
        raise CorruptFile("the lengths of recent tokens cannot be")
    flat = arrays.take("recent", np.uint16, (int(lengths.sum()),)).astype(np.int64)
    parts = iter(np.split(flat, np.cumsum(lengths)[:-1]) if lengths.size else ())
    for _ in lengths:
        token = [next(parts) for _ in layers]
        if any((ids >= experts).any() for ids, (_, experts) in zip(token, layers, strict=True)):
            raise CorruptFile("an expert is out of range")
        yield token


def load_counts(
    path: Path, layers: Sequence[tuple[str, int]], identity: ModelIdentity | None
) -> ExpertCounts | None:
    """The counts of this very model, None where there are none; a file that is no use is logged,
    and no error."""
    try:
        if not path.exists():
            return None
        counts = ExpertCounts.load(path)
        if identity is not None and counts.identity is not None:
            check_same(counts.identity, identity, str(path))
        if counts.layers != [(name, int(experts)) for name, experts in layers]:
            raise CorruptFile(f"{path} is of other layers")
    except (MoEError, OSError) as error:
        _tell_once(path, f"{error}; counting starts anew")
        return None
    return counts


def _tell_once(path: Path, text: str) -> None:
    """For each state that a file is in."""
    try:
        facts = path.stat()
        state = facts.st_mtime_ns, facts.st_size, text
    except OSError:
        state = 0, 0, text
    if _told.get(path) != state:
        _told[path] = state
        log.warning("%s", text)


def counts_path(identity: ModelIdentity) -> Path:
    """Where the counts of a model are kept for this user."""
    parts = (identity.config, identity.headers, identity.sample, identity.layers)
    return cache_dir("counts") / f"{digest([identity.name, *parts])[:32]}.npz"


@contextmanager
def locked(path: Path, timeout: float) -> Iterator[None]:
    """While open no other process that asks for this has the file; a process that ends lets go.

    Raises TimeoutError if another one has it for so many seconds.
    """
    lock = path.with_name(f".{path.name}{LOCK}")
    handle = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + timeout
        while not _taken(handle):
            if time.monotonic() >= until:
                raise TimeoutError(f"another process held {lock} for {timeout:g} s")
            time.sleep(POLL)
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # which a child, forked meanwhile, has open too
        os.close(handle)


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
