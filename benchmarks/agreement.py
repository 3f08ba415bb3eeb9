"""How near a half-precision model's logits come to its own weights in f32, stock's beside ours.

    python benchmarks/agreement.py [--model DIR] [--text FILE] [--tokens N] [--json F]

The reference is the model with its weights (and scales) cast to f32, on stock MLX. For both sides:
relative Frobenius error of all logits of the text, and how often the most likely token is the
reference's. Stock MLX accumulates in the model's own precision on the CPU, the kernels in f32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
from common import print_machine, write_json

import mlx_moe
from mlx_moe.tables import table

EXAMPLES = Path(__file__).parent.parent / "examples"


def logits(model, tokens: mx.array) -> np.ndarray:
    """[T, vocabulary] f32."""
    return np.array(model(tokens)[0].astype(mx.float32))


def compare(found: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    same = found.argmax(axis=-1) == reference.argmax(axis=-1)
    return {
        "logit_error": float(np.linalg.norm(found - reference) / np.linalg.norm(reference)),
        "same_top_token": float(same.mean()),
    }


def measure(path: str, text: str, limit: int) -> tuple[int, dict[str, dict[str, float]]]:
    model, tokenizer = mlx_lm.load(path)
    tokens = mx.array([tokenizer.encode(text)[:limit]])
    found = {"stock": logits(model, tokens)}
    replaced = [mlx_moe.replace_moe_layers(model), mlx_moe.replace_linear_layers(model)]
    found["replaced"] = logits(model, tokens)
    for replacement in replaced:
        replacement.restore()
    model.set_dtype(mx.float32)
    reference = logits(model, tokens)
    results = {side: compare(values, reference) for side, values in found.items()}
    return tokens.size, results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(EXAMPLES / "tiny-qwen3-moe"))
    parser.add_argument("--text", type=Path, default=EXAMPLES / "prompt.txt")
    parser.add_argument("--tokens", type=int, default=512, help="at most so many of the text")
    parser.add_argument("--json")
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    print_machine()
    count, results = measure(options.model, options.text.read_text(), options.tokens)
    rows = [
        [side, f"{row['logit_error']:.4f}", f"{row['same_top_token']:.1%}"]
        for side, row in results.items()
    ]
    print(table([f"{count} tokens", "error of the logits", "same top token"], rows))
    write_json(options.json, results)


if __name__ == "__main__":
    main()
