"""`mlx_moe attach`: directories that the stock, unwrapped commands run replaced."""

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from commands import call, generated_text, write_float32

from mlx_moe.cli import main
from mlx_moe.cli.attach import MODEL_FILE
from mlx_moe.loading import trust_option


def attach(model: Path, output: Path, *options: str) -> int:
    return main(["attach", "--model", str(model), "-o", str(output), *options])


def load(directory: Path) -> tuple:
    return mlx_lm.load(str(directory), **trust_option(mlx_lm.load, True))


def test_stock_generate_runs_an_attached_model_replaced(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    source = write_float32(tiny_model_path, tmp_path / "float32")
    attached = tmp_path / "new" / "attached"
    assert attach(source, attached) == 0
    stock, ours = (
        call(
            *("mlx_lm", "generate", "--model", model, "--trust-remote-code"),
            *("--prompt", "In the beginning", "--max-tokens", 20),
        )
        for model in (source, attached)
    )
    assert stock.returncode == ours.returncode == 0, stock.stderr + ours.stderr
    assert generated_text(ours.stdout) == generated_text(stock.stdout)


def test_an_attached_model_is_the_stock_class_with_replaced_layers(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    attached = tmp_path / "attached"
    assert attach(tiny_model_path, attached) == 0
    model, tokenizer = load(attached)
    stock, _ = mlx_lm.load(str(tiny_model_path))
    assert type(model).__mro__[1] is type(stock)  # its attention product is replaced
    for ours, theirs in zip(model.layers, stock.layers, strict=True):
        assert type(ours.mlp.switch_mlp) is not type(theirs.mlp.switch_mlp)
        assert isinstance(ours.mlp.switch_mlp, type(theirs.mlp.switch_mlp))
    before = mx.array(tokenizer.encode("In the beginning"))[None]
    mx.eval(model(before))
    calls = model.layers[0].mlp.switch_mlp.__dict__["_moe_layer"].counters.as_dict()
    assert calls["kernel_calls"] == 1 and calls["fallbacks"] == {}


def test_the_stock_backend_is_kept(tiny_model_path: Path, tmp_path: Path) -> None:
    attached = tmp_path / "attached"
    assert attach(tiny_model_path, attached, "--backend", "stock") == 0
    model, _ = load(attached)
    stock, _ = mlx_lm.load(str(tiny_model_path))
    assert [type(module) for _, module in model.named_modules()] == [
        type(module) for _, module in stock.named_modules()
    ]


def test_files_are_links_and_the_source_is_untouched(tiny_model_path: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_model_path, tmp_path / "source"))
    (source / "templates").mkdir()
    (source / ".hidden").touch()
    before = {file: file.stat().st_mtime_ns for file in source.iterdir()}
    attached = tmp_path / "attached"
    assert attach(source, attached) == 0
    written = {file.name for file in attached.iterdir() if not file.is_symlink()}
    linked = {file.name: file.resolve() for file in attached.iterdir() if file.is_symlink()}
    assert written == {"config.json", MODEL_FILE}
    assert linked == {
        file.name: file for file in source.iterdir() if file.name not in ("config.json", ".hidden")
    }
    assert {file: file.stat().st_mtime_ns for file in source.iterdir()} == before
    config = json.loads((attached / "config.json").read_text())
    assert config.pop("model_file") == MODEL_FILE
    assert config.pop("mlx_moe") == {"backend": "auto", "model_file": None}
    assert config == json.loads((source / "config.json").read_text())


def test_a_model_with_code_of_its_own(
    tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(shutil.copytree(tiny_model_path, tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_file": "custom.py"}))
    (source / "custom.py").write_text(
        "from mlx_lm.models.qwen3_moe import Model as Stock, ModelArgs\n"
        "class Model(Stock):\n    own = True\n"
    )
    attached = tmp_path / "attached"
    assert attach(source, attached) == 1
    assert "pass --trust-remote-code if you trust it" in capsys.readouterr().err
    assert attach(source, attached, "--trust-remote-code") == 0
    model, _ = load(attached)
    assert model.own and type(model).__name__ == "Model"
    assert "_moe_layer" in model.layers[0].mlp.switch_mlp.__dict__


def broken_config(source: Path, output: Path) -> None:
    (source / "config.json").write_text("{")


def no_config(source: Path, output: Path) -> None:
    (source / "config.json").unlink()


def existing_output(source: Path, output: Path) -> None:
    output.mkdir()


def dangling_output(source: Path, output: Path) -> None:
    output.symlink_to("nowhere")


def attached_already(source: Path, output: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "mlx_moe": {}}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (broken_config, "is not valid JSON"),
        (no_config, "it has no config.json"),
        (existing_output, "exists already"),
        (dangling_output, "exists already"),
        (attached_already, "attach its source model"),
    ],
)
def test_refusals_leave_nothing_behind(
    spoil, message: str, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(shutil.copytree(tiny_model_path, tmp_path / "source"))
    output = tmp_path / "output"
    spoil(source, output)
    before = sorted(tmp_path.rglob("*"))
    assert attach(source, output) == 1
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_no_output_inside_the_model(
    tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(shutil.copytree(tiny_model_path, tmp_path / "source"))
    before = sorted(tmp_path.rglob("*"))
    assert attach(source, source / "sub" / "attached") == 1
    assert "is inside the model's own directory" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("step", ["mkdtemp", "symlink_to", "rename"])
def test_a_failing_disk_is_one_line(
    step: str,
    tiny_model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile if step == "mkdtemp" else Path, step, full)
    assert attach(tiny_model_path, tmp_path / "output") == 1
    error = capsys.readouterr().err
    assert error.splitlines()[-1].endswith("output: No space left on device")
    assert "Traceback" not in error and list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_load_leaves_nothing_behind(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_model_path, tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    with pytest.raises(ValueError, match="Missing"):
        attach(source, tmp_path / "output")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]
