"""A Qwen3-MoE model of real layer sizes with random weights, made without the float originals."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import qwen3_moe
from mlx_lm.models.cache import make_prompt_cache
from weights import BITS, GROUP, bf16_array
from workload import to_bf16


def qwen3_args(layers: int, experts: int, vocab: int) -> qwen3_moe.ModelArgs:
    """Qwen3-30B-A3B (32 heads, 4 of keys, 128 wide; experts 2048 -> 768), smaller in number."""
    return qwen3_moe.ModelArgs(
        model_type="qwen3_moe",
        hidden_size=2048,
        num_hidden_layers=layers,
        intermediate_size=6144,
        num_attention_heads=32,
        num_experts=experts,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        rms_norm_eps=1e-6,
        vocab_size=vocab,
        num_key_value_heads=4,
        head_dim=128,
        rope_theta=1e6,
        tie_word_embeddings=False,
        max_position_embeddings=40960,
        norm_topk_prob=True,
    )


def random_4bit(model: nn.Module) -> nn.Module:
    """The model in 4 bits and bf16, with random weights, evaluated and in inference mode.

    Nothing is evaluated before the packed weights take the place of the lazy float ones, so that
    the peak memory is that of the packed model.
    """
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=GROUP, bits=BITS)
    rng = np.random.default_rng(5)
    lazy = tree_flatten(model.parameters())
    model.update(tree_unflatten([(name, _random(rng, name, array)) for name, array in lazy]))
    model.eval()
    mx.eval(model.parameters())
    return model


def qwen3(layers: int, experts: int, vocab: int) -> nn.Module:
    return random_4bit(qwen3_moe.Model(qwen3_args(layers, experts, vocab)))


def _random(rng: np.random.Generator, name: str, like: mx.array) -> mx.array:
    """Random 4-bit codes; equal scales and biases that centre them (sd 1/50); ones in norms."""
    if like.dtype == mx.uint32:
        return mx.array(rng.integers(0, 1 << 32, like.shape, dtype=np.uint32))
    value = {"scales": 0.0044, "biases": -0.033}.get(name.rpartition(".")[2], 1.0)
    return bf16_array(to_bf16(np.full(like.shape, value, np.float32)))


def prompt(tokens: int, vocab: int) -> mx.array:
    """Random token ids [1, T]."""
    return mx.array(np.random.default_rng(3).integers(0, vocab, (1, tokens)))


def all_logits(model: Any, tokens: mx.array) -> None:
    """One prefill with a fresh cache and every logit forced, as the comparison needs."""
    mx.eval(model(tokens, cache=make_prompt_cache(model)))
