"""Replay a trace: how often each policy would have had the experts, under each budget."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import core
from .cache_policies import Belady, Lfu, Lru, Outcome, Pinned, Policy, Simulation, waves
from .cache_trace import Trace
from .errors import InvalidArgument, MemoryLimit

DECODE_TOKENS = 4  # forwards of so few tokens count as decoding
# Tokens after which lfu's counts are halved, that are tried. Longer ones gain 0.3 points of hits on
# texts of one kind, and lose up to 9 where the subject changes.
PERIODS = (16, 32, 64)
TOKENS = 32  # ... without a trace: never behind lru on the recorded ones
CHOICES = ("lru", *(f"lfu:{tokens}" for tokens in PERIODS))


@dataclass
class Replay:
    """What one policy did under one budget.

    Attributes:
        policy: "lru", "lfu:TOKENS", "pinned" or "belady".
        budget: bytes.
        prefill, decode: of forwards of many and of few tokens.
    """

    policy: str
    budget: int
    prefill: Outcome = field(default_factory=Outcome)
    decode: Outcome = field(default_factory=Outcome)

    @property
    def bytes_read(self) -> int:
        return self.prefill.bytes_read + self.decode.bytes_read

    def as_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "budget": self.budget,
            "hit_rate": self.decode.hit_rate,
            "prefill_hit_rate": self.prefill.hit_rate,
            "bytes_read": self.bytes_read,
            "decode_bytes_read": self.decode.bytes_read,
            "evictions": self.prefill.evictions + self.decode.evictions,
        }


def uses_per_token(trace: Trace) -> int:
    """Experts that a token asks for, over all layers."""
    return sum(layer.top_k for layer in trace.layers)


def smallest_budget(trace: Trace) -> int:
    """Bytes that every layer's experts of one token fit."""
    return max(layer.bytes * layer.top_k for layer in trace.layers)


def steps(trace: Trace) -> list[NDArray[np.int64]]:
    """The experts of each forward, numbered over all layers."""
    first = trace.first
    parts = np.split(trace.experts.astype(np.int64), trace.offsets[1:-1])
    return [part + first[layer] for part, layer in zip(parts, trace.layer, strict=True)]


def store_policy(name: str, pinned: bool = False) -> tuple[str, int]:
    """Kind of a store's policy and the tokens after which lfu halves its counts.

    pinned: there are experts to pin. Raises InvalidArgument for what is no policy of a store.
    """
    kind, colon, tokens = name.partition(":")
    if name == "pinned" and not pinned:
        raise InvalidArgument(
            "policy 'pinned' is for an ExpertStore that is given the experts to pin; expected "
            "auto, lru, lfu or lfu:TOKENS"
        )
    good = tokens.isdecimal() and len(tokens) < 10 and int(tokens) > 0
    if name not in ("lru", "lfu", "pinned") and not (kind == "lfu" and colon and good):
        raise InvalidArgument(f"policy {name!r}; expected auto, lru, lfu or lfu:TOKENS")
    return kind, int(tokens or TOKENS)


def make_policy(name: str, trace: Trace, order: NDArray[np.int64], budget: int) -> Policy:
    """A policy by name. order: every use of the trace in order, as it will be."""
    experts = len(trace.sizes)
    kind, _, tokens = name.partition(":")
    if kind == "lfu":
        if tokens and not tokens.isdecimal():
            raise InvalidArgument(f"policy {name!r}; expected lfu:TOKENS")
        return Lfu(experts, int(tokens or TOKENS) * uses_per_token(trace))
    if name == "lru":
        return Lru(experts)
    if name == "pinned":
        return Pinned(experts, warm_set(np.bincount(order, minlength=experts), trace, budget))
    if name == "belady":
        return Belady(experts, order)
    raise InvalidArgument(f"unknown policy {name!r}; known: lru, lfu, lfu:TOKENS, pinned, belady")


def warm_set(counts: NDArray[np.int64], trace: Trace, budget: int) -> list[int]:
    """The most used experts, as many as leave room for a token of any layer."""
    room = budget - smallest_budget(trace)
    chosen = []
    for expert in np.argsort(-counts, kind="stable").tolist():
        size = int(trace.sizes[expert])
        if counts[expert] and size <= room:
            chosen.append(expert)
            room -= size
    return chosen


def replay(
    trace: Trace, budget: int, policy: str, done: Callable[[], object] | None = None
) -> Replay:
    """Run a trace through a bank of `budget` bytes.

    Args:
        policy: as in `Replay`; "pinned" keeps what the whole trace used most.
        done: is called after every forward.

    Raises:
        MemoryLimit: the budget is less than one token's experts of a layer.
        InvalidArgument: there is no such policy.
    """
    if budget < (least := smallest_budget(trace)):
        raise MemoryLimit(f"a budget of {budget} bytes; one token of a layer takes {least}")
    found, order = Replay(policy, budget), steps(trace)
    chosen = make_policy(policy, trace, np.concatenate([*order, np.empty(0, np.int64)]), budget)
    bank = Simulation(trace.sizes, budget, chosen)
    sizes = np.array([layer.bytes for layer in trace.layers])
    for layer, tokens, experts in zip(trace.layer, trace.tokens, order, strict=True):
        total = found.decode if tokens <= DECODE_TOKENS else found.prefill
        # Belady's order of uses is the trace's: a forward of several parts keeps it.
        there = bank.there[experts] if policy != "belady" else np.ones(len(experts), bool)
        for part in waves(experts, there, budget // int(sizes[layer])):
            outcome = bank.access(part)
            total.hits += outcome.hits
            total.misses += outcome.misses
            total.bytes_read += outcome.bytes_read
            total.evictions += outcome.evictions
        if done is not None:
            done()
    return found


def best_policy(trace: Trace, budget: int, choices: Iterable[str] = CHOICES) -> str:
    """The policy that reads least for the decoded tokens of a trace; of equals the first one.

    The core replays it, in milliseconds for hundreds of tokens.

    Raises:
        InvalidArgument: the budget is less than one token's experts of a layer.
    """
    decoded = np.flatnonzero(trace.tokens <= 1)
    parts = [trace.experts[trace.offsets[i] : trace.offsets[i + 1]] for i in decoded]
    lengths = [len(part) for part in parts]
    given = (
        np.array([layer.experts for layer in trace.layers], np.int32),
        np.array([layer.bytes for layer in trace.layers], np.int64),
        trace.layer[decoded].astype(np.int32),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.concatenate([*parts, np.empty(0, np.uint16)]).astype(np.int32),
    )

    def bytes_read(name: str) -> int:
        kind, _, tokens = name.partition(":")
        period = int(tokens or TOKENS) * uses_per_token(trace)
        return int(core.replay(*given, budget, policy=kind, period=period)["bytes_read"])

    return min(choices, key=bytes_read)
