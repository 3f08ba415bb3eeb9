"""`mlx_moe generate --compare`: the same text through the stock layers, timed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..loading import Replaced
from ..tables import table

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


class Following:
    """A sampler that keeps to given tokens, and notes what it would have chosen."""

    def __init__(self, sampler: Callable[[mx.array], mx.array], tokens: Sequence[int]):
        self.sampler = sampler
        self.tokens = tokens
        self.choices: list[mx.array] = []

    def __call__(self, logprobs: mx.array) -> mx.array:
        choice = self.sampler(logprobs)
        mx.async_eval(choice)
        self.choices.append(choice)
        position = len(self.choices) - 1
        if position >= len(self.tokens):  # mlx-lm computes one token ahead
            return choice
        return mx.array([self.tokens[position]], dtype=choice.dtype)

    def agreements(self) -> int:
        pairs = zip(self.choices, self.tokens, strict=False)
        return sum(choice.item() == token for choice, token in pairs)


class Comparison:
    """Stands in for mlx-lm's `stream_generate`, and can repeat its run on stock layers."""

    def __init__(self, stream_generate: Callable[..., Any], models: Sequence[Replaced]):
        self.stream_generate = stream_generate
        self.models = models
        self.replaced = Run()

    def __call__(self, *args: Any, sampler: Any, **kwargs: Any) -> Iterator[Any]:
        self.args, self.kwargs, self.sampler = args, kwargs, sampler
        state: Any = mx.random.state
        high, low = state[0].tolist()
        self.seed = high << 32 | low  # seeds MLX's generator to where it stands now
        self.warm_up()
        for model in self.models:  # anew, so that the statistics leave out the warm-up
            model.restore()
            model.replace()
        yield from self.replaced.record(self.run(sampler))

    def run(self, sampler: Any, **changes: Any) -> Iterator[Any]:
        mx.random.seed(self.seed)
        return self.stream_generate(*self.args, sampler=sampler, **{**self.kwargs, **changes})

    def warm_up(self) -> None:
        for _ in self.run(self.sampler, max_tokens=WARM_UP_TOKENS):
            pass

    def against_stock(self) -> str:
        """Put the stock layers back, follow the same text, and return a table of both runs."""
        for model in self.models:
            model.restore()
        stock = Run()
        following = Following(self.sampler, self.replaced.tokens)
        try:
            self.warm_up()
            for _ in stock.record(self.run(following)):
                pass
        except (RuntimeError, ValueError) as error:  # MLX on the CPU refuses f16 and bf16 experts
            return f"the stock layers cannot run this model: {error}"
        count = len(self.replaced.tokens)
        return (
            f"{speeds(self.replaced, stock)}\n"
            f"given the same text, stock chooses the same token {following.agreements()} "
            f"of {count} times{self.precision_note()}"
        )

    def precision_note(self) -> str:
        """Why a half-precision model's choices may differ at all."""
        flat: list[Any] = [pair for m in self.models for pair in tree_flatten(m.model.parameters())]
        dtypes = {array.dtype for _, array in flat}
        if not dtypes & {mx.float16, mx.bfloat16}:
            return ""
        return (
            " (on the CPU stock accumulates in the model's half precision and the replaced layers "
            "in float32: both differ a little from the f32 model, see README)"
        )


def speeds(replaced: Run, stock: Run) -> str:
    rows = []
    for name, speed in (("prompt", "prompt_tps"), ("generation", "generation_tps")):
        ours, theirs = getattr(replaced.response, speed), getattr(stock.response, speed)
        rows.append([name, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}x"])
    return table(("tokens/s", "replaced", "stock", "ratio"), rows)
