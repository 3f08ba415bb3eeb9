"""Dequantised experts, bit for bit against formats decoded here, and what reading them costs."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from switch_reference import Block, glu, mlp, quantise

from mlx_moe.errors import InvalidArgument, UnsupportedLayer
from mlx_moe.experts_weights import expert_weights, release

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
FORMATS = {
    **{f"affine-{bits}": {"mode": "affine", "bits": bits} for bits in (2, 3, 4, 5, 6, 8)},
    "mxfp4": {"mode": "mxfp4", "bits": 4, "group_size": 32},
    "mxfp8": {"mode": "mxfp8", "bits": 8, "group_size": 32},
    "nvfp4": {"mode": "nvfp4", "bits": 4, "group_size": 16},
}


def integers(packed: np.ndarray, bits: int) -> np.ndarray:
    """The values of a row, which lie in it as one string of bits, lowest first."""
    stream = np.unpackbits(packed.view(np.uint8), axis=-1, bitorder="little")
    values = stream.reshape(*packed.shape[:-1], -1, bits)
    return (values.astype(np.int64) << np.arange(bits)).sum(-1)


def float4(code: np.ndarray) -> np.ndarray:
    return np.where(code & 8, -1.0, 1.0) * E2M1[code & 7]


def float8(code: np.ndarray) -> np.ndarray:
    """E4M3: bias 7, no infinities."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.where(sign, -1.0, 1.0) * np.where(exponent, normal, mantissa / 8 * 2.0**-6)


def decoded(linear: Any, expert: int) -> np.ndarray:
    """The float32 values of an expert's matrix."""
    if "scales" not in linear:
        return np.array(linear["weight"][expert].astype(mx.float32))
    codes = integers(np.array(linear["weight"][expert]), linear.bits)
    scales = linear["scales"][expert]
    if linear.mode == "affine":
        scale, bias = (
            np.repeat(np.array(a[expert].astype(mx.float32)), linear.group_size, -1)
            for a in (linear["scales"], linear["biases"])
        )
        return codes.astype(np.float32) * scale + bias
    scale = np.array(scales).astype(np.int64)
    scale = float8(scale) if linear.mode == "nvfp4" else 2.0 ** (scale - 127.0)
    values = float8(codes) if linear.mode == "mxfp8" else float4(codes)
    if (whole := linear.get("global_scale")) is not None:
        scale = scale * np.array(whole[expert]).astype(np.float64) / (448 * 6)
    return (values * np.repeat(scale, linear.group_size, -1)).astype(np.float32)


def layer(fmt: str, dtype: mx.Dtype = mx.float32, **how: Any) -> Any:
    made = Block(glu(**how))
    made.set_dtype(dtype)
    if fmt in FORMATS:
        nn.quantize(made, **{"group_size": 64, **FORMATS[fmt]})
    mx.eval(made.parameters())
    return made.experts


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", ["dense", *FORMATS])
def test_values_are_the_formats_own_rounded_once(fmt: str, dtype: mx.Dtype) -> None:
    module = layer(fmt, dtype)
    exact = expert_weights(module, "glu", 3, (0, 128), "layer", "float32")
    half = expert_weights(module, "glu", 3, (0, 128), "layer")
    for key in ("gate", "up", "down"):
        expected = decoded(module[f"{key}_proj"], 3)
        np.testing.assert_array_equal(getattr(exact, key), expected)
        np.testing.assert_array_equal(getattr(half, key), expected.astype(np.float16))


def test_nvfp4_with_a_scale_of_each_experts_own() -> None:
    module = layer("dense")
    for key in ("gate_proj", "up_proj", "down_proj"):
        try:
            module[key] = module[key].to_quantized(16, 4, mode="nvfp4", global_scale=True)
        except TypeError:
            pytest.skip("this mlx-lm does not know global scales")
    found = expert_weights(module, "glu", 5, (0, 128), "layer", "float32")
    np.testing.assert_allclose(found.up, decoded(module["up_proj"], 5), rtol=1e-6)
    assert not np.array_equal(found.up, expert_weights(module, "glu", 4, (0, 128), "l").up)


@pytest.mark.parametrize("make, kind", [(glu, "glu"), (mlp, "mlp")])
def test_splits_put_together_are_the_whole_and_its_biases(make: Any, kind: str) -> None:
    module = make(bias=True)
    quantise(module, "affine-4")
    whole = expert_weights(module, kind, 2, (0, 128), "layer")
    parts = [expert_weights(module, kind, 2, split, "layer") for split in ((0, 48), (48, 128))]
    for key, axis in (("gate", 0), ("up", 0), ("down", 1), ("gate_bias", 0), ("up_bias", 0)):
        if kind == "mlp" and key.startswith("gate"):
            assert getattr(whole, key) is None
            continue
        joined = np.concatenate([getattr(part, key) for part in parts], axis)
        np.testing.assert_array_equal(joined, getattr(whole, key))
    np.testing.assert_array_equal(parts[0].down_bias, whole.down_bias)
    assert whole.down_bias is not None and parts[1].down_bias is None


def test_one_shared_expert_is_read_from_plain_linear_layers() -> None:
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(64, 32, False), nn.Linear(64, 32, False)
            self.down_proj = nn.Linear(32, 64, False)

    module = MLP()
    up = np.array(module.up_proj.weight)
    found = expert_weights(module, "glu", 0, (0, 32), "shared", "float32")
    np.testing.assert_array_equal(found.up, up)
    nn.quantize(module, 32, 8)
    assert np.abs(expert_weights(module, "glu", 0, (0, 32), "shared").up - up).max() < 1e-2


@pytest.mark.parametrize(
    "expert, split, message",
    [(8, (0, 128), "8 experts of 128"), (0, (0, 129), "0 to 129"), (0, (4, 4), "4 to 4")],
)
def test_wrong_experts_and_ranges_are_named(expert: int, split: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"a.layer: .*{message}"):
        expert_weights(glu(), "glu", expert, split, "a.layer")


def test_what_float16_cannot_hold_is_refused() -> None:
    module = glu()
    module.down_proj.weight = module.down_proj.weight.at[1, 2, 3].add(1e5)
    expert_weights(module, "glu", 0, (0, 128), "layer")
    with pytest.raises(
        InvalidArgument, match="layer.down_proj: a weight of [0-9.e+]+ does not fit in float16"
    ):
        expert_weights(module, "glu", 1, (0, 128), "layer")


def test_adapters_are_refused_by_name() -> None:
    from mlx_lm.tuner.lora import LoRASwitchLinear

    module = glu()
    module.up_proj = LoRASwitchLinear.from_base(module.up_proj)
    with pytest.raises(UnsupportedLayer, match="layer.up_proj: LoRASwitchLinear.*mlx_lm.fuse"):
        expert_weights(module, "glu", 0, (0, 128), "layer")


def test_nothing_but_the_layer_asked_for_is_read(tmp_path: Path) -> None:
    model = [glu(), glu()]
    mx.eval([m.parameters() for m in model])
    arrays = {str(i): m.up_proj.weight for i, m in enumerate(model)}
    mx.save_safetensors(str(tmp_path / "w.safetensors"), arrays)
    for i, array in mx.load(str(tmp_path / "w.safetensors")).items():
        model[int(i)].up_proj.weight = array
    before, size = mx.get_active_memory(), arrays["0"].nbytes
    expert_weights(model[0], "glu", 0, (0, 128), "layer")
    read = mx.get_active_memory() - before
    assert size <= read < 1.5 * size
    release(model[0])
    assert mx.get_active_memory() < before  # the layer's other matrices too
