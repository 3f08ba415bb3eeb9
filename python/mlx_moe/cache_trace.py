"""Traces: which experts each forward of each layer asked for, to replay over budgets."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CorruptFile, InvalidArgument
from .identity import ModelIdentity
from .json_fields import Fields
from .npz_file import read_npz, write_npz

FORMAT, VERSION = "mlx_moe.trace", 1
MOST_EXPERTS = 1 << 16


@dataclass(frozen=True)
class TracedLayer:
    """An expert layer: dotted path, experts, experts a token, bytes of an expert's slot."""

    name: str
    experts: int
    top_k: int
    bytes: int

    @classmethod
    def taken(cls, take: Fields) -> "TracedLayer":
        experts = take.count("experts", 1, MOST_EXPERTS)
        return cls(
            take.text("name"), experts, take.count("top_k", 1, experts), take.count("bytes", 1)
        )


@dataclass(frozen=True, eq=False)
class Trace:
    """Forwards in the order in which they ran.

    Attributes:
        identity: the model, None for a trace that no model made.
        layers: every layer that was watched.
        layer: int32 [n], the layer of each forward.
        tokens: int32 [n], how many tokens went through it.
        offsets: int64 [n + 1]; forward i asked for experts[offsets[i]:offsets[i + 1]].
        experts: uint16 [m], distinct and rising within a forward.
    """

    identity: ModelIdentity | None
    layers: list[TracedLayer]
    layer: NDArray[np.int32]
    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    experts: NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.layer)

    @property
    def first(self) -> NDArray[np.int64]:
        """[L]: the number of each layer's first expert, counted over all layers."""
        counts = [layer.experts for layer in self.layers]
        return np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Slot bytes of every expert, counted over all layers."""
        return np.concatenate([np.full(x.experts, x.bytes, np.int64) for x in self.layers])

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all."""
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "identity": None if self.identity is None else self.identity.to_json(),
            "layers": [vars(layer) for layer in self.layers],
        }
        names = ("layer", "tokens", "offsets", "experts")
        write_npz(path, meta, {name: getattr(self, name) for name in names})

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read a file that `save` wrote.

        Raises:
            InvalidArgument: there is no such file.
            CorruptFile: it is no trace, or its numbers cannot be those of one.
        """
        meta, arrays = read_npz(path, FORMAT, VERSION)
        try:
            take = Fields(meta)
            trace = cls(
                take.optional("identity", lambda key: ModelIdentity.from_json(take(key), key)),
                [TracedLayer.taken(layer) for layer in take.each("layers")],
                layer := arrays.take("layer", np.int32, (None,)),
                arrays.take("tokens", np.int32, layer.shape),
                offsets := arrays.take("offsets", np.int64, (len(layer) + 1,)),
                arrays.take("experts", np.uint16, (int(offsets[-1]),)),
            )
        except CorruptFile as error:
            raise CorruptFile(f"{path}: {error}; record it again with `mlx_moe trace`") from None
        trace._check(str(path))
        return trace

    def _check(self, path: str) -> None:
        def require(ok: Any, what: str) -> None:
            if not ok:
                raise CorruptFile(f"{path}: {what}; record it again with `mlx_moe trace`")

        require(self.layers, "there are no layers")
        n = len(self.layer)
        require((np.diff(self.offsets) >= 0).all(), "offsets fall")
        require(self.offsets[0] == 0, "offsets do not begin at 0")
        require((self.tokens > 0).all(), "a forward without tokens")
        require(((self.layer >= 0) & (self.layer < len(self.layers))).all(), "no such layer")
        limit = np.array([x.experts for x in self.layers])[self.layer]
        owner = np.repeat(np.arange(n), np.diff(self.offsets))
        require((self.experts < limit[owner]).all(), "an expert out of range")
        rising = np.diff(self.experts.astype(np.int64)) > 0
        require((rising | (np.diff(owner) > 0)).all(), "experts of a forward do not rise")


@dataclass
class TraceRecorder:
    """Puts forwards together to a trace."""

    layers: list[TracedLayer]
    identity: ModelIdentity | None = None
    _layer: list[int] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _experts: list[NDArray[np.uint16]] = field(default_factory=list)

    def add(self, layer: int, ids: Any) -> None:
        """One forward of a layer, ids [T, k]; those at or above its experts reach none."""
        ids = np.asarray(ids)
        if ids.ndim != 2:
            raise InvalidArgument(f"ids have shape {ids.shape}; expected [T, k]")
        distinct = np.unique(ids)
        self._layer.append(layer)
        self._tokens.append(len(ids))
        self._experts.append(distinct[distinct < self.layers[layer].experts].astype(np.uint16))

    def __len__(self) -> int:
        return len(self._layer)

    def trace(self) -> Trace:
        lengths = [len(experts) for experts in self._experts]
        return Trace(
            self.identity,
            self.layers,
            np.array(self._layer, np.int32),
            np.array(self._tokens, np.int32),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.concatenate([np.empty(0, np.uint16), *self._experts]),
        )
