"""A whole model, stock against replaced: prefill of two layers of Qwen3-30B-A3B with 32 experts.

    python benchmarks/model.py [--tokens 128] [--repeats 5] [--stock-repeats 5] [--json F]

One model, replaced and restored in turns, every logit forced on both sides (stock MLX would
otherwise skip the last layer's experts). Then how one replaced prefill divides into the core's
functions (grouped and softmax are the attention product here) and what is left in MLX and Python.
Stock took about 100 s a prefill on the machine it was written on: `--quick` for a first look.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from common import format_seconds, print_machine, spread, summary, timed, write_json
from models import all_logits, prompt, qwen3

import mlx_moe
from mlx_moe import core, large_pages
from mlx_moe.tables import table

KERNELS = ("swiglu", "swiglu_combine", "grouped", "softmax", "linear")


def replaced_seconds(model: Any, tokens: mx.array) -> float:
    """One prefill with both kinds of layers replaced, then restored."""
    with replaced(model):
        all_logits(model, tokens[:, :1])
        return timed(lambda: all_logits(model, tokens))


@contextmanager
def replaced(model: Any) -> Iterator[None]:
    mlx_moe.replace_moe_layers(model)
    mlx_moe.replace_linear_layers(model)
    try:
        yield
    finally:
        mlx_moe.restore_linear_layers(model)
        mlx_moe.restore_moe_layers(model)


def kernel_seconds(model: Any, tokens: mx.array) -> tuple[float, dict[str, float]]:
    """Seconds of one replaced prefill, and those inside each of the core's functions."""
    inside: dict[str, float] = {}
    originals = {name: getattr(core, name) for name in KERNELS}

    def watched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = originals[name](*args, **kwargs)
            inside[name] = inside.get(name, 0.0) + time.perf_counter() - start
            return result

        return call

    with replaced(model):
        all_logits(model, tokens[:, :1])
        try:
            for name in KERNELS:
                setattr(core, name, watched(name))
            total = timed(lambda: all_logits(model, tokens))
        finally:
            for name, original in originals.items():
                setattr(core, name, original)
    return total, inside


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=4096, help="small: the head is not the point")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stock-repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="32 tokens, stock once")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.stock_repeats = 32, 1
    return options


def main() -> None:
    options = options_of()
    print_machine()
    model = qwen3(options.layers, options.experts, options.vocab)
    tokens = prompt(options.tokens, options.vocab)
    seconds: dict[str, list[float]] = {"stock": [], "replaced": []}
    for turn in range(max(options.repeats, options.stock_repeats)):
        if turn < options.stock_repeats:
            seconds["stock"].append(timed(lambda: all_logits(model, tokens)))
        seconds["replaced"].append(replaced_seconds(model, tokens))
    stats = {name: summary(samples) for name, samples in seconds.items()}
    total, inside = kernel_seconds(model, tokens)

    rows = [
        [name, format_seconds(s["median"]), spread(s), int(s["samples"])]
        for name, s in stats.items()
    ]
    print(table(["model", "prefill", "spread", "samples"], rows))
    ratio = stats["stock"]["median"] / stats["replaced"]["median"]
    print(f"replaced is {ratio:.1f}x stock")
    left = total - sum(inside.values())
    print(f"of one replaced prefill, {format_seconds(total)}:")
    for name, value in [*inside.items(), ("left in MLX and Python", left)]:
        print(f"  {name}: {format_seconds(value)}, {100 * value / total:.0f} %")
    write_json(options.json, {**stats, "ratio": ratio, "kernels": inside, "left": left})


if __name__ == "__main__":
    large_pages.restart()
    main()
