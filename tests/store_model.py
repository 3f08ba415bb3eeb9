"""A checkpoint of random expert layers, and the same layers with all experts in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_moe.layers import PROJECTIONS
from mlx_moe.store_files import Checkpoint, StoredExperts, stored_experts
from mlx_moe.store_forward import Forward, forward_of
from mlx_moe.weights import Linear

D, FF, EXPERTS, TOP_K = 64, 96, 8, 2
Layers = dict[str, Any]
# bits, group_size, mode; None is dense.
FORMATS: dict[str, tuple[int, int, str] | None] = {
    "bf16": None,
    "affine 4": (4, 32, "affine"),
    "affine 3": (3, 32, "affine"),
    "mxfp4": (4, 32, "mxfp4"),
    "nvfp4": (4, 16, "nvfp4"),
}


def make_layers(
    count: int = 2, fmt: str = "affine 4", kind: str = "glu", bias: bool = False, seed: int = 1
) -> Layers:
    """Layers by the path that the checkpoint names them with."""
    mx.random.seed(seed)
    layers: Layers = {}
    for i in range(count):
        if kind == "glu":
            layer = SwitchGLU(D, FF, EXPERTS, bias=bias)
        else:
            layer = SwitchMLP(D, FF, EXPERTS, activation=nn.ReLU(), bias=bias)
        for name in PROJECTIONS[kind]:
            if bias:
                layer[name].bias = mx.random.normal(layer[name].bias.shape)
        layer.set_dtype(mx.bfloat16)
        if (how := FORMATS[fmt]) is not None:
            bits, group, mode = how
            nn.quantize(layer, group_size=group, bits=bits, mode=mode)
        mx.eval(layer.parameters())
        layers[f"model.layers.{i}.mlp.switch_mlp"] = layer
    return layers


def parameters(layers: Layers) -> dict[str, mx.array]:
    found = {}
    for name, layer in layers.items():
        for projection, linear in layer.children().items():
            for key, array in linear.items():
                if isinstance(array, mx.array):
                    found[f"{name}.{projection}.{key}"] = array
    return found


def write_checkpoint(folder: Path, layers: Layers, stacked: bool = True) -> Path:
    """Two shards; tensors stacked, or one an expert with the names of unconverted models."""
    tensors = parameters(layers)
    if not stacked:
        tensors = {
            name: array[e]
            for parameter, array in tensors.items()
            for e, name in enumerate(one_an_expert(parameter))
        }
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    for i, part in enumerate((names[::2], names[1::2]), 1):
        shard = {"odd": mx.zeros(3, mx.uint8)} if i == 1 else {}
        shard |= {name: tensors[name] for name in part}
        mx.save_safetensors(str(folder / f"model-0000{i}-of-00002.safetensors"), shard)
    return folder


def one_an_expert(parameter: str) -> list[str]:
    """What a checkpoint with a tensor an expert calls them."""
    name, child, key = parameter.rsplit(".", 2)
    return [f"{name.removesuffix('.switch_mlp')}.experts.{e}.{child}.{key}" for e in range(EXPERTS)]


def found_experts(checkpoint: Checkpoint, layers: Layers, kind: str = "glu") -> list[StoredExperts]:
    names = {
        parameter: one_an_expert(parameter)
        for parameter in parameters(layers)
        if parameter not in checkpoint.tensors
    }
    return [
        stored_experts(checkpoint, name, layer, PROJECTIONS[kind], names)
        for name, layer in layers.items()
    ]


def resident(
    layer: Any,
    experts: StoredExperts,
    forward: Forward,
    x: mx.array,
    ids: mx.array,
    scores: mx.array | None,
) -> mx.array:
    """The same forward with matrices over the layer's own arrays."""
    linears = [Linear(layer[name], name) for name in experts.projections]
    return forward.whole(x, ids, scores, [linear.matrix(linear.arrays) for linear in linears])


def forward_for(experts: StoredExperts, layer: Any) -> Forward:
    return forward_of(experts, layer.activation, isinstance(layer, SwitchGLU))


def inputs(tokens: int, dtype: mx.Dtype = mx.bfloat16, seed: int = 3) -> tuple[Any, Any, Any]:
    """x [T, D], ids [T, k] distinct within a token, scores [T, k]."""
    keys = mx.random.split(mx.random.key(seed), 3)
    x = mx.random.normal((tokens, D), key=keys[0]).astype(dtype)
    ids = mx.argsort(mx.random.uniform(shape=(tokens, EXPERTS), key=keys[1]))[:, :TOP_K]
    ids = mx.contiguous(ids.astype(mx.uint32))
    scores = mx.random.uniform(shape=(tokens, TOP_K), key=keys[2]).astype(dtype)
    mx.eval(x, ids, scores)
    return x, ids, scores
