"""How much memory the experts of a model may take, and how it is used."""

from dataclasses import dataclass
from typing import Any

from .cache_replay import store_policy
from .errors import InvalidArgument
from .machine import available_bytes, memory_bytes, resident_bytes
from .sizes import share, size_bytes

AUTO = "auto"
SPARE = 0.1  # of the machine's memory, which "auto" leaves for the text's cache and activations


@dataclass(frozen=True)
class ExpertMemory:
    """A limit and how it is used.

    Attributes:
        limit: bytes, or as text "8GB", "500MiB", "25%" (of all experts), or "auto": what is free.
        policy: by which experts go: "lru", "lfu", "lfu:TOKENS" or "auto", see `ExpertStore`.
        prefetch: read ahead while decoding, for as long as it helps.
        counts: keep counts of what was used for the next run, and begin with those of the last.
        direct: read past the page cache; None: where that cannot hold what the limit does not.
    """

    limit: int | str
    policy: str = AUTO
    prefetch: bool = True
    counts: bool = True
    direct: bool | None = None

    @classmethod
    def of(cls, given: Any) -> "ExpertMemory":
        """From an `expert_memory` argument."""
        return given if isinstance(given, cls) else cls(given)

    def bytes(self, total: int, others: int) -> int:
        """The limit in bytes, `total` at most.

        Args:
            total: what slots for all experts take.
            others: bytes of the model's other weights, which "auto" leaves room for.

        Raises InvalidArgument for what is no limit.
        """
        return min(self._bytes(total, others), total)

    def check(self) -> None:
        """Raise InvalidArgument for what cannot be, before a model is read."""
        if not isinstance(self.policy, str):
            raise InvalidArgument(f"policy is {self.policy!r}; expected text such as 'lru'")
        if self.policy != AUTO:
            store_policy(self.policy)
        if not (self.direct is None or isinstance(self.direct, bool)):
            raise InvalidArgument(f"direct is {self.direct!r}; expected True, False or None")
        if self.limit != AUTO:
            self._bytes(1, 0)

    def _bytes(self, total: int, others: int) -> int:
        limit = self.limit
        if isinstance(limit, int) and not isinstance(limit, bool):
            if limit < 1:
                raise InvalidArgument(f"expert_memory is {limit} bytes; expected more than none")
            return limit
        if not isinstance(limit, str):
            raise InvalidArgument(
                f"expert_memory is {limit!r}; expected bytes, or text such as '8GB' or 'auto'"
            )
        if limit == AUTO:
            return max(0, free_bytes() - others)
        if limit.strip().endswith("%"):
            if (part := share(limit)) is None:
                raise InvalidArgument(f"expert_memory {limit!r} is no share of the experts")
            return round(part * total)
        if (size := size_bytes(limit, ", a share such as 25%, or auto")) < 1:
            raise InvalidArgument(f"expert_memory is {limit!r}; expected more than none")
        return size


def free_bytes() -> int:
    """What a process can still take of the machine's memory, or of its control group's, without
    the part that is left to the text's cache and activations.

    Raises InvalidArgument where the system does not say.
    """
    memory = memory_bytes()
    if memory is None:
        raise InvalidArgument("this system does not say how much memory is free: give a size")
    free = min(memory - resident_bytes(), available_bytes() or memory)
    return int(free - SPARE * memory)
