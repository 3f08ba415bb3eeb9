"""Tiny models of the families, saved as mlx-lm saves them, with their experts in a store."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from families import VOCAB, switches
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_moe.layers import PROJECTIONS

EXPERTS = 8  # of every family in the table


def save(model: nn.Module | dict[str, mx.array], folder: Path) -> Path:
    """A checkpoint of two shards."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = tree_flatten(model.parameters() if isinstance(model, nn.Module) else model)
    for i, part in enumerate((arrays[::2], arrays[1::2]), 1):
        mx.save_safetensors(str(folder / f"model-0000{i}-of-00002.safetensors"), dict(part))
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    return folder


def one_an_expert(arrays: dict[str, mx.array], called: dict[str, str]) -> dict[str, mx.array]:
    """The tensors of an unconverted checkpoint; `called`: its names of the projections."""
    found = {}
    for name, array in arrays.items():
        prefix, _, rest = name.partition(".switch_mlp.")
        child, _, key = rest.partition(".")
        if not rest:
            found[name] = array
            continue
        for e in range(len(array)):
            found[f"{prefix}.experts.{e}.{called[child]}.{key}"] = array[e]
    return found


def expert_arrays(model: nn.Module) -> list[mx.array]:
    """Every array of the expert layers' projections."""
    children = {child for names in PROJECTIONS.values() for child in names}
    linears = [m[child] for _, m in switches(model) for child in children & m.keys()]
    return [a for linear in linears for a in linear.values() if isinstance(a, mx.array)]


def slot_bytes(model: nn.Module) -> int:
    """Of one expert: every array at a multiple of 64 bytes, and whole pages. All layers alike."""
    sizes = set()
    for _, module in switches(model):
        children = [c for names in PROJECTIONS.values() for c in names if c in module]
        arrays = [a for c in children for a in module[c].values() if isinstance(a, mx.array)]
        used = sum(-(-a.nbytes // len(a) // 64) * 64 for a in arrays)
        sizes.add(-(-used // resource.getpagesize()) * resource.getpagesize())
    (size,) = sizes
    return size


def forwards(model: nn.Module, steps: int = 3) -> list[mx.array]:
    """Logits of a batch, of a prompt in chunks, and of greedily chosen tokens after it."""
    tokens = (mx.arange(2 * 12).reshape(2, 12) * 37 + 11) % VOCAB
    found = [model(tokens)]
    cache: Any = make_prompt_cache(model)
    found += [model(tokens[:1, :7], cache=cache), model(tokens[:1, 7:], cache=cache)]
    for _ in range(steps):
        chosen = mx.argmax(found[-1][:, -1:], axis=-1)
        found.append(model(chosen, cache=cache))
    mx.eval(found)
    return found


def assert_same(found: list[mx.array], expected: list[mx.array]) -> None:
    """Bit for bit."""
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        bits = mx.uint16 if a.itemsize == 2 else mx.uint32
        np.testing.assert_array_equal(np.array(a.view(bits)), np.array(b.view(bits)))
