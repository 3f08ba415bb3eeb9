"""Timing of one model with its stock and its replaced layers, in turns."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..energy import Meter, Use
from ..progress import progress_bar

if TYPE_CHECKING:
    from ..loading import Replaced

SIDES = ("stock", "replaced")


@dataclass(frozen=True)
class Workload:
    """A prompt of random tokens, then random tokens decoded one by one."""

    vocabulary: int
    batch_size: int
    prompt_tokens: int
    generation_tokens: int
    prefill_step_size: int

    def warm_up(self) -> "Workload":
        return replace(
            self,
            prompt_tokens=min(self.prompt_tokens, 16),
            generation_tokens=min(self.generation_tokens, 2),
        )

    def tokens(self) -> mx.array:
        """[batch, prompt + generation], the same ones each time."""
        length = self.prompt_tokens + self.generation_tokens
        shape = (self.batch_size, length)
        return mx.random.randint(0, self.vocabulary, shape, key=mx.random.key(0))

    def prompt_steps(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.prompt_tokens, self.prefill_step_size):
            yield start, min(start + self.prefill_step_size, self.prompt_tokens)


@dataclass
class Trial:
    """Seconds of the whole prefill and of each decoded token; most likely token per position.

    `use` is energy and processor time of each phase, where they were asked for.
    """

    prefill: float
    decode: list[float]
    predictions: mx.array
    use: dict[str, Use] = field(default_factory=dict)


@dataclass
class Measurement:
    """The trials of each side, and why the stock side has none where it cannot run."""

    trials: dict[str, list[Trial]] = field(default_factory=lambda: {side: [] for side in SIDES})
    stock_error: str | None = None

    def agreement(self) -> float | None:
        """The share of prompt positions where both sides find the same token most likely."""
        if self.stock_error is not None:
            return None
        stock, replaced = (self.trials[side][0].predictions for side in SIDES)
        return float(np.mean(np.array(stock == replaced)))


def measure(
    model: "Replaced", workload: Workload, count: int, meter: Meter | None = None
) -> Measurement:
    """Run `count` trials of each side, the sides taking turns at going first."""
    measurement = Measurement()
    with progress_bar(total=2 * count, unit="trial") as progress:
        for number in range(count):
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                if side == "replaced" or measurement.stock_error is None:
                    take_turn(model, side, workload, measurement, meter)
                progress.update()
    model.restore()
    return measurement


def take_turn(
    model: "Replaced",
    side: str,
    workload: Workload,
    measurement: Measurement,
    meter: Meter | None = None,
) -> None:
    model.restore()
    if side == "replaced":
        model.replace()
    try:
        run_trial(model.model, workload.warm_up())
        measurement.trials[side].append(run_trial(model.model, workload, meter))
    except (RuntimeError, ValueError) as error:
        if side == "replaced":
            raise
        measurement.stock_error = str(error)  # MLX on the CPU refuses f16 and bf16 experts


def run_trial(model: nn.Module, workload: Workload, meter: Meter | None = None) -> Trial:
    from mlx_lm.models.cache import make_prompt_cache

    tokens, cache = workload.tokens(), make_prompt_cache(model)
    mx.eval(tokens)
    prefill, predictions = 0.0, []
    use: dict[str, Use] = {}
    before = meter.now() if meter else None
    for start, end in workload.prompt_steps():
        logits, seconds = timed_step(model, tokens[:, start:end], cache)
        prefill += seconds
        predictions.append(mx.argmax(logits, axis=-1))
    decode = []
    if meter and before:
        use["prefill"], before = meter.since(before), meter.now()
    for position in range(workload.prompt_tokens, tokens.shape[1]):
        decode.append(timed_step(model, tokens[:, position : position + 1], cache)[1])
    if meter and before:
        use["decode"] = meter.since(before)
    trial = Trial(prefill, decode, mx.concatenate(predictions, axis=1), use)
    mx.eval(trial.predictions)
    return trial


def timed_step(model: nn.Module, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, float]:
    start = perf_counter()
    logits = model(tokens, cache=cache)
    mx.eval(logits, [layer.state for layer in cache])
    return logits, perf_counter() - start
