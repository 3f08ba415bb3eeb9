"""One tiny random-weight model for every mlx-lm model file that builds a switch module.

`FAMILIES` is the table: what to build, and how many kernel calls one forward must make. Rows
whose file the installed mlx-lm does not have (0.31, the last for Python 3.10, lacks nine) are
left out.
"""

from __future__ import annotations

import importlib
import zlib
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import muse_spark_ops
from family_configs import CONFIGS, NESTED
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

VOCAB = 128

# Names that mlx-lm's families share for the same thing; a family's dataclass takes what it knows.
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "shared_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_qk_norm": True,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@dataclass(frozen=True)
class Family:
    """A model file and what replacing its experts must do.

    name: module under mlx_lm.models. calls: kernel calls of one forward by function name, for a
    model whose every MoE layer runs. path: "fused" where the block takes `(y * scores).sum`, else
    "plain". activation: what stands between the matrices. top_k: experts per token. native: how
    published checkpoints hold the experts where that is not dense (an `nn.quantize` setting).
    batches: False where mlx-lm itself refuses to batch requests, its cache type cannot. packed:
    a matrix outside the experts that MLX on a CPU cannot multiply in half precision, so that half
    models hold it in mxfp8, as the published checkpoints do. rounding: how much more than others
    a block rounds behind its experts in half precision.
    """

    name: str
    layers: int
    calls: dict[str, int]
    path: str = "fused"
    activation: str = "swiglu"
    top_k: int = 2
    native: dict[str, Any] | None = None
    batches: bool = True
    packed: str | None = None
    rounding: float = 1.0
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def _swiglu(name: str, layers: int = 2, **facts: Any) -> Family:
    function = "swiglu" if facts.get("path") == "plain" else "swiglu_combine"
    return Family(name, layers, {function: layers}, config=CONFIGS[name], **facts)


def _grouped(name: str, activation: str, matrices: int = 3, layers: int = 2, **facts: Any):
    calls = {"grouped": matrices * layers}
    return Family(name, layers, calls, activation=activation, config=CONFIGS[name], **facts)


MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
MXFP8 = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
NVFP4 = {"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": True}

_TABLE: tuple[Family, ...] = (
    _swiglu("Klear"),
    _swiglu("afmoe"),
    _swiglu("bailing_hybrid"),
    _swiglu("bailing_moe", path="plain"),  # hands y to a compiled function
    _swiglu("bailing_moe_linear"),
    _swiglu("bailing_moe_v3"),
    _swiglu("deepseek"),
    _swiglu("deepseek_v2"),
    _swiglu("deepseek_v3"),
    _swiglu("deepseek_v32"),
    _grouped(
        "deepseek_v41",
        "clamped swiglu in f32",
        path="plain",
        native=MXFP4,
        batches=False,
        packed="o_a_proj",
    ),
    _swiglu("dots1"),
    _swiglu("ernie4_5_moe"),
    _swiglu("exaone_moe"),
    _grouped("gemma4_text", "geglu", path="plain"),
    _swiglu("glm4_moe"),
    _swiglu("glm4_moe_lite"),
    _grouped("gpt_oss", "swiglu oai", path="plain", native=MXFP4),
    _swiglu("granitemoe"),
    _swiglu("granitemoehybrid"),
    _swiglu("hunyuan"),
    _swiglu("jamba"),
    _grouped("kimi_k3", "situ", native=MXFP4, rounding=1.7),  # then a norm and a projection
    _swiglu("kimi_linear"),
    _swiglu("laguna"),
    _swiglu("lfm2_moe"),
    _swiglu("llama4", path="plain", top_k=1, batches=False),  # scores scale x, not y
    _swiglu("longcat_flash", path="plain"),  # gives y * scores to mx.sum
    _swiglu("mellum"),
    _swiglu("mimo_v2_flash"),
    _swiglu("minimax"),
    _grouped("minimax_m3_vl", "swiglu oai", native=MXFP8),
    _swiglu("mistral4"),
    _swiglu("mixtral"),
    _grouped("muse_spark", "swiglu in f32", layers=3, path="plain", native=NVFP4),
    _grouped("nemotron_h", "relu2", matrices=2, layers=1),
    _swiglu("olmoe"),
    _swiglu("phimoe"),
    _grouped("phixtral", "gelu", matrices=2),
    _swiglu("qwen2_moe"),
    _swiglu("qwen3_moe"),
    _swiglu("qwen3_next"),
    Family(  # the first layer clamps, the second does not
        "step3p5",
        2,
        {"grouped": 3, "swiglu_combine": 1},
        activation="clamped swiglu, swiglu",
        config=CONFIGS["step3p5"],
    ),
)

FAMILIES = tuple(f for f in _TABLE if find_spec(f"mlx_lm.models.{f.name}") is not None)


def build(family: Family, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """A seeded model of `family` in eval mode, its floating parameters of `dtype` where the
    family allows (its own `cast_predicate` keeps the rest)."""
    module = importlib.import_module(f"mlx_lm.models.{family.name}")
    if family.name == "muse_spark" and not mx.metal.is_available():
        muse_spark_ops.install(module)
    config = {**BASE, "model_type": family.name, **family.config}
    if (key := NESTED.get(family.name)) is not None:
        config = {**config, key: config}
    mx.random.seed(zlib.crc32(family.name.encode()) + family.seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    _randomise(model)
    keeps = getattr(model, "cast_predicate", lambda _: True)
    cast = [
        (name, p.astype(dtype) if mx.issubdtype(p.dtype, mx.floating) and keeps(name) else p)
        for name, p in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(cast))
    if family.packed is not None and dtype != mx.float32:
        nn.quantize(model, **MXFP8, class_predicate=lambda path, _: path.endswith(family.packed))
    model.eval()
    mx.eval(model.parameters())
    return model


def _randomise(model: nn.Module) -> None:
    """Give constant parameters (biases, router weights of zeros) values, and experts enough
    weight that an error in them reaches the logits."""
    for path, parameter in tree_flatten(model.parameters()):
        if not mx.issubdtype(parameter.dtype, mx.floating) or mx.any(parameter != 0).item():
            continue
        spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
        value = spread * mx.random.normal(parameter.shape)
        model.update(tree_unflatten([(path, value.astype(parameter.dtype))]))
    for _, switch in switches(model):
        switch.update(tree_map(lambda w: 2 * w, switch.parameters()))


def quantize(model: nn.Module, group_size: int = 64, bits: int = 4, **how: Any) -> nn.Module:
    """Quantise in place the way `mlx_lm.utils.quantize_model` does."""
    global_scale = how.pop("global_scale", False)
    own = getattr(model, "quant_predicate", None)
    settings = {"group_size": group_size, "bits": bits, **how}

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
            return False
        chosen = True if own is None else own(path, module)
        if chosen is True and global_scale and module.weight.ndim == 3:
            return {**settings, "global_scale": True}
        return chosen

    nn.quantize(model, group_size, bits, class_predicate=predicate, **how)
    mx.eval(model.parameters())
    return model


def switches(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The model's switch modules with their paths, in order."""
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, (SwitchGLU, SwitchMLP))]
    return sorted(found, key=lambda item: item[0])
