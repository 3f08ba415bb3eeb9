"""A synthetic qwen3moe model as a GGUF file: real expert layers, everything else tiny.

Attention has one 32-wide head and a zero output matrix, expert outputs are scaled down: the
residual stream stays what was put in. Coordinates [l E, (l + 1) E) of that input are the router
logits of layer l and its router matrix picks them out, so that every layer routes exactly as the
other contestants' layers do. Needs the `gguf` package.
"""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
from workload import Shape, route_keys, to_bf16

HEAD = 32
VOCAB = 64

TYPES = gguf.GGMLQuantizationType


def rows(
    rng: np.random.Generator, shape: Shape, routing: str, tokens: int, layers: int, call: int
) -> np.ndarray:
    """Hidden states [tokens, d] f32: random, with every layer's router logits in their places."""
    x = rng.standard_normal((tokens, shape.dim), dtype=np.float32)
    for layer in range(layers):
        keys = route_keys(shape, routing, tokens, layer, call)
        x[:, layer * shape.experts : (layer + 1) * shape.experts] = keys
    return x


def router(shape: Shape, layer: int) -> np.ndarray:
    """[E, d]: expert e of layer l reads coordinate l E + e."""
    return np.eye(shape.experts, shape.dim, layer * shape.experts)


def q4_0(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Random Q4_0 blocks: bytes [..., K / 32 * 18], an f16 step and 32 4-bit codes each."""
    *outer, k = shape
    blocks = rng.integers(0, 256, (*outer, k // 32, 18), dtype=np.uint8)
    step = rng.uniform(0.5, 1.5, (*outer, k // 32, 1)) * scale / (4.6 * np.sqrt(k))
    blocks[..., :2] = step.astype(np.float16).view(np.uint8)
    return blocks.reshape(*outer, k // 32 * 18)


def experts(rng: np.random.Generator, fmt: str, *shape: int, scale: float = 1.0):
    """One stacked matrix and its GGUF type."""
    if fmt == "q4":
        return q4_0(rng, *shape, scale=scale), TYPES.Q4_0
    values = rng.standard_normal(shape, dtype=np.float32)
    values *= np.float32(scale / np.sqrt(shape[-1]))
    if fmt == "f32":
        return values, TYPES.F32
    return to_bf16(values).view(np.uint8), TYPES.BF16


def write_header(writer: gguf.GGUFWriter, shape: Shape, layers: int) -> None:
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_expert_feed_forward_length(shape.hidden)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")


def add_layer(writer: gguf.GGUFWriter, shape: Shape, fmt: str, layer: int) -> None:
    rng, block = np.random.default_rng([5, layer]), f"blk.{layer}."
    d, h, e = shape.dim, shape.hidden, shape.experts
    norms = {"attn_norm": d, "ffn_norm": d, "attn_q_norm": HEAD, "attn_k_norm": HEAD}
    for name, size in norms.items():
        writer.add_tensor(f"{block}{name}.weight", np.ones(size, np.float32))
    for name in ("attn_q", "attn_k", "attn_v"):
        writer.add_tensor(f"{block}{name}.weight", q4_0(rng, HEAD, d), raw_dtype=TYPES.Q4_0)
    silent = q4_0(rng, d, HEAD, scale=0.0)
    writer.add_tensor(f"{block}attn_output.weight", silent, raw_dtype=TYPES.Q4_0)
    writer.add_tensor(f"{block}ffn_gate_inp.weight", router(shape, layer).astype(np.float16))
    for name, sizes, scale in (
        ("ffn_gate_exps", (e, h, d), 1.0),
        ("ffn_up_exps", (e, h, d), 1.0),
        ("ffn_down_exps", (e, d, h), 0.005),
    ):
        data, kind = experts(rng, fmt, *sizes, scale=scale)
        writer.add_tensor(f"{block}{name}.weight", data, raw_dtype=kind)


def model_file(folder: Path, shape: Shape, fmt: str, layers: int) -> Path:
    """Path of the model with so many layers, written first if it is not there."""
    sizes = f"{shape.experts}-{shape.top_k}-{shape.dim}-{shape.hidden}"
    path = folder / f"moe-{sizes}-{fmt}-{layers}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    write_header(writer, shape, layers)
    rng = np.random.default_rng(5)
    writer.add_tensor("token_embd.weight", q4_0(rng, VOCAB, shape.dim), raw_dtype=TYPES.Q4_0)
    writer.add_tensor("output.weight", q4_0(rng, VOCAB, shape.dim), raw_dtype=TYPES.Q4_0)
    writer.add_tensor("output_norm.weight", np.ones(shape.dim, np.float32))
    for layer in range(layers):
        add_layer(writer, shape, fmt, layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, path)
    return path
