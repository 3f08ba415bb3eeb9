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
from .tiers import LARGEST_CHUNK

Array = NDArray[np.float64]
MOST_STEPS = 64  # simulated, taken evenly from more
MOST_LOADS = 1 << 26  # numbers drawn, of all steps, layers and experts: half a GB
MOST_COUNTED = 1e18  # of an expert in a file
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

    Raises InvalidArgument where there is nothing to simulate, or loads cannot be.
    """

    name: str
    facts: list[LayerFacts]
    tokens: NDArray[np.int64]
    loads: list[Array]
    source: str

    def __post_init__(self) -> None:
        if not self.facts or not len(self.tokens):
            raise InvalidArgument(f"{self.source}: no layer or no step to simulate")
        if len(self.loads) != len(self.facts) or self.tokens.min() < 1:
            raise InvalidArgument(
                f"{self.source}: expected loads of each of {len(self.facts)} layers, and a token "
                "or more in every step"
            )
        for facts, loads in zip(self.facts, self.loads, strict=True):
            shape = (self.steps, facts.experts)
            if loads.shape != shape or not np.isfinite(loads).all() or loads.min() < 0:
                raise InvalidArgument(
                    f"{self.source}: loads of {facts.name} are {list(loads.shape)}, expected "
                    f"{list(shape)}, numbers that are finite and not negative"
                )

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
            current = [forward] if trace.tokens[forward] else []
        elif current and layer == len(current):
            if trace.tokens[forward] == trace.tokens[current[0]]:
                current.append(forward)
            else:
                current = []
        else:
            current = []
        if current and len(current) == len(trace.layers):
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
        found = _numbers(counts)
        if found.ndim != 2 or not found.size or (shape and found.shape != shape):
            raise CorruptFile(f"{path}: domain {name!r} is not [layers][experts] like the others")
        if not ((found >= 0) & (found <= MOST_COUNTED)).all() or not found.sum(axis=1).all():
            raise CorruptFile(
                f"{path}: domain {name!r} has counts that cannot be: expected 0 to "
                f"{MOST_COUNTED:g}, some of them above 0 in each layer"
            )
        shape = found.shape
        shares[name] = found / found.sum(axis=1, keepdims=True)
    experts = next(iter(shares.values())).shape[1]
    top_k, model = data.get("top_k"), data.get("model", Path(path).name)
    if top_k is not None and not (type(top_k) is int and 0 < top_k <= experts):
        raise CorruptFile(f"{path}: top_k is {top_k!r}, expected a number from 1 to {experts}")
    if not isinstance(model, str):
        raise CorruptFile(f"{path}: model is {model!r}, expected a name")
    return Histograms(model, shares, top_k)


def _numbers(counts: Any) -> Array:
    """[layers, experts], or something of another shape where it is no such table of numbers."""
    try:
        found = np.array(counts)
        return found.astype(np.float64) if found.dtype.kind in "iuf" else np.zeros(0)
    except (TypeError, ValueError, OverflowError):
        return np.zeros(0)


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

    Raises:
        InvalidArgument: a number is not as it can be, or there would be too much to draw.
    """
    if min(steps, domains, stay) < 1 or not 1 <= tokens <= LARGEST_CHUNK:
        raise InvalidArgument(
            f"{steps} steps of {tokens} tokens, {domains} domains, {stay} steps alike: expected "
            f"1 or more, and at most {LARGEST_CHUNK} tokens"
        )
    if steps * sum(layer.experts for layer in facts) > MOST_LOADS:
        raise InvalidArgument(
            f"{steps} steps of {len(facts)} layers are too many to draw: expected at most "
            f"{MOST_LOADS} loads of experts in all"
        )
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
        f"{histograms.name}"
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
    if not 0 < top_k <= len(shares):
        raise InvalidArgument(f"top_k is {top_k}, expected 1 to the {len(shares)} experts")
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
