"""What `mlx_moe doctor` knows of experts and families from the headers of made-up checkpoints."""

import re
from pathlib import Path

import mlx_lm
import mlx_lm.utils
import pytest
from made_checkpoints import CONFIG, D, E, F, Shapes, numbered, stacked, tensors

from mlx_moe import top_k
from mlx_moe.doctor_experts import expert_layers
from mlx_moe.doctor_families import family_of, has_switch_layers, like, models_directory
from mlx_moe.doctor_files import read_model
from mlx_moe.facts import layer_facts
from mlx_moe.find import DEFERRED_FAMILIES
from mlx_moe.safetensors_headers import Tensor

# What the experts are


@pytest.mark.parametrize(
    ("shapes", "text", "problem"),
    [
        (stacked(4), "affine 4 bits, groups of 64", None),
        (stacked(8, 32, "F16"), "affine 8 bits, groups of 32", None),
        (stacked(3, 64, "F32"), "affine 3 bits, groups of 64", None),
        (stacked(4, 32, "U8", biases=False), "mxfp4", None),
        (stacked(8, 32, "U8", biases=False), "mxfp8", None),
        (stacked(4, 16, "U8", biases=False), "nvfp4", None),
        (stacked(None), "bfloat16", None),
        (stacked(None, scales="F32"), "float32", None),
        (stacked(None, scales="F8_E4M3"), "F8_E4M3", "gate_proj: weights are F8_E4M3"),
        (stacked(4, 16), "affine 4 bits, groups of 16", "gate_proj: .*group"),
        (stacked(4, 64, "U8", biases=False), "unknown", "gate_proj: "),
        (stacked(4, 64, "I8"), "affine 4 bits, groups of 64", "scales are I8"),
    ],
)
def test_formats(shapes: Shapes, text: str, problem: str | None) -> None:
    (layer,) = expert_layers(tensors(shapes))
    assert (layer.experts, layer.hidden, layer.inner, layer.matrices) == (E, D, F, 3)
    assert layer.name == "model.layers.0.mlp.switch_mlp" and layer.stacked and not layer.biases
    assert layer.format == text
    assert layer.problem is None if problem is None else re.search(problem, str(layer.problem))


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (numbered("model.layers.3.mlp.experts", ("gate_proj", "up_proj", "down_proj")), (3, False)),
        (numbered("model.layers.0.block_sparse_moe.experts", ("w1", "w3", "w2")), (3, False)),
        (numbered("transformer.h.0.moe.mlp", ("fc1", "fc2")), (2, False)),
        (numbered("backbone.layers.1.mixer.experts", ("up_proj", "down_proj")), (2, False)),
        (
            {
                "m.0.mlp.experts.gate_up_proj": ("BF16", [E, 2 * F, D]),
                "m.0.mlp.experts.down_proj": ("BF16", [E, D, F]),
            },
            (3, False),
        ),
        (  # the transposed
            {
                "m.0.feed_forward.experts.gate_up_proj": ("BF16", [E, D, 2 * F]),
                "m.0.feed_forward.experts.down_proj": ("BF16", [E, F, D]),
            },
            (3, False),
        ),
        (
            {
                "m.0.block_sparse_moe.input_linear.weight": ("BF16", [E, 2 * F, D]),
                "m.0.block_sparse_moe.output_linear.weight": ("BF16", [E, D, F]),
            },
            (3, False),
        ),
        (
            {
                "m.0.mlp.experts.gate_up_proj_blocks": ("U8", [E, 2 * F, D // 32, 16]),
                "m.0.mlp.experts.gate_up_proj_scales": ("U8", [E, 2 * F, D // 32]),
                "m.0.mlp.experts.gate_up_proj_bias": ("BF16", [E, 2 * F]),
                "m.0.mlp.experts.down_proj_blocks": ("U8", [E, D, F // 32, 16]),
                "m.0.mlp.experts.down_proj_scales": ("U8", [E, D, F // 32]),
                "m.0.mlp.experts.down_proj_bias": ("BF16", [E, D]),
            },
            (3, True),
        ),
    ],
)
def test_checkpoints_in_other_layouts(shapes: Shapes, expected: tuple[int, bool]) -> None:
    (layer,) = expert_layers(tensors(shapes))
    assert (layer.experts, layer.hidden, layer.inner) == (E, D, F)
    assert (layer.matrices, layer.biases) == expected
    assert not layer.stacked and layer.problem is None
    assert layer.bytes == sum(tensor.bytes for tensor in tensors(shapes).values())


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"],
        ["model.layers.0.mlp.shared_experts.up_proj.weight"],
        ["model.layers.0.mixer.conv1d.weight"],
    ],
)
def test_dense_layers_are_no_experts(names: list[str]) -> None:
    assert expert_layers({name: Tensor("BF16", (D, F)) for name in names}) == []


def test_the_example_model_is_as_mlx_lm_loads_it(tiny_model_path: Path) -> None:
    model, _ = mlx_lm.load(str(tiny_model_path))
    found = expert_layers(read_model(str(tiny_model_path)).tensors)
    expected = layer_facts(model)
    assert [layer.name for layer in found] == [facts.name for facts in expected]
    for layer, facts in zip(found, expected, strict=True):
        own = (layer.experts, layer.hidden, layer.inner, layer.matrices == 3, layer.biases)
        assert own == (facts.experts, facts.hidden, facts.inner, facts.kind == "glu", facts.biases)
        assert layer.format == f"affine {facts.weights.bits} bits, groups of 64"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_experts_per_tok": 8}, 8),
        ({"text_config": {"moe_topk": 2}}, 2),
        ({"top_k": True}, None),
        ({"text_config": None}, None),
    ],
)
def test_top_k(config: dict, expected: int | None) -> None:
    assert top_k.of_config(config) == expected


# Which family


def test_families_are_mlx_lms() -> None:
    models = models_directory()
    assert models == Path(mlx_lm.utils.__file__).parent / "models"
    names = {path.stem for path in models.glob("*.py")} - {"switch_layers"}
    found = {name for name in names if has_switch_layers(name, models)}
    assert found >= {name for name in DEFERRED_FAMILIES if (models / f"{name}.py").is_file()}
    assert found.isdisjoint({"llama", "gemma2", "qwen3", "cache"})
    assert like("qwen3_mo", models)[0] == "qwen3_moe" and "llama" not in like("llama", models)
    for model_type, name in mlx_lm.utils.MODEL_REMAPPING.items():
        family = family_of({"model_type": model_type}, models)
        assert (family.name, family.known, family.experts) == (name, True, name in found)


@pytest.mark.parametrize("name", ["qwen3_moe", "llama", "no_such", "../../utils", "base", ""])
def test_a_family_is_known_where_mlx_lm_finds_its_classes(name: str) -> None:
    try:
        mlx_lm.utils._get_classes({"model_type": name})
        known = True
    except (ValueError, AttributeError, ModuleNotFoundError):
        known = False
    found = family_of({"model_type": name}, models_directory())
    # "base" is a file without a model: that shows when it is loaded
    assert found.known == known or name == "base"


def test_without_mlx_lm_and_with_own_code() -> None:
    assert not family_of(CONFIG, None).known
    own = family_of(CONFIG | {"model_file": "mine.py"}, models_directory())
    assert own.known and own.own_code and own.experts is None
