"""A model is known again by its files and its expert layers, and another is not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from families import FAMILIES, build
from mlx.utils import tree_flatten

import mlx_moe
from mlx_moe.cli import main
from mlx_moe.errors import CorruptFile, IdentityMismatch, ModelNotFound
from mlx_moe.identity import (
    SAMPLE_BYTES,
    SAMPLES,
    ModelIdentity,
    _waits_for_a_file,
    check_same,
    identity_of_files,
    identity_of_model,
)

QWEN = next(family for family in FAMILIES if family.name == "qwen3_moe")


@pytest.fixture
def directory(tiny_model_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_path, tmp_path / "tiny"))


def test_the_same_files_have_one_identity(tiny_model_path: Path, directory: Path) -> None:
    config = directory / "config.json"
    facts = json.loads(config.read_text())
    config.write_text(json.dumps(dict(reversed(facts.items())), indent=7))
    found, expected = identity_of_files(directory), identity_of_files(tiny_model_path)
    assert found.name == "tiny" and expected.name == "tiny-qwen3-moe"
    assert None not in (found.config, found.headers, found.sample) and found.layers is None
    check_same(expected, found, "a.npz")
    assert ModelIdentity.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_an_attached_model_is_the_same(tiny_model_path: Path, tmp_path: Path) -> None:
    target = tmp_path / "attached"
    assert main(["attach", "--model", str(tiny_model_path), "-o", str(target)]) == 0
    check_same(identity_of_files(tiny_model_path), identity_of_files(target), "a.npz")


def _config(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_experts_per_tok": 2}))


def _last_byte(directory: Path) -> None:
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _header(directory: Path) -> None:
    path = directory / "model.safetensors"
    arrays = mx.load(str(path))
    mx.eval(arrays)
    mx.save_safetensors(str(path), {**arrays, "another": mx.zeros(3)})


@pytest.mark.parametrize(
    ("change", "message"),
    [(_config, "config.json"), (_last_byte, "sampled bytes"), (_header, "names, shapes")],
)
def test_changed_files_are_another_model(
    directory: Path, tiny_model_path: Path, change: Callable[[Path], None], message: str
) -> None:
    change(directory)
    with pytest.raises(IdentityMismatch, match=rf"(?s)a\.npz.*'tiny-qwen3-moe'.*'tiny'.*{message}"):
        check_same(identity_of_files(tiny_model_path), identity_of_files(directory), "a.npz")


def test_a_large_file_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 GB (a sparse file) take a few hundred KB of reading."""
    size = 60 << 30
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "model-00001-of-00002.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    read = 0
    stock_open = Path.open

    def counting(self: Path, mode: str = "r") -> Any:
        file = stock_open(self, mode)
        stock = file.read

        class Counted:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def read(self, *count: int) -> bytes:
                nonlocal read
                data = stock(*count)
                read += len(data)
                return data

            seek = file.seek

        return Counted()

    monkeypatch.setattr(Path, "open", counting)
    first = identity_of_files(tmp_path)
    assert 0 < read < SAMPLES * SAMPLE_BYTES + 10000
    with stock_open(path, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert identity_of_files(tmp_path).sample != first.sample


def test_a_repository_of_the_hubs_cache_has_its_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--mlx-community--Some-Model-4bit" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    assert identity_of_files(snapshot).name == "mlx-community/Some-Model-4bit"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 40),
        ("model.safetensors", (20).to_bytes(8, "little") + b"not JSON at all....."),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorruptFile, match=name.replace(".", r"\.")):
        identity_of_files(tmp_path)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        identity_of_files(tmp_path / "nowhere")


# Models in memory


def test_a_lazy_model_is_the_same_and_stays_lazy(tiny_model_path: Path) -> None:
    """Its weights are sampled in the files; evaluating a slice of one would load all of it."""
    loaded, _ = mlx_lm.load(str(tiny_model_path))
    lazy, _ = mlx_lm.load(str(tiny_model_path), lazy=True)
    weights = [value for key, value in tree_flatten(lazy.parameters()) if "switch_mlp" in key]
    assert weights and all(map(_waits_for_a_file, weights))
    assert identity_of_model(lazy, tiny_model_path) == identity_of_model(loaded, tiny_model_path)
    assert all(map(_waits_for_a_file, weights))
    assert identity_of_model(lazy).layers == identity_of_model(loaded).layers
    assert not all(map(_waits_for_a_file, weights))


def test_replacing_does_not_change_a_model(tiny_model_path: Path) -> None:
    lazy, _ = mlx_lm.load(str(tiny_model_path), lazy=True)
    expected = identity_of_model(lazy, tiny_model_path)
    model, _ = mlx_lm.load(str(tiny_model_path))
    assert identity_of_model(model, tiny_model_path) == expected
    replacement = mlx_moe.replace_moe_layers(model, backend="cpu")
    mlx_moe.replace_linear_layers(model, backend="cpu")
    assert identity_of_model(model, tiny_model_path) == expected
    replacement.restore()
    assert identity_of_model(model, tiny_model_path) == expected


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_family_has_an_identity(family: Any) -> None:
    model = build(family)
    found = identity_of_model(model)
    assert found.layers is not None and found.config is None
    assert found == identity_of_model(build(family))
    mlx_moe.replace_moe_layers(model, backend="cpu")
    assert found == identity_of_model(model)


def _weights(model: nn.Module) -> None:
    layer = model.model.layers[1].mlp.switch_mlp.down_proj
    layer.weight = layer.weight + 0.5


def _dtype(model: nn.Module) -> None:
    model.set_dtype(mx.bfloat16)


def _quantise(model: nn.Module) -> None:
    nn.quantize(model, 64, 4)


@pytest.mark.parametrize("change", [_weights, _dtype, _quantise])
def test_changed_experts_are_another_model(change: Callable[[nn.Module], None]) -> None:
    model = build(QWEN)
    expected = identity_of_model(model)
    change(model)
    with pytest.raises(IdentityMismatch, match="expert layers differ"):
        check_same(expected, identity_of_model(model), "plan.json")


def test_models_that_share_no_part_cannot_be_told(tiny_model_path: Path) -> None:
    files, memory = identity_of_files(tiny_model_path), identity_of_model(build(QWEN))
    with pytest.raises(IdentityMismatch, match="nothing is known"):
        check_same(files, memory, "plan.json")
    assert identity_of_model(nn.Linear(2, 2)).layers is None


@pytest.mark.parametrize("value", [None, {}, {"name": 3}, {"name": "a", "layers": 5}, {"nom": "a"}])
def test_identities_that_cannot_be(value: Any) -> None:
    with pytest.raises(CorruptFile, match=r"plan\.json"):
        ModelIdentity.from_json(value, "plan.json")
