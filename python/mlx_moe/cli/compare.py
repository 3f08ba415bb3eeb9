"""`mlx_moe generate --compare`: the same prompt through the stock layers, timed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import mlx.core as mx

from ..loading import Replaced
from .report import table

WARM_UP_TOKENS = 2  # MLX compiles kernels and pages weights in at first use


@dataclass
class Run:
    """One generation: its tokens, and the last response with the speeds."""

    tokens: list[int] = field(default_factory=list)
    response: Any = None

    def record(self, responses: Iterable[Any]) -> Iterator[Any]:
        for response in responses:
            self.tokens.append(response.token)
            self.response = response
            yield response


class Comparison:
    """Stands in for mlx-lm's `stream_generate`, and can repeat its run on stock layers."""

    def __init__(self, stream_generate: Callable[..., Any], models: Sequence[Replaced]):
        self.stream_generate = stream_generate
        self.models = models
        self.replaced = Run()

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        self.args, self.kwargs = args, kwargs
        high, low = mx.random.state[0].tolist()
        self.seed = high << 32 | low  # seeds MLX's generator to where it stands now
        self.warm_up()
        for model in self.models:  # anew, so that the statistics leave out the warm-up
            model.restore()
            model.replace()
        yield from self.replaced.record(self.stream_generate(*args, **kwargs))

    def warm_up(self) -> None:
        for _ in self.stream_generate(*self.args, **{**self.kwargs, "max_tokens": WARM_UP_TOKENS}):
            pass
        mx.random.seed(self.seed)

    def against_stock(self) -> str:
        """Put the stock layers back, repeat the run, and return a table of both."""
        for model in self.models:
            model.restore()
        stock = Run()
        try:
            self.warm_up()
            for _ in stock.record(self.stream_generate(*self.args, **self.kwargs)):
                pass
        except (RuntimeError, ValueError) as error:  # MLX on the CPU refuses f16 and bf16 experts
            return f"the stock layers cannot run this model: {error}"
        return describe(self.replaced, stock)


def describe(replaced: Run, stock: Run) -> str:
    rows = []
    for name, speed in (("prompt", "prompt_tps"), ("generation", "generation_tps")):
        ours, theirs = getattr(replaced.response, speed), getattr(stock.response, speed)
        rows.append([name, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}x"])
    header = ("tokens/s", "mlx_moe", "stock", "ratio")
    return f"{table(header, rows)}\n{difference(replaced.tokens, stock.tokens)}"


def difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    for position, (a, b) in enumerate(zip_longest(ours, theirs)):
        if a != b:
            return f"same text as stock for {position} of {max(len(ours), len(theirs))} tokens"
    return f"same text as stock: all {len(ours)} tokens"
