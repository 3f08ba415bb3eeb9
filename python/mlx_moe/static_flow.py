"""A forward over a static executor: bucket, pack, submit, cold path meanwhile, wait, combine."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from . import core, static_buffers
from .custom import evaluate, filled
from .static import Ints, Split, StaticLayer, Tile, tile_load
from .stats import StaticCounters

# What an executor says of a tile with an infinity or a NaN in it, or with nothing but numbers so
# small that float16 has few bits for them.
OUT_OF_RANGE = {"not finite", "too small"}

Cold = Callable[[Ints], mx.array]  # assignments [n] -> their outputs [n, D], begun or done
Rows = tuple[Any, Ints]  # outputs [n, D] and their assignments, -1 for none

logger = logging.getLogger("mlx_moe")


@dataclass
class Sent:
    """A tile on its way: its input, the assignment of each slot, an output for each part."""

    tile: Tile
    x: Any
    slots: Ints
    outs: list[Any]

    @property
    def assignments(self) -> Ints:
        return self.slots[self.slots >= 0]

    def rows(self) -> Rows:
        """Outputs by slot; partial sums are added in f32."""
        y = self.outs[0]
        for part in self.outs[1:]:
            y = np.add(y, part, dtype=np.float32)
        return y.reshape(-1, y.shape[-1]), self.slots


def run(
    layer: StaticLayer,
    counters: StaticCounters,
    x: mx.array,
    ids: mx.array,
    scores: mx.array | None,
    cold: Cold,
    width: int,
    dtype: mx.Dtype,
    whole: Callable[[], mx.array] | None = None,
) -> mx.array:
    """One forward of a layer.

    Args:
        x: rows of input [T, K], evaluated and contiguous.
        ids: expert ids [T, k], uint32 or int32, evaluated and contiguous.
        scores: [T, k] f32, evaluated, or None where they do not reach us.
        cold: computes assignments on the layer's own path, or begins to.
        whole: the same for all of them together, with the weighted sum.

    Returns:
        With scores the weighted sums [T, width], without them outputs [T, k, width], of `dtype`;
        pruned assignments count as zero.
    """
    with counters.timed("bucket"):
        importance = _importance(layer, counters, x, ids, scores)
        split = layer.split(ids, importance)
    pruned = importance is not None
    if whole is not None and split.cold.size == ids.size:
        _count(counters, split, [], pruned)
        return whole()
    with counters.timed("pack"):
        sent = _packed(split.tiles, x, ids.shape[-1])
    with counters.timed("submit"):
        submitted = layer.executor.submit([d for s in sent for d in _dispatches(s)])
    try:
        left = split.cold if pruned else np.concatenate([split.cold, split.overflow])
        sources = [_cold(counters, cold, left)] if left.size else []
    finally:  # the tiles are ours again only then
        with counters.timed("wait"):
            outcomes = submitted.wait()
    good, lost = _sorted_out(layer, counters, sent, outcomes)
    sources += [s.rows() for s in good]
    if lost:
        sources.append(_cold(counters, cold, np.concatenate([s.assignments for s in lost])))
    with counters.timed("cold"):
        evaluate(*[rows for rows, _ in sources if isinstance(rows, mx.array)])
    _count(counters, split, sent, pruned)
    with counters.timed("combine"):
        return combined(sources, tuple(ids.shape), scores, width, dtype)


def _importance(
    layer: StaticLayer,
    counters: StaticCounters,
    x: mx.array,
    ids: mx.array,
    scores: mx.array | None,
) -> NDArray[np.float32] | None:
    """By assignment, of NaN the least; None where overflow is spilled, as it is if scores did not
    reach us."""
    if layer.overflow == "spill":
        return None
    if layer.importance == "norm":
        norms = mx.linalg.norm(x.astype(mx.float32), axis=-1)
        found = np.repeat(np.array(norms), ids.shape[-1])
    elif scores is None:
        counters.add(without_scores=1)
        return None
    else:
        found = np.array(scores, np.float32).reshape(-1)
    if unknown := int(np.isnan(found).sum()):  # their output is NaN where they are kept
        counters.add(nan_importance=unknown)
        found[np.isnan(found)] = -np.inf
    return found


def _packed(tiles: list[Tile], x: mx.array, top_k: int) -> list[Sent]:
    """The tiles filled, with memory for their outputs; all of it this thread's own."""
    if not tiles:
        return []
    shapes = [(t.group.experts.size, t.capacity, x.shape[-1]) for t in tiles]
    parts = [len(t.group.programs) for t in tiles]
    halves = shapes + [shape for shape, n in zip(shapes, parts, strict=True) for _ in range(n)]
    ints = [shape[:2] for shape in shapes]
    memory = iter(
        static_buffers.arrays([*halves, *ints], [np.float16] * len(halves) + [np.int32] * len(ints))
    )
    rows = list(islice(memory, len(tiles)))
    outs = [list(islice(memory, n)) for n in parts]
    slots = list(memory)
    core.pack_groups(
        x,
        [t.order for t in tiles],
        [t.offsets for t in tiles],
        [t.experts for t in tiles],
        top_k,
        rows,
        slots,
    )
    return [
        Sent(tile, r, s.reshape(-1), o)
        for tile, r, s, o in zip(tiles, rows, slots, outs, strict=True)
    ]


def _dispatches(sent: Sent) -> list[tuple[int, Any, Any]]:
    programs = sent.tile.group.programs
    return [(p, sent.x, out) for p, out in zip(programs, sent.outs, strict=True)]


def _cold(counters: StaticCounters, cold: Cold, assignments: Ints) -> Rows:
    with counters.timed("cold"):
        return cold(assignments), assignments


def _sorted_out(
    layer: StaticLayer, counters: StaticCounters, sent: list[Sent], outcomes: list[str]
) -> tuple[list[Sent], list[Sent]]:
    """The tiles whose every part is well, and those to compute again."""
    good, lost, at = [], [], 0
    for s in sent:
        texts = set(outcomes[at : at + len(s.outs)])
        at += len(s.outs)
        if texts == {""}:
            good.append(s)
            continue
        lost.append(s)
        if errors := texts - {"", *OUT_OF_RANGE}:
            counters.add(failed_tiles=1)
            counters.log_once(
                "failed", f"group {s.tile.group.name} failed and is computed cold: {min(errors)}"
            )
        else:
            counters.add(recomputed_tiles=1)
            why = min(texts - {""})
            counters.log_once(
                why,
                f"group {s.tile.group.name} left the range of float16 ({why}) and is computed "
                "again cold",
            )
    return good, lost


def _count(counters: StaticCounters, split: Split, sent: list[Sent], pruned: bool) -> None:
    over = int(split.overflow.size)
    hot = sum(tile_load(t) for t in split.tiles)
    counters.add(
        forwards=1,
        hot=hot,
        cold=int(split.cold.size),
        spilled=0 if pruned else over,
        pruned=over if pruned else 0,
        padding=sum(s.slots.size for s in sent) - hot,
        dispatches=sum(len(s.outs) for s in sent),
        waits=1 if sent else 0,
        extra_tiles=split.extra,
    )


def combined(
    sources: list[Rows],
    shape: tuple[int, ...],
    scores: mx.array | None,
    width: int,
    dtype: mx.Dtype,
) -> mx.array:
    """[T, width] weighted by scores [T, k], or the rows themselves [T, k, width].

    Each output is summed once, in the order of its assignments wherever their rows are.
    """
    tokens, k = shape
    if scores is None:
        ones = np.ones((tokens * k, 1), np.float32)
        return _sums(sources, ones, width, dtype).reshape(tokens, k, width)
    return _sums(sources, np.array(scores).reshape(tokens, k), width, dtype)


def _sums(
    sources: list[Rows], scores: NDArray[np.float32], width: int, dtype: mx.Dtype
) -> mx.array:
    rows, assignments = [r for r, _ in sources], [a for _, a in sources]
    if not rows:
        return mx.zeros((scores.shape[0], width), dtype)
    return filled((scores.shape[0], width), dtype, partial(core.combine, rows, assignments), scores)
