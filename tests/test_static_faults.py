"""Static layers when something goes wrong or changes: tiles, executors, weights, modes, copies."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU
from static_layer import ALL, HALF, hot, routed, static, weighted
from switch_reference import (
    TOP_K,
    block,
    error,
    float64,
    glu,
    in_threads,
    inputs,
)

from mlx_moe import restore_moe_layers


def test_tiles_that_leave_the_range_of_half_precision(tmp_path) -> None:
    model = block(glu())
    x, ids, scores = inputs(60)
    huge = mx.where(mx.arange(60)[:, None] == 7, 1e6 * x, x)
    want = weighted(model, huge, ids, scores)
    replacement = hot(model, tmp_path, ALL)
    got = model(huge, ids, scores)
    assert error(got, want) < HALF
    for token in (6, 7, 8):
        assert error(got[0, token], want[0, token]) < HALF
    counts = static(replacement)
    assert 1 <= counts["recomputed_tiles"] <= 2
    assert counts["failed_tiles"] == 0


@pytest.mark.parametrize("scale", [1.0, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4, 1e-6])
def test_small_inputs_keep_their_precision(tmp_path, scale: float) -> None:
    """In half precision alone, 1e-3 of the usual loses 14 % of the norm."""
    model = block(glu())
    x, ids, scores = inputs(60)
    want = weighted(model, scale * x, ids, scores)
    replacement = hot(model, tmp_path, ALL)
    assert error(model(scale * x, ids, scores), want) < HALF
    counts = static(replacement)
    assert counts["failed_tiles"] == 0 and counts["dispatches"] == 3
    assert (counts["recomputed_tiles"] > 0) == (scale <= 1e-2)


def test_an_executor_that_fails(tmp_path) -> None:
    class Failing:
        """Says of every second tile that it failed, and leaves rubbish in it."""

        def submit(self, tiles: list[Any]) -> Any:
            self.texts = ["" if i % 2 else "device lost" for i in range(len(tiles))]
            submitted = real.submit(tiles)

            class Submitted:
                def wait(_) -> list[str]:
                    submitted.wait()
                    for text, (_, _, out) in zip(self.texts, tiles, strict=True):
                        out[:] = 77 if text else out
                    return self.texts

            return Submitted()

    model = block(glu())
    x, ids, scores = inputs(60)
    want = weighted(model, x, ids, scores)
    replacement = hot(model, tmp_path, ALL)
    layer = model.experts._moe_layer.static.layer
    real, layer.executor = layer.executor, Failing()
    assert error(model(x, ids, scores), want) < HALF
    counts = static(replacement)
    assert (counts["failed_tiles"], counts["recomputed_tiles"]) == (2, 0)


def test_many_callers(tmp_path) -> None:
    model = block(glu())
    cases = [inputs(tokens) for tokens in (5, 40, 90, 200)]
    wants = [weighted(model, *case) for case in cases]
    replacement = hot(model, tmp_path)

    def run(case: int) -> float:
        with mx.stream(mx.new_stream(mx.cpu)):
            return error(model(*cases[case]), wants[case])

    assert max(in_threads(run, len(cases), 12)) < HALF
    counts = static(replacement)
    assert counts["forwards"] == 12 * len(cases)
    assert routed(counts) == 12 * TOP_K * sum(case[0].shape[1] for case in cases)


def test_changed_weights_close_the_static_path(tmp_path, caplog) -> None:
    model = block(glu())
    x, ids, scores = inputs(40)
    replacement = hot(model, tmp_path, ALL)
    model(x, ids, scores)
    model.experts.up_proj.weight[3] = 0.25  # in place: the same array object
    want = weighted(model, x, ids, scores)
    assert error(model(x, ids, scores), want) < 1e-5
    assert error(model(x, ids, scores), want) < 1e-5
    counts = static(replacement)
    assert (counts["stale"], counts["forwards"]) == (1, 1)
    assert "the weights have changed since they were compiled" in caplog.text


def test_quantising_later_closes_the_static_path(tmp_path) -> None:
    model = block(glu())
    replacement = hot(model, tmp_path, ALL)
    nn.quantize(model, 64, 4)
    x, ids, scores = inputs(40)
    assert error(model(x, ids, scores), weighted(model, x, ids, scores)) < 1e-5
    assert static(replacement)["stale"] == 1


def test_gradients_are_stocks(tmp_path) -> None:
    model, stock = block(glu()), block(glu())
    stock.update(model.parameters())
    x, ids, scores = inputs(40)

    def loss(which: nn.Module) -> Any:
        return lambda weights, x: (
            which.update({"experts": {"up_proj": {"weight": weights}}}),
            mx.square(which(x, ids, scores)).sum(),
        )[1]

    weights = stock.experts.up_proj.weight
    replacement = hot(model, tmp_path, ALL)
    found = mx.grad(loss(model), (0, 1))(weights, x)
    counts = static(replacement)
    wanted = mx.grad(loss(stock), (0, 1))(weights, x)
    for a, b in zip(found, wanted, strict=True):
        assert error(a, float64(b)) < HALF
    assert counts["forwards"] == 1, "the static path did not run"


def test_training_and_tracing_run_stock_code(tmp_path) -> None:
    model = block(glu())
    x, ids, scores = inputs(40)
    want = float64(model(x, ids, scores))
    replacement = hot(model, tmp_path, ALL)
    assert error(mx.compile(lambda x: model(x, ids, scores))(x), want) < 1e-5
    model.train()
    assert error(model(x, ids, scores), want) < 1e-5
    assert static(replacement)["forwards"] == 0


def test_a_copied_model_goes_on(tmp_path) -> None:
    model = block(glu())
    x, ids, scores = inputs(40)
    want = weighted(model, x, ids, scores)
    replacement = hot(model, tmp_path, ALL)
    other = copy.deepcopy(model)
    assert error(other(x, ids, scores), want) < HALF
    assert other.experts._moe_layer.static.counters.as_dict()["forwards"] == 1
    assert static(replacement)["forwards"] == 0


def test_restore_is_exact(tmp_path) -> None:
    model = block(glu())
    x, ids, scores = inputs(40)
    before = dict(tree_flatten(model.parameters()))
    want = model(x, ids, scores)
    mx.eval(want)
    hot(model, tmp_path, ALL)
    model(x, ids, scores)
    restore_moe_layers(model)
    assert type(model.experts) is SwitchGLU
    assert "_moe_layer" not in model.experts.__dict__
    after = dict(tree_flatten(model.parameters()))
    assert all(after[key] is array for key, array in before.items())
    assert mx.array_equal(model(x, ids, scores), want)


def test_stages_are_timed(tmp_path) -> None:
    model = block(glu())
    replacement = hot(model, tmp_path)
    model(*inputs(100))
    seconds = static(replacement)["seconds"]
    assert set(seconds) == {"bucket", "pack", "submit", "cold", "wait", "combine"}
    assert all(t > 0 for t in seconds.values())
