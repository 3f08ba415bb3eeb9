"""What a stock model's expert layers were called with, recorded without mlx_moe, and what
quantiles of it may differ by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from families import switches
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_moe.calibration import QUANTILES
from mlx_moe.counting import QUANTILE_ERROR


class Weighted:
    """Stock's output, which notes what the block multiplies it by."""

    def __init__(self, y: mx.array, call: dict[str, Any]):
        self.y, self.call = y, call

    def __mul__(self, scores: mx.array) -> mx.array:
        self.call["scores"] = np.array(scores.astype(mx.float32)).reshape(self.call["ids"].shape)
        return self.y * scores

    __rmul__ = __mul__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.y, name)


@contextmanager
def recorded(
    model: nn.Module, calls: dict[str, list[dict[str, Any]]], weighted: bool
) -> Iterator[None]:
    """While open, calls[layer] gets {"ids" [T, k], "norms" [T], "scores" [T, k]} of each call."""
    names = {id(module): name for name, module in switches(model)}
    with pytest.MonkeyPatch.context() as patch:
        for cls in (SwitchGLU, SwitchMLP):
            patch.setattr(cls, "__call__", _recording(cls.__call__, names, calls, weighted))
        yield


def _recording(stock: Any, names: dict[int, str], calls: Any, weighted: bool) -> Any:
    def __call__(self: Any, x: mx.array, indices: mx.array) -> Any:
        rows = np.array(x.astype(mx.float32), np.float64).reshape(-1, x.shape[-1])
        ids = np.array(indices).reshape(-1, indices.shape[-1])
        call = {"ids": ids, "norms": np.sqrt((rows**2).sum(-1))}
        calls.setdefault(names[id(self)], []).append(call)
        y = stock(self, x, indices)
        return Weighted(y, call) if weighted else y

    return __call__


def record(
    model: nn.Module, documents: list[list[int]], chunk: int, weighted: bool
) -> dict[str, list[dict[str, Any]]]:
    """Every call of every layer when the documents are prefilled, a chunk to a call."""
    calls: dict[str, list[dict[str, Any]]] = {}
    with recorded(model, calls, weighted):
        for document in documents:
            cache = make_prompt_cache(model)
            for start in range(0, len(document), chunk):
                mx.eval(model(mx.array([document[start : start + chunk]]), cache=cache))
    return calls


def assert_quantiles(found: Any, values: list[list[float]], rounding: float = 1e-4) -> None:
    """Within the promised error of numpy's order statistics; NaN without values."""
    for row, sample in zip(found, values, strict=True):
        if not sample:
            assert np.isnan(row).all()
            continue
        exact = np.quantile(np.array(sample), QUANTILES, method="inverted_cdf")
        # A value at the edge of a bin may round into the next one.
        np.testing.assert_allclose(row, exact, rtol=QUANTILE_ERROR + rounding)
