"""The file that calibration writes and planning reads: routing statistics of one model."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CorruptFile, InvalidArgument
from .identity import ModelIdentity, check_same
from .json_fields import Fields
from .layer_facts import LayerFacts, SharedFacts, WeightFacts
from .npz_file import Arrays, read_npz, write_npz

__all__ = ["Calibration", "LayerFacts", "LayerStatistics", "SharedFacts", "Source", "WeightFacts"]

FORMAT, VERSION = "mlx_moe.calibration", 1
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
ARRAYS = ("loads", "coactivation", "score_quantiles", "norm_quantiles")


@dataclass(frozen=True)
class Source:
    """What was read: a file, how many tokens of it ran, and SHA-256 (hex) of the bytes read."""

    path: str
    tokens: int
    sha256: str


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """What was counted of one layer of E experts. Assignments of weight zero do not count.

    Attributes:
        loads: uint32 [chunks, E], assignments of each expert in each prefill chunk.
        coactivation: uint64 [E, E], tokens that went to both; on the diagonal, its assignments.
        score_quantiles: f32 [E, Q], of the magnitude of the router's weights as they multiply the
            outputs; NaN where an expert had no tokens or the family keeps its scores to itself.
        norm_quantiles: f32 [E, Q], of the L2 norm of the input rows; NaN without tokens.
    """

    loads: NDArray[np.uint32]
    coactivation: NDArray[np.uint64]
    score_quantiles: NDArray[np.float32]
    norm_quantiles: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Calibration:
    """Routing statistics of one model over a calibration text.

    Attributes:
        identity: the model.
        chunk: the most tokens in a prefill chunk.
        chunk_tokens: tokens in each chunk; shorter at the end of a document.
        layers: facts of each expert layer, in the model's order.
        statistics: of each layer, in the same order.
        sources: what was read.
        quantiles: the probabilities (Q of them) that the quantiles are taken at.
    """

    identity: ModelIdentity
    chunk: int
    chunk_tokens: list[int]
    layers: list[LayerFacts]
    statistics: list[LayerStatistics]
    sources: list[Source] = field(default_factory=list)
    quantiles: tuple[float, ...] = QUANTILES

    @property
    def tokens(self) -> int:
        return sum(self.chunk_tokens)

    def index(self, name: str) -> int:
        """The place of a layer by its dotted path; InvalidArgument if there is none."""
        names = [layer.name for layer in self.layers]
        if name not in names:
            raise InvalidArgument(f"the calibration has no layer {name!r}, only {', '.join(names)}")
        return names.index(name)

    def loads(self, layer: int) -> NDArray[np.uint32]:
        """[chunks, E]: assignments of each expert in each chunk."""
        return self.statistics[layer].loads

    def coactivation(self, layer: int) -> NDArray[np.uint64]:
        """[E, E]: tokens that went to both experts."""
        return self.statistics[layer].coactivation

    def score_quantiles(self, layer: int) -> NDArray[np.float32]:
        """[E, Q]: of the router's weights; NaN where unknown."""
        return self.statistics[layer].score_quantiles

    def norm_quantiles(self, layer: int) -> NDArray[np.float32]:
        """[E, Q]: of the norms of input rows; NaN without tokens."""
        return self.statistics[layer].norm_quantiles

    def popularity(self, layer: int) -> NDArray[np.float64]:
        """[E]: each expert's share of the layer's assignments; zeros if it had none."""
        totals = self.loads(layer).sum(axis=0, dtype=np.float64)
        return np.asarray(totals / max(totals.sum(), 1.0))

    def check_model(self, found: ModelIdentity, what: str = "the calibration") -> None:
        """Raise IdentityMismatch unless `found` is the model that was calibrated."""
        check_same(self.identity, found, what)

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all. Equal calibrations make equal files."""
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "identity": self.identity.to_json(),
            "chunk": self.chunk,
            "chunk_tokens": self.chunk_tokens,
            "layers": [layer.to_json() for layer in self.layers],
            "sources": [asdict(source) for source in self.sources],
            "quantiles": list(self.quantiles),
        }
        arrays = {
            f"{name}.{i}": getattr(statistics, name)
            for i, statistics in enumerate(self.statistics)
            for name in ARRAYS
        }
        write_npz(path, meta, arrays)

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read a file that `save` wrote.

        Raises:
            InvalidArgument: there is no such file.
            CorruptFile: it is no calibration, of an unknown version, cut short, or its numbers
                cannot be those of one; says which.
        """
        meta, arrays = read_npz(path, FORMAT, VERSION)
        try:
            calibration = _from_parts(meta, arrays)
        except CorruptFile as error:
            raise CorruptFile(f"{path}: {error}; calibrate again") from None
        return calibration


def _from_parts(meta: dict[str, Any], arrays: Arrays) -> Calibration:
    take = Fields(meta)
    chunk, chunk_tokens = take.count("chunk", 1), list(take.counts("chunk_tokens"))
    if not chunk_tokens or not all(0 < tokens <= chunk for tokens in chunk_tokens):
        raise take.wrong("chunk_tokens", f"numbers between 1 and {chunk}")
    quantiles = take.items("quantiles")
    if not _are_probabilities(quantiles):
        raise take.wrong("quantiles", "ascending numbers between 0 and 1")
    layers = [
        LayerFacts.from_json(facts, f"layers[{i}]") for i, facts in enumerate(take.items("layers"))
    ]
    if not layers:
        raise take.wrong("layers", "at least one layer")
    expected = {f"{name}.{i}" for name in ARRAYS for i in range(len(layers))}
    if arrays.keys() != expected:
        raise CorruptFile(f"arrays are missing or too many: {sorted(arrays.keys() ^ expected)}")
    statistics = []
    for i, layer in enumerate(layers):
        by_expert = (layer.experts, len(quantiles))
        own = LayerStatistics(
            arrays.take(f"loads.{i}", np.uint32, (len(chunk_tokens), layer.experts)),
            arrays.take(f"coactivation.{i}", np.uint64, (layer.experts, layer.experts)),
            arrays.take(f"score_quantiles.{i}", np.float32, by_expert),
            arrays.take(f"norm_quantiles.{i}", np.float32, by_expert),
        )
        _check(own, layer, chunk_tokens)
        statistics.append(own)
    return Calibration(
        ModelIdentity.from_json(take("identity")),
        chunk,
        chunk_tokens,
        layers,
        statistics,
        [
            Source(source.text("path"), source.count("tokens"), source.text("sha256"))
            for source in take.each("sources")
        ],
        tuple(quantiles),
    )


def _check(statistics: LayerStatistics, layer: LayerFacts, chunk_tokens: Sequence[int]) -> None:
    """Raise CorruptFile where the numbers contradict the facts or each other."""
    loads, together = statistics.loads, statistics.coactivation
    if np.any(loads.sum(1, dtype=np.uint64) > np.array(chunk_tokens, np.uint64) * layer.top_k):
        raise CorruptFile(f"loads of {layer.name} are more than {layer.top_k} for each token")
    if np.any(together != together.T) or np.any(together.diagonal() != loads.sum(0)):
        raise CorruptFile(f"coactivation of {layer.name} does not go with its loads")
    for name in ("score_quantiles", "norm_quantiles"):
        array = getattr(statistics, name)
        if np.any(array < 0) or np.any(np.diff(array, axis=1) < 0):
            raise CorruptFile(f"{name} of {layer.name} are negative or do not ascend")


def _are_probabilities(value: list[Any]) -> bool:
    return (
        len(value) > 0
        and all(isinstance(p, float) and 0 <= p <= 1 for p in value)
        and all(a < b for a, b in zip(value, value[1:], strict=False))
    )
