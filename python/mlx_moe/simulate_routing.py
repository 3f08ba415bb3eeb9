"""Routing to simulate: steps of a model with the load of every expert of every layer."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cache_trace import Trace
from .calibration import Calibration, LayerStatistics
from .chunks import chunk_loads
from .errors import CorruptFile, InvalidArgument
from .identity import ModelIdentity
from .layer_facts import LayerFacts

Array = NDArray[np.float64]
MOST_STEPS = 64  # simulated, taken evenly from more
GZIP = b"\x1f\x8b"


@dataclass(frozen=True, eq=False)
class Routing:
    """What every step asked of every layer.

    Attributes:
        name: of the model.
        facts: of each layer, in the order in which a token passes them.
        tokens: [steps].
        loads: [steps, E] of each layer.
        source: where the loads come from, for people.
    """

    name: str
    facts: list[LayerFacts]
    tokens: NDArray[np.int64]
    loads: list[Array]
    source: str

    @property
    def steps(self) -> int:
        return len(self.tokens)

    def only(self, steps: Any) -> "Routing":
        """Some of the steps."""
        kept = [x[steps] for x in self.loads]
        return Routing(self.name, self.facts, self.tokens[steps], kept, self.source)

    def halves(self) -> tuple["Routing", "Routing"]:
        """Every other step to plan by, and the others to simulate; both all where there is one."""
        if self.steps < 2:
            return self, self
        return self.only(slice(0, None, 2)), self.only(slice(1, None, 2))

    def calibration(self) -> Calibration:
        """As calibrating would write it; what planning does not read is left empty."""
        statistics = []
        for facts, loads in zip(self.facts, self.loads, strict=True):
            unknown = np.full((facts.experts, 5), np.nan, np.float32)
            together = np.zeros((facts.experts, facts.experts), np.uint64)
            counts = np.rint(loads).astype(np.uint32)
            statistics.append(LayerStatistics(counts, together, unknown, unknown))
        tokens = [int(t) for t in self.tokens]
        return Calibration(ModelIdentity(self.name), max(tokens), tokens, self.facts, statistics)


def of_calibration(calibration: Calibration, chunk: int | None, name: str) -> Routing:
    """The prefill chunks that a calibration counted, of `chunk` tokens or its own."""
    chunk = calibration.chunk if chunk is None else chunk
    loads = [_evenly(x) for x in chunk_loads(calibration, chunk)]
    tokens = np.full(len(loads[0]), chunk, np.int64)
    source = f"calibration {name}"
    return Routing(calibration.identity.name, calibration.layers, tokens, loads, source)


def of_trace(trace: Trace, facts: Sequence[LayerFacts], name: str) -> Routing:
    """The forwards of a trace, one step for each pass over all layers.

    A trace knows which experts a forward of several tokens asked for, but not how often: their
    assignments are spread evenly over them.

    Args:
        facts: of each layer of the trace; their experts and top_k are the trace's.
    """
    passes = _passes(trace)
    if not passes:
        raise InvalidArgument(f"{name} has no forward through all of its layers")
    if len(passes) > MOST_STEPS:
        passes = [passes[i] for i in np.linspace(0, len(passes) - 1, MOST_STEPS).astype(int)]
    tokens = np.array([trace.tokens[forwards[0]] for forwards in passes], np.int64)
    loads = [np.zeros((len(passes), layer.experts)) for layer in trace.layers]
    for step, forwards in enumerate(passes):
        for layer, forward in enumerate(forwards):
            asked = trace.experts[trace.offsets[forward] : trace.offsets[forward + 1]]
            assignments = int(trace.tokens[forward]) * trace.layers[layer].top_k
            loads[layer][step, asked] = assignments / max(len(asked), 1)
    model = name if trace.identity is None else trace.identity.name
    return Routing(model, list(facts), tokens, loads, f"trace {name}")


def _passes(trace: Trace) -> list[list[int]]:
    """Forwards by pass: each through layer 0, 1, ... of equal tokens; others are left out."""
    passes: list[list[int]] = []
    current: list[int] = []
    for forward, layer in enumerate(trace.layer):
        if layer == 0:
            current = [forward]
        elif current and layer == len(current):
            if trace.tokens[forward] == trace.tokens[current[0]]:
                current.append(forward)
            else:
                current = []
        else:
            current = []
        if len(current) == len(trace.layers):
            passes.append(current)
            current = []
    return passes


@dataclass(frozen=True, eq=False)
class Histograms:
    """How often each expert was chosen, by domain.

    Attributes:
        domains: [layers, experts] shares of each, summing to 1 over the experts.
        top_k: experts of a token; None where the file does not say.
    """

    name: str
    domains: dict[str, Array]
    top_k: int | None

    @property
    def layers(self) -> int:
        return next(iter(self.domains.values())).shape[0]

    @property
    def experts(self) -> int:
        return next(iter(self.domains.values())).shape[1]


def read_histograms(path: str | Path) -> Histograms:
    """A JSON file, gzipped or not: `{"domains": {name: [layer][expert] counts}}`, and perhaps
    `model` and `top_k`.

    Raises:
        InvalidArgument: there is no such file.
        CorruptFile: it is none of these; says what is wrong.
    """
    try:
        raw = Path(path).read_bytes()
        data = json.loads(gzip.decompress(raw) if raw.startswith(GZIP) else raw)
    except FileNotFoundError as error:
        raise InvalidArgument(f"there is no file {path}") from error
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise CorruptFile(f"{path}: not histograms of experts: {error}") from error
    domains = data.get("domains") if isinstance(data, dict) else None
    if not isinstance(domains, dict) or not domains:
        raise CorruptFile(f"{path}: expected an object with some 'domains'")
    shares, shape = {}, None
    for name, counts in domains.items():
        try:
            found = np.array(counts, np.float64)
        except (TypeError, ValueError):
            found = np.zeros(0)
        if found.ndim != 2 or not found.size or (shape and found.shape != shape):
            raise CorruptFile(f"{path}: domain {name!r} is not [layers][experts] like the others")
        if not np.isfinite(found).all() or found.min() < 0 or not found.sum(axis=1).all():
            raise CorruptFile(f"{path}: domain {name!r} has counts that cannot be")
        shape = found.shape
        shares[name] = found / found.sum(axis=1, keepdims=True)
    top_k = data.get("top_k")
    good = type(top_k) is int and 0 < top_k <= next(iter(shares.values())).shape[1]
    return Histograms(str(data.get("model", Path(path).name)), shares, top_k if good else None)


def of_histograms(
    histograms: Histograms,
    facts: Sequence[LayerFacts],
    tokens: int,
    steps: int,
    seed: int,
    domains: int = 1,
    stay: int = 1,
) -> Routing:
    """Steps drawn from the counts: each of `domains` domains mixed in random proportions.

    `stay` steps in a row have the same mixture.

    Layers beyond the histograms' take theirs again from the first; other numbers of experts take
    their curve of popularity (`resampled`).
    """
    random = np.random.default_rng(seed)
    loads = [np.zeros((steps, layer.experts)) for layer in facts]
    orders = [random.permutation(layer.experts) for layer in facts]
    mixed = np.zeros(0)
    for step in range(steps):
        if step % stay == 0:
            mixed = _mixture(random, histograms, domains)
        for i, layer in enumerate(facts):
            shares = mixed[i % histograms.layers]
            if layer.experts != histograms.experts:
                shares = resampled(shares, layer.experts)[orders[i]]
            loads[i][step] = draw(random, shares, tokens, layer.top_k)
    source = (
        f"{steps} steps of {tokens} tokens drawn from {len(histograms.domains)} domains of "
        + (histograms.name)
    )
    return Routing(histograms.name, list(facts), np.full(steps, tokens, np.int64), loads, source)


def _mixture(random: np.random.Generator, histograms: Histograms, domains: int) -> Array:
    """Shares [layers, experts]."""
    names = sorted(histograms.domains)
    chosen = random.choice(len(names), min(domains, len(names)), replace=False)
    parts = random.dirichlet(np.ones(len(chosen)))
    shares = np.stack([histograms.domains[names[i]] for i in chosen])
    return np.asarray(np.tensordot(parts, shares, axes=1))


def resampled(shares: Array, experts: int) -> Array:
    """The popularity curve of one layer for another number of experts, largest first.

    The share of the fullest part of the experts stays what it is, for every part; between the
    parts that the experts given are, it is a line.
    """
    ordered = np.concatenate([[0.0], np.cumsum(np.sort(shares)[::-1])])
    given = np.linspace(0, 1, len(ordered))
    curve = np.interp(np.linspace(0, 1, experts + 1), given, ordered)
    return np.diff(curve)


def draw(random: np.random.Generator, shares: Array, tokens: int, top_k: int) -> Array:
    """Loads [E] of tokens that take top_k experts each: none of them twice."""
    loads = np.zeros(len(shares), np.int64)
    left = tokens * top_k
    shares = np.maximum(shares, 1e-12)
    while left:
        room = loads < tokens
        open_shares = np.where(room, shares, 0)
        loads += random.multinomial(left, open_shares / open_shares.sum())
        loads = np.minimum(loads, tokens)
        left = tokens * top_k - int(loads.sum())
    return loads.astype(np.float64)


def _evenly(loads: Array) -> Array:
    if len(loads) <= MOST_STEPS:
        return loads
    return loads[np.linspace(0, len(loads) - 1, MOST_STEPS).astype(int)]
