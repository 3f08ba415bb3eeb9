"""The weights that a rank holds: read from the checkpoint, nothing else of it, or cut out."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from . import core
from .distributed_placement import Slice
from .errors import FileChanged, ReadFailed
from .layers import PROJECTIONS
from .store_files import PARTS, Checkpoint, Names, StoredExperts
from .weights import own_class, quantisation, shallow_copy

RAW: dict[str, Any] = {
    "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U32": np.uint32, "U8": np.uint8
}  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """What of one expert's array belongs to a slice: rows, columns, or all."""

    rows: slice
    columns: slice
    keep: bool = True  # False: zeros, of a bias that another rank adds

    def of(self, array: Any) -> Any:
        """array: one expert's, [rows, columns], [rows] or []."""
        if array.ndim == 0:
            return array
        return array[self.rows] if array.ndim == 1 else array[self.rows, self.columns]


def cut_of(linear: Any, part: str, last: bool, piece: Slice) -> Cut:
    """How an array of a projection is cut along the inner features.

    Inner projections (gate, up) have them as rows; the last one (down) as columns, of which
    there are `bits / 32` words, or one scale for a group.
    """
    every = slice(None)
    if not last:
        return Cut(slice(piece.begin, piece.end), every)
    if part in ("bias", "global_scale"):
        return Cut(every, every, keep=part != "bias" or piece.begin == 0)
    if "scales" not in linear:
        return Cut(every, slice(piece.begin, piece.end))
    _, bits, group_size = quantisation(linear)
    if part == "weight":
        return Cut(every, slice(piece.begin * bits // 32, piece.end * bits // 32))
    return Cut(every, slice(piece.begin // group_size, piece.end // group_size))


class Source(Protocol):
    """Where arrays of experts come from."""

    def stack(self, child: str, part: str, cuts: Sequence[tuple[int, Cut]]) -> mx.array:
        """The cuts of experts, one after the other, evaluated."""
        ...


class InMemory:
    """The arrays of a module; or those given in their place, which nobody else holds: each is
    read whole and let go again."""

    def __init__(self, module: Any, fresh: dict[tuple[str, str], mx.array] | None = None):
        self._module, self._fresh = module, fresh or {}

    def stack(self, child: str, part: str, cuts: Sequence[tuple[int, Cut]]) -> mx.array:
        own = self._module[child][part]
        array = self._fresh.get((child, part), own)
        if array.shape != own.shape or array.dtype != own.dtype:  # the loader made more of it
            array = own
        found = [cut.of(array[e]) for e, cut in cuts]
        kept = zip(found, cuts, strict=True)
        stacked = mx.stack([a if cut.keep else mx.zeros_like(a) for a, (_, cut) in kept])
        stacked = mx.contiguous(stacked)  # a stack of one is a view of the array, which stays then
        mx.eval(stacked)
        return stacked


class OnDisk:
    """Tensors of a checkpoint's files, of which only the bytes that are asked for are read.

    Attributes:
        names: tensors that a model's parameters are, see `tensor_names`.
        bytes_read: so far.
    """

    def __init__(self, checkpoint: Checkpoint, names: dict[str, Names]):
        self.checkpoint, self.names = checkpoint, names
        self._offsets: dict[str, int] = {}
        self._files: list[int] = []
        self.bytes_read = 0

    def __enter__(self) -> "OnDisk":
        for path in self.checkpoint.paths:
            for name, _, _, offset, _ in core.safetensors(str(path)):
                self._offsets[name] = offset
            self._files.append(os.open(path, os.O_RDONLY))
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)

    def layer(self, experts: StoredExperts) -> "StoredLayer":
        return StoredLayer(self, experts)

    def read(self, tensor: str, begin: int, count: int) -> NDArray[np.uint8]:
        """Bytes of a tensor."""
        facts = self.checkpoint.tensors[tensor]
        data = np.empty(count, np.uint8)
        view, at = memoryview(data.data), self._offsets[tensor] + begin
        path = self.checkpoint.paths[facts.file]
        try:
            while len(view):
                got = os.preadv(self._files[facts.file], [view], at)
                if got == 0:
                    raise FileChanged(f"{path} ends before tensor {tensor!r} does: it was changed")
                view, at = view[got:], at + got
        except OSError as error:
            if isinstance(error, FileChanged):
                raise
            raise ReadFailed(f"{path}: {error}") from error
        self.bytes_read += count
        return data


class StoredLayer:
    """The tensors of one layer, as a `Source`."""

    def __init__(self, disk: OnDisk, experts: StoredExperts):
        self._disk, self._experts = disk, experts

    def stack(self, child: str, part: str, cuts: Sequence[tuple[int, Cut]]) -> mx.array:
        names = self._experts.projections[child].names[PARTS.index(part)]
        facts = self._disk.checkpoint.tensors[names[0]]
        shape = facts.shape[1:] if len(names) == 1 else facts.shape
        found = [self._one(names, shape, facts.dtype, e, cut) for e, cut in cuts]
        array = mx.array(np.stack(found))
        return array.view(mx.bfloat16) if facts.dtype == "BF16" else array

    def _one(
        self, names: Sequence[str], shape: tuple[int, ...], dtype: str, expert: int, cut: Cut
    ) -> NDArray[Any]:
        """Whole rows are read where only some columns are wanted."""
        raw = np.dtype(RAW[dtype])
        row = int(np.prod(shape[1:], dtype=np.int64)) * raw.itemsize
        rows = range(*cut.rows.indices(shape[0])) if shape else range(1)
        first = expert * (shape[0] if shape else 1) * row if len(names) == 1 else 0
        name = names[0] if len(names) == 1 else names[expert]
        data = self._disk.read(name, first + rows.start * row, len(rows) * row).view(raw)
        array = data.reshape((len(rows), *shape[1:]) if shape else ())
        if array.ndim == 2:
            array = array[:, cut.columns]
        return array if cut.keep else np.zeros_like(array)


def local_module(module: Any, kind: str, pieces: Sequence[Slice], source: Source) -> Any:
    """A module like `module`, of these slices (all of one width) as its experts."""
    twin = shallow_copy(module, own_class(module))
    *_, final = names = PROJECTIONS[kind]
    for child in names:
        linear = module[child]
        local = shallow_copy(linear, own_class(linear))
        for part in PARTS:
            if linear.get(part) is not None:
                cuts = [(p.expert, cut_of(linear, part, child == final, p)) for p in pieces]
                dict.__setitem__(local, part, source.stack(child, part, cuts))
        dict.__setitem__(twin, child, local)
    return twin


def arrays_of(modules: Iterable[Any], kind: str) -> list[mx.array]:
    """Every array of the projections."""
    return [
        module[child][part]
        for module in modules
        for child in PROJECTIONS[kind]
        for part in PARTS
        if module[child].get(part) is not None
    ]
