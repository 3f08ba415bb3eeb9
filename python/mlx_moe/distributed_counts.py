"""How often each expert is asked for: from a calibration, counts, or all alike."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .calibration import Calibration
from .errors import InvalidArgument


class Histograms:
    """Loads of the experts of a layer by its name.

    Takes None (all experts alike), a `Calibration`, the path of one, or a mapping from layer
    names to counts [E].
    """

    def __init__(self, counts: Any):
        if isinstance(counts, str | Path):
            counts = Calibration.load(counts)
        if isinstance(counts, Calibration):
            counts = {
                layer.name: counts.loads(i).sum(axis=0, dtype=np.float64)
                for i, layer in enumerate(counts.layers)
            }
        if counts is not None and not isinstance(counts, Mapping):
            raise InvalidArgument(
                f"counts are {type(counts).__name__}; expected a calibration, its path, or counts "
                "by a layer's name"
            )
        self._counts = counts

    def of(self, name: str, experts: int) -> NDArray[np.float64]:
        """[E] of a layer; no expert has nothing to do, since counts are of other texts."""
        if self._counts is None:
            return np.ones(experts)
        if name not in self._counts:
            raise InvalidArgument(
                f"the counts have no layer {name!r}, only {', '.join(map(str, self._counts))}"
            )
        load = np.asarray(self._counts[name], np.float64)
        if load.shape != (experts,) or not np.isfinite(load).all() or load.min() < 0:
            raise InvalidArgument(
                f"{name}: counts of shape {list(load.shape)}; expected {experts} numbers of at "
                "least 0"
            )
        return load + max(load.sum(), 1.0) / experts * 0.01
