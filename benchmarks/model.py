"""A whole model, stock against replaced: prefill of two layers of Qwen3-30B-A3B with 32 experts.

    python benchmarks/model.py [--tokens 128] [--repeats 5] [--stock-repeats 5] [--json F]

One model, replaced and restored in turns, every logit forced on both sides (stock MLX would
otherwise skip the last layer's experts). Then the share of the replaced model's time that is left
in stock MLX, and how much of it is the attention product. Stock takes about 100 s a prefill here:
`--stock-repeats 1` for a first look.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from common import format_seconds, print_machine, spread, summary, table, timed, write_json
from models import all_logits, prompt, qwen3

import mlx_moe
from mlx_moe import core

KERNELS = ("swiglu", "swiglu_combine", "grouped", "linear")


def replaced_seconds(model: Any, tokens: mx.array) -> float:
    """One prefill with both kinds of layers replaced, then restored."""
    mlx_moe.replace_moe_layers(model)
    mlx_moe.replace_linear_layers(model)
    all_logits(model, tokens[:, :1])
    seconds = timed(lambda: all_logits(model, tokens))
    mlx_moe.restore_linear_layers(model)
    mlx_moe.restore_moe_layers(model)
    return seconds


def kernel_seconds(model: Any, tokens: mx.array) -> dict[str, float]:
    """Seconds of one replaced prefill inside each of the core's functions."""
    inside = dict.fromkeys(KERNELS, 0.0)
    originals = {name: getattr(core, name) for name in KERNELS}

    def watched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = originals[name](*args, **kwargs)
            inside[name] += time.perf_counter() - start
            return result

        return call

    try:
        for name in KERNELS:
            setattr(core, name, watched(name))
        inside["prefill"] = replaced_seconds(model, tokens)
    finally:
        for name, original in originals.items():
            setattr(core, name, original)
    return inside


def attention_product_seconds(tokens: int, layers: int) -> float:
    """Stock scaled dot-product attention of all layers, bf16, causal."""
    shape = (1, 32, tokens, 128)
    queries = mx.random.normal(shape).astype(mx.bfloat16)
    keys, values = (mx.random.normal((1, 4, tokens, 128)).astype(mx.bfloat16) for _ in range(2))
    mx.eval(queries, keys, values)

    def product() -> None:
        mx.eval(
            mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=128**-0.5, mask="causal"
            )
        )

    return layers * min(timed(product) for _ in range(3))


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
    inside = kernel_seconds(model, tokens)
    total = inside.pop("prefill")
    product = attention_product_seconds(options.tokens, options.layers)

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
        if value:
            print(f"  {name}: {format_seconds(value)}, {100 * value / total:.0f} %")
    share = 100 * product / total
    print(f"  of which the attention product: {format_seconds(product)}, {share:.0f} %")
    write_json(
        options.json,
        {**stats, "ratio": ratio, "kernels": inside, "left": left, "attention_product": product},
    )


if __name__ == "__main__":
    main()
