"""What was replaced: one row for each layer, its counters, and the way back."""

from dataclasses import dataclass, field
from typing import Any

from .stats import Counters
from .store_report import StoreReport
from .tables import table

FACTS = ("kind", "family", "experts", "top-k", "weights", "backend")


@dataclass
class ReplacedLayer:
    """One row of `Replacement.layers`.

    Attributes:
        name: dotted path in the model.
        kind: "experts", "shared" (experts that every token passes), "dense" or "attention".
        family: the model file (mlx-lm's name for the architecture) of the calling block.
        experts: number of experts, None for a dense layer.
        dtype: of the values ("bfloat16"), or the mode ("mxfp4") of floating-point formats.
        bits: per weight if quantised (the most, where projections differ), else None.
        backend: "cpu", "stock", "mlx" (its operations on experts that stay on disk), or a plan's
            static executor, "host" or "coreml", beside which the cold path is "cpu", or "stock"
            where MLX computes on the GPU.
        residency: what a plan does here, in words; None without one.
    """

    name: str
    kind: str
    family: str
    experts: int | None
    dtype: str
    bits: int | None
    backend: str
    _layer: Any = field(default=None, repr=False, compare=False)
    _top_k: int | None = field(default=None, repr=False, compare=False)
    residency: str | None = None

    @property
    def top_k(self) -> int | None:
        """Experts per token: as the block says, else as last called, else None."""
        return self._top_k or getattr(self._layer, "top_k", None)

    @property
    def counters(self) -> Counters | None:
        """What the layer has done; None if it was left to stock code."""
        return None if self._layer is None else self._layer.counters

    @property
    def facts(self) -> tuple[str | int | None, ...]:
        """Cells of a table, as FACTS."""
        weights = self.dtype if self.bits is None else f"{self.bits}-bit {self.dtype}"
        return self.kind, self.family, self.experts, self.top_k, weights, self.backend


@dataclass
class Replacement:
    """What one call replaced. `str()` is a table, `restore()` undoes it.

    Attributes:
        layers: a `ReplacedLayer` for each layer, in the model's order.
        note: why a plan's static path is not taken, or where its programs run; what is in memory of
            experts that stay on disk; else None.
        store: the figures of the experts' store, else None.
    """

    layers: list[ReplacedLayer]
    _model: Any = field(repr=False, compare=False)
    _restore: Any = field(repr=False, compare=False)
    note: str | None = None
    store: StoreReport | None = field(default=None, repr=False, compare=False)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Per layer name: calls, tokens, kernel_calls, small, and fallbacks {reason: count}.

        tokens are rows of input, the attention product's over all layers. small counts the
        calls left to stock because a kernel gains nothing there; they are no fallbacks. Layers
        that were left to stock code altogether are not listed. Where a plan's static path is
        taken, static has `StaticCounters`' counts and seconds by stage; where the plan is
        followed, schedule has `Scheduler.stats()` and the changes that `failed`. With
        `expert_memory`, the entry "store" has the figures of `ExpertStore.stats`.
        """
        found = {
            layer.name: layer.counters.as_dict()
            for layer in self.layers
            if layer.counters is not None
        }
        return found if self.store is None else {**found, "store": self.store.stats()}

    def restore(self) -> None:
        """Put every layer's own class back; the model is exactly as it was."""
        self._restore(self._model)

    def __str__(self) -> str:
        header: tuple[str, ...] = ("layer", *FACTS)
        rows: list[tuple[Any, ...]] = [(layer.name, *layer.facts) for layer in self.layers]
        if any(layer.residency for layer in self.layers):
            header += ("plan",)
            cells = [layer.residency for layer in self.layers]
            rows = [(*row, cell) for row, cell in zip(rows, cells, strict=True)]
        text = table(header, rows)
        return text if self.note is None else f"{text}\n{self.note}"
