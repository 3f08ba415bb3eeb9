"""A model larger than its limit, in a process of its own: how much memory it takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

LIMIT = 150_000_000
SPARE = 30_000_000  # over the limit and the weights that are no experts
LAYERS, EXPERTS, HIDDEN, INNER = 21, 64, 512, 512
GROUP = 64

RUN = """
import json, resource, sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
import mlx_lm, mlx_moe
from mlx_moe import loading
from mlx_lm.generate import stream_generate

def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open("/proc/self/status") as file:  # ru_maxrss is the parent's too
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))

path, limit = sys.argv[1], int(sys.argv[2])
mlx_lm.utils.load_tokenizer(mlx_lm.utils._download(path))
before = peak()
model, tokenizer = mlx_moe.load(path, expert_memory=limit)
loaded = peak()
mx.eval(model.parameters())
prompt = mx.arange(64) * 31 % 2000
for response in stream_generate(model, tokenizer, prompt, max_tokens=8):
    pass
store = model.layers[0].mlp.switch_mlp._moe_layer.stored.layer.store
print(json.dumps({"loaded": loaded - before, "ran": peak() - before, **store.stats()}))
"""


@pytest.fixture(scope="module")
def large_model(
    tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int]:
    """A checkpoint of about 600 MB, nearly all of it 4-bit experts, and the bytes of the rest."""
    folder = tmp_path_factory.mktemp("large") / "model"
    shutil.copytree(tiny_model_path, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "quantization": {"group_size": GROUP, "bits": 4},
        "quantization_config": {"group_size": GROUP, "bits": 4},
    }
    (folder / "config.json").write_text(json.dumps(config))
    experts, others = expert_weights(), other_weights(config)
    weights = dict(others)
    for layer in range(LAYERS):
        weights |= {f"model.layers.{layer}.mlp.switch_mlp.{k}": v for k, v in experts.items()}
    names = sorted(weights)
    for i in range(3):
        part = {name: weights[name] for name in names[i::3]}
        mx.save_safetensors(str(folder / f"model-0000{i + 1}-of-00003.safetensors"), part)
    return folder, sum(a.nbytes for a in others.values())


def expert_weights() -> dict[str, mx.array]:
    """Random bytes as weights; the same for every layer, which no one looks at."""
    random = np.random.default_rng(0)
    found = {}
    for name, rows, columns in (
        ("gate_proj", INNER, HIDDEN),
        ("up_proj", INNER, HIDDEN),
        ("down_proj", HIDDEN, INNER),
    ):
        packed = random.integers(0, 1 << 32, (EXPERTS, rows, columns // 8), np.uint32)
        found[f"{name}.weight"] = mx.array(packed)
        scales = random.normal(0, 0.01, (EXPERTS, rows, columns // GROUP)).astype(np.float32)
        found[f"{name}.scales"] = mx.array(scales).astype(mx.bfloat16)
        found[f"{name}.biases"] = mx.array(-8 * scales).astype(mx.bfloat16)
    return found


def other_weights(config: dict[str, Any]) -> dict[str, mx.array]:
    """Everything but the experts, as the model's own class initialises it."""
    from mlx.utils import tree_flatten
    from mlx_lm.models.qwen3_moe import Model, ModelArgs

    model = Model(ModelArgs.from_dict({**config, "num_experts": 1, "num_experts_per_tok": 1}))
    gate = mx.random.normal((EXPERTS, HIDDEN)) / HIDDEN**0.5
    return {
        name: (gate if name.endswith("mlp.gate.weight") else array).astype(mx.bfloat16)
        for name, array in tree_flatten(model.parameters())
        if "switch_mlp" not in name
    }


def test_memory_stays_within_the_limit(large_model: tuple[Path, int]) -> None:
    folder, others = large_model
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert total > 4 * LIMIT - SPARE
    ran = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), str(LIMIT)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    print(found)
    assert found["loaded"] <= others + SPARE
    assert found["ran"] <= LIMIT + others + SPARE
    # It did use the limit, and read more than fits.
    assert LIMIT - 1_000_000 < found["resident_bytes"] <= found["limit_bytes"] == LIMIT
    assert found["bytes_read"] > 3 * LIMIT and found["evictions"] > 0
