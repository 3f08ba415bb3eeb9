"""The processes (ranks) that share a model's experts, and what they say to each other."""

import atexit
import json
import logging
import os
import platform
import signal
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from . import core
from .distributed_watch import Watchdog
from .errors import InvalidArgument, RankLost, RankMismatch

log = logging.getLogger("mlx_moe")

Split = Literal["auto", "all", "none"]
SPLITS = ("auto", "all", "none")
TIMEOUT = 60.0  # seconds
LONGEST = 1e6  # seconds of a timeout that every system's timers take
CHECKS = 2  # values at the end of each sum by which ranks see that they routed alike
# What launchers set for each rank: ring and JACCL, and MPI's own.
SIZES = ("MLX_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE")
LAUNCHED = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")

_local = threading.local()  # a thread's stream
_of_groups: dict[int, "Ranks"] = {}  # by id; they hold their groups


class Ranks:
    """A group of processes that each hold some of the experts.

    Attributes:
        group: of `mx.distributed`; the backend (ring, MPI, JACCL) is what it was made with.
        rank, size: the number of this process, and of all.
        split: which experts are cut along their inner features (ff), a slice for each rank:
            "all", "none", or "auto": those for which one rank would wait for another.
        counts: where a histogram of routing comes from, see `distributed_counts`; None: uniform.
        timeout: seconds after which a rank that says nothing, or does not come to a sum that the
            others wait in, is given up: this process ends with an error.
        sends_routing: whether the others take x, ids and scores from rank 0. Otherwise all compute
            alike, and a checksum in every sum shows it: it costs no message of its own.
    """

    def __init__(
        self,
        group: "mx.distributed.Group | None" = None,
        *,
        split: Split = "auto",
        counts: Any = None,
        timeout: float = TIMEOUT,
    ):
        """Meet the others: every rank makes one, with the same arguments.

        Raises:
            InvalidArgument: an argument is not as above.
            RankMismatch: other versions of mlx_moe or MLX, or other arguments, elsewhere.
            RankLost: a rank ended meanwhile.
        """
        if split not in SPLITS:
            raise InvalidArgument(f"split is {split!r}; expected one of {', '.join(SPLITS)}")
        _check_timeout(timeout)
        self.group = group if group is not None else mx.distributed.init()
        if not isinstance(self.group, mx.distributed.Group):
            raise InvalidArgument(
                f"group is {type(group).__name__}; expected what mx.distributed.init() returns"
            )
        self.rank, self.size = self.group.rank(), self.group.size()
        self.split, self.counts, self.timeout = split, counts, float(timeout)
        self.watchdog = Watchdog(self.rank, self.size, self.timeout)
        self.sends_routing = False
        if self.size == 1:
            return
        self.watchdog.start()
        try:
            self.agree({"split": split, "timeout": self.timeout, **_versions()})
            arithmetic = self.gather(_arithmetic())
            self.sends_routing = any(other != arithmetic[0] for other in arithmetic)
            self.watchdog.connect(self.gather)
        except BaseException as error:
            self.close(str(error))
            raise
        atexit.register(self._exit)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        return self

    # --- what ranks say to each other; all call these in the same order -----------------------

    @contextmanager
    def waiting(self, what: str, patience: float = 1.0) -> Iterator[None]:
        """Around what waits for the others: ends the process if they do not come within the
        timeout, times `patience`."""
        with self.watchdog.waiting(what, patience):
            try:
                yield
            except RuntimeError as error:  # as the ring says that a connection broke
                raise RankLost(self.watchdog.lost(what, str(error))) from error

    def all_sum(self, array: mx.array, what: str = "a sum", patience: float = 1.0) -> mx.array:
        """The sum over ranks, evaluated; the same bits on each.

        Raises:
            RankLost: a rank ended or cannot be reached.
        """
        mx.eval(array)
        with self.waiting(what, patience):
            total = self.lazy_sum(array)
            mx.eval(total)
        return total

    def lazy_sum(self, array: mx.array) -> mx.array:
        """The sum over ranks, as a graph. A thread's sums are done one after the other, on one
        stream for all groups: two at a time could meet in another order elsewhere."""
        if not hasattr(_local, "stream"):
            _local.stream = mx.new_stream(mx.Device(mx.cpu))
        return mx.distributed.all_sum(array, group=self.group, stream=_local.stream)

    def lazy_first(self, array: mx.array) -> mx.array:
        """Rank 0's array, as a graph. Elsewhere too it comes after the sums that the array needs:
        zeros alone would come before them, and meet another sum."""
        if not self.first:
            (array,) = mx.depends([mx.zeros_like(array)], [array])
        return self.lazy_sum(array)

    def from_first(self, array: mx.array, what: str = "rank 0's values") -> mx.array:
        """Rank 0's array, of the same shape and dtype everywhere."""
        return self.all_sum(array if self.first else mx.zeros_like(array), what)

    def gather(self, value: Any, patience: float = 1.0) -> list[Any]:
        """A JSON value of every rank, by rank."""
        data = np.frombuffer(json.dumps(value, sort_keys=True).encode(), np.uint8)
        sizes = np.zeros(self.size, np.int32)
        sizes[self.rank] = len(data)
        sizes = np.array(self.all_sum(mx.array(sizes), "the start", patience))
        rows = np.zeros((self.size, int(sizes.max())), np.uint8)
        rows[self.rank, : len(data)] = data
        rows = np.array(self.all_sum(mx.array(rows), "the start"))
        try:
            texts = [bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]
            return [json.loads(text) for text in texts]
        except ValueError as error:
            raise RankMismatch(
                f"{self}: what the other ranks sent cannot be read; start all of them with the "
                "same version and the same command"
            ) from error

    def agree(self, facts: Mapping[str, Any], patience: float = 1.0) -> None:
        """Raise RankMismatch, on all ranks, unless these are the same on each."""
        found = self.gather(dict(facts), patience)
        differ = [
            f"{key} is {found[0].get(key)!r} on rank 0 and {other.get(key)!r} on rank {rank}"
            for rank, other in enumerate(found)
            for key in {**found[0], **other}
            if other.get(key) != found[0].get(key)
        ]
        if differ:
            raise RankMismatch(
                f"the ranks do not fit together: {'; '.join(sorted(set(differ)))}; start all of "
                "them with the same version, model and options"
            )

    def share_random_state(self) -> None:
        """Have all ranks draw the random numbers that rank 0 will."""
        state: Any = mx.random.state
        key = np.array(self.from_first(state[0], "the random state"))
        mx.random.seed(int(key[0]) << 32 | int(key[1]))  # a key is its seed

    def sampler(self, sample: Any) -> Any:
        """`sample`, a function from log-probabilities to tokens, with rank 0's choice on all."""

        def first_ones(logprobs: mx.array) -> mx.array:
            return self.lazy_first(sample(logprobs))

        return first_ones

    # --- the sum of a layer ---------------------------------------------------------------------

    def lazy_routing(self, *own: mx.array) -> list[mx.array]:
        """Rank 0's x, ids and scores, as a graph: one message, of f32, which holds them exactly
        (there are fewer than 2**24 experts). Two would meet in any order."""
        flat = mx.concatenate([array.astype(mx.float32).reshape(-1) for array in own])
        sent = self.lazy_first(flat)
        ends = np.cumsum([array.size for array in own]).tolist()
        parts = mx.split(sent, ends[:-1])
        return [p.reshape(a.shape).astype(a.dtype) for p, a in zip(parts, own, strict=True)]

    def routing(self, *own: mx.array, what: str) -> list[mx.array]:
        """The same, evaluated."""
        mx.eval(*own)
        with self.waiting(what):
            sent = self.lazy_routing(*own)
            mx.eval(*sent)
        return sent

    def checksums(self, *facts: Any) -> NDArray[np.float32]:
        """[CHECKS] values that add up to zero over ranks if, and all but only if, facts agree."""
        crc = 0
        for fact in facts:
            data = fact.tobytes() if isinstance(fact, np.ndarray) else repr(fact).encode()
            crc = zlib.crc32(data, crc)
        weight = self.size - 1 if self.first else -1  # whole numbers, exact in f32
        return np.array([weight * (crc & 0xFFFF), weight * (crc >> 16)], np.float32)

    def finish(self) -> None:
        """Wait for the others to be done too, and part."""
        if self.size > 1:
            self.all_sum(mx.array(0), "the end")
        self.close()

    def _exit(self) -> None:
        error = getattr(sys, "last_value", None)  # what ends this process
        self.close(None if error is None else f"{type(error).__name__}: {error}")

    def close(self, failure: str | None = None) -> None:
        """Tell the others that this rank is done, or why it fails: they end too."""
        self.watchdog.close(failure)


def ranks_of(group: Any) -> Ranks:
    """The ranks of a group of `mx.distributed`; one `Ranks` is returned as it is.

    Several models that are given one group share its lines and its watch. Groups are told apart
    by what `mx.distributed.init()` or `split()` returned: keep that, and give it again.
    """
    if isinstance(group, Ranks):
        return group
    known = _of_groups.get(id(group))
    if known is None or known.watchdog.closed:
        known = _of_groups[id(group)] = Ranks(group)
    return known


def join(**options: Any) -> Ranks | None:
    """The ranks that a launcher (`mlx.launch -n 2 ...`) started, or None if this runs alone.

    Raises:
        RankLost: a launcher started this process, and the others were not found.
    """
    if not any(name in os.environ for name in LAUNCHED):
        return None
    timeout = options.get("timeout", TIMEOUT)
    _check_timeout(timeout)
    try:
        with _woken_after(timeout):
            group = mx.distributed.init()
    except RuntimeError as error:
        raise RankLost(
            f"the ranks did not meet within {timeout:g} s: {error}; were all of them started?"
        ) from error
    if group.size() > 1:
        return Ranks(group, **options)
    if _others_launched():
        raise RankLost(
            "this process was launched as one of several ranks, and MLX found no backend to reach "
            "the others with; `mlx.launch --backend ring` works with every MLX"
        )
    return None


def _others_launched() -> bool:
    if Path(os.environ.get("MLX_HOSTFILE", os.devnull)).read_text().strip():
        return True
    counts = [os.environ.get(name, "1") for name in SIZES]
    return any(count.isdigit() and int(count) > 1 for count in counts)


def _check_timeout(timeout: float) -> None:
    if not 0 < timeout <= LONGEST:
        raise InvalidArgument(f"timeout is {timeout!r}; expected seconds, 0 to {LONGEST:g}")


@contextmanager
def _woken_after(seconds: float) -> Iterator[None]:
    """MLX waits for the others for ever, and no thread of ours runs meanwhile: a signal ends the
    system call that it waits in, which is an error to it."""
    if threading.current_thread() is not threading.main_thread() or not seconds > 0:
        yield
        return
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _versions() -> dict[str, str]:
    from . import __version__

    return {"mlx_moe": __version__, "mlx": version("mlx")}


def _arithmetic() -> list[Any]:
    """What the last bits of a result depend on."""
    device = mx.default_device().type
    return [str(device), core.isa(), core.num_threads(), platform.machine(), platform.system()]
