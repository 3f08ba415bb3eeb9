"""The `mlx_moe` command line, against stock mlx-lm commands on the trained example model."""

import gc
import importlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from commands import call, command, write_float32

import mlx_moe
from mlx_moe.cli import main, report
from mlx_moe.cli.compare import Following
from mlx_moe.loading import load, replace_layers
from mlx_moe.patch import replaced_models

PROMPT = "In the beginning"
LAYERS, EXPERTS, TOP_K = 6, 32, 4  # of the example model


@pytest.fixture(scope="module")
def float32_model(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float32(tiny_model_path, tmp_path_factory.mktemp("float32") / "model")


def without_speeds(stdout: str) -> list[str]:
    """The lines of mlx_lm.generate's output, less the numbers that differ by run."""
    return [line.split(" tokens, ")[0] for line in stdout.splitlines() if "memory" not in line]


@pytest.mark.parametrize(
    "options",
    [
        ("--max-tokens", 40),
        ("--max-tokens", 30, "--temp", 0.8, "--seed", 7, "--top-k", 20),
        ("--max-tokens", 5, "--verbose", "False"),
    ],
    ids=["greedy", "sampled", "quiet"],
)
def test_generate_prints_what_stock_prints(float32_model: Path, options: tuple) -> None:
    arguments = ("--model", float32_model, "--prompt", PROMPT, *options)
    stock = call("mlx_lm", "generate", *arguments)
    ours = call("mlx_moe", "generate", *arguments)
    assert stock.returncode == ours.returncode == 0, stock.stderr + ours.stderr
    assert without_speeds(ours.stdout) == without_speeds(stock.stdout)
    assert len(ours.stdout) > 10


def test_generate_reports_what_ran_on_stderr(tiny_model_path: Path) -> None:
    ran = call(
        *("mlx_moe", "generate", "--model", tiny_model_path, "--prompt", PROMPT),
        *("--max-tokens", 4, "--stats", "json", "--verbose", "False"),
    )
    assert ran.returncode == 0, ran.stderr
    log, _, report = ran.stderr.partition("\n")
    layers = json.loads(report)
    moe = [layer for layer in layers if layer["kind"] == "experts"]
    dense = [layer for layer in layers if layer["kind"] == "dense"]
    assert log.startswith("[mlx_moe] qwen3_moe: 6 MoE layers replaced, ")
    assert [layer["name"] for layer in moe] == [
        f"model.layers.{number}.mlp.switch_mlp" for number in range(LAYERS)
    ]
    assert dense
    for layer in moe:
        assert layer["experts"] == EXPERTS and layer["top-k"] == TOP_K
        assert layer["backend"] == "cpu"
        assert layer["kernel_calls"] >= layer["calls"] > 1 and layer["fallbacks"] == {}


def test_compare_prints_both_speeds_and_agreement(float32_model: Path) -> None:
    ran = call(
        *("mlx_moe", "generate", "--model", float32_model, "--prompt", PROMPT),
        *("--max-tokens", 20, "--compare", "--stats", "summary"),
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stderr.splitlines()]
    summary = next(cells for cells in lines if cells[:1] == ["experts"])
    prompt = len(mlx_lm.utils.load_tokenizer(float32_model).encode(PROMPT))
    # The warm-up is not counted: every layer saw the prompt and the tokens that followed it.
    assert summary[1:8] == ["6", "qwen3_moe", "32", "4", "float32", "cpu", str(prompt + 20)]
    assert "given the same text, stock chooses the same token 20 of 20 times" in ran.stderr
    assert "given" not in ran.stdout


def test_compare_says_so_where_stock_cannot_run(tiny_model_path: Path, tmp_path: Path) -> None:
    half = tmp_path / "bfloat16"  # MLX on the CPU refuses such experts
    mlx_lm.convert(str(tiny_model_path), str(half), dequantize=True, dtype="bfloat16")
    ran = call(
        *("mlx_moe", "generate", "--model", half, "--prompt", PROMPT, "--max-tokens", 5),
        "--compare",
    )
    assert ran.returncode == 0, ran.stderr
    assert "the stock layers cannot run this model: [GatherMM::eval]" in ran.stderr
    assert "Generation: 5 tokens" in ran.stdout


def test_a_follower_counts_the_choices_it_would_have_made() -> None:
    follower = Following(lambda logprobs: mx.argmax(logprobs, axis=-1), tokens=[2, 0, 1])
    rows = [[0.0, 0.1, 0.9], [0.0, 0.9, 0.1], [0.1, 0.9, 0.0], [0.9, 0.0, 0.1]]
    assert [follower(mx.array([row])).item() for row in rows] == [2, 0, 1, 0]
    assert follower.agreements() == 2


@pytest.mark.parametrize("words", [("mlx_lm.generate",), ("mlx_lm", "generate")])
def test_run_replaces_draft_models_too(tiny_model_path: Path, words: tuple[str, ...]) -> None:
    ran = call(
        *("mlx_moe", "run", "--stats", "json", *words, "--model", tiny_model_path),
        *("--draft-model", tiny_model_path, "--prompt", PROMPT, "--max-tokens", 6),
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("6 MoE layers replaced") == 2
    layers = json.loads(ran.stderr[ran.stderr.index("\n[\n") :])
    experts = [layer for layer in layers if layer["kind"] == "experts"]
    assert len(experts) == 2 * LAYERS and all(layer["kernel_calls"] for layer in experts)


def test_run_of_the_stock_benchmark(tiny_model_path: Path) -> None:
    ran = call(
        *("mlx_moe", "run", "--backend", "stock", "mlx_lm.benchmark"),
        *("--model", tiny_model_path, "-p", 8, "-g", 2, "-n", 1),
    )
    assert ran.returncode == 0, ran.stderr
    assert "Averages: prompt_tps=" in ran.stdout
    assert "6 MoE layers left to stock" in ran.stderr
    row = next(line for line in ran.stderr.splitlines() if "qwen3_moe " in line).split()
    assert row[:2] == ["experts", "6"] and row[-6:] == ["stock", "0", "0", "0", "0", "0"]


def test_run_of_a_chat(tiny_model_path: Path) -> None:
    chat = subprocess.run(
        command("mlx_moe", "run", "mlx_lm.chat", "--model", tiny_model_path, "-m", 5),
        input="q\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert chat.returncode == 0, chat.stderr
    assert "6 MoE layers replaced" in chat.stderr


def test_run_passes_the_exit_code_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", "mlx_lm.perplexity", "--batch-size", "many"])
    assert stopped.value.code == 2
    assert "usage: mlx_lm.perplexity" in capsys.readouterr().err


def test_run_names_what_a_command_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
    assert main(["run", "mlx_lm.evaluate", "--model", "m", "--tasks", "t"]) == 1
    assert "mlx_lm.evaluate does not start: import of lm_eval" in capsys.readouterr().err


def test_a_stock_command_that_lacks_a_module_names_it(
    tiny_model_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    arguments = ["--model", str(tiny_model_path), "--data-path", "nowhere"]
    assert main(["run", "--stats", "none", "mlx_lm.perplexity", *arguments]) == 1
    assert "mlx_lm.perplexity stopped: import of datasets" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "invalid choice: 'fly'"),
        (["run", "mlx_lm.fly"], "unknown command 'mlx_lm.fly'; mlx-lm has mlx_lm, "),
        (["run"], "required: COMMAND"),
        (["run", "--backend", "gpu", "mlx_lm.chat"], "invalid choice: 'gpu'"),
        (["generate", "--fly"], "unrecognized arguments: --fly"),
        (["generate", "--compare", "--draft-model", "m"], "--compare does not go with"),
        (["generate", "--compare", "--backend", "stock"], "both sides would be stock"),
        (["benchmark"], "required: --model"),
        (["benchmark", "-n", "0"], "0 is not a positive number"),
        (["attach", "--model", "m"], "required: -o"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("model", ["no/such-model", "/no/such/model"])
@pytest.mark.parametrize(
    "command", ["generate", "attach -o OUT", "benchmark", "run mlx_lm.generate", "run mlx_lm.chat"]
)
def test_a_missing_model_is_one_line(
    command: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.replace("OUT", str(tmp_path / "out")).split()
    assert main([*words, "--model", model]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"mlx_moe: error: cannot load the model {model!r}: there is no ")
    assert "and as a Hugging Face repository id it failed: " in error and "\n" not in error


def test_a_directory_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "mlx_lm.generate", "--model", str(tmp_path)]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"mlx_moe: error: cannot load the model {str(tmp_path)!r}: ")
    assert "repository" not in error and "\n" not in error


@pytest.mark.parametrize("model", ["/no/such", Path("no/such")])
def test_load_of_a_missing_model(model: str | Path) -> None:
    with pytest.raises(mlx_moe.ModelNotFound, match="there is no directory '/?no/such', and as"):
        load(model)


def test_load_of_a_file_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(mlx_moe.ModelNotFound, match="Not a directory"):
        load(tmp_path / "model.safetensors")


@pytest.mark.parametrize(("file", "keep"), (("model.safetensors", 30000), ("config.json", 9)))
@pytest.mark.parametrize("options", ({}, {"expert_memory": "50%"}), ids=("memory", "disk"))
def test_load_of_damaged_files(
    tmp_path: Path, tiny_model_path: Path, file: str, keep: int, options: dict[str, str]
) -> None:
    shutil.copytree(tiny_model_path, tmp_path / "model")
    os.truncate(tmp_path / "model" / file, keep)
    with pytest.raises(mlx_moe.errors.CorruptFile, match=r"cut short|JSON"):
        load(tmp_path / "model", **options)


def test_a_wrong_environment_is_said_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> str:
        raise mlx_moe.InvalidArgument("MLX_MOE_ISA=abacus cannot run here")

    monkeypatch.setattr(mlx_moe.core, "isa", refuse)
    for words in ("generate", "run mlx_lm.generate", "benchmark", "attach -o no/such"):
        assert main([*words.split(), "--model", "no/such-model"]) == 1
        assert capsys.readouterr().err == "mlx_moe: error: MLX_MOE_ISA=abacus cannot run here\n"
    with pytest.raises(mlx_moe.InvalidArgument, match="^MLX_MOE_ISA=abacus"):
        mlx_moe.replace_linear_layers(Dense())


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert re.search(r"\n  generate +generate text", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["generate", "run", "attach", "benchmark"])
def test_help_and_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in [
        ([name, "--help"], f"usage: mlx_moe {name}"),
        (["--help"], f"\n  {name} "),
        (["--version"], f"mlx_moe {mlx_moe.__version__}\n"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
        assert expected in capsys.readouterr().out


def test_generate_has_every_stock_option(capsys: pytest.CaptureFixture[str]) -> None:
    stock = importlib.import_module("mlx_lm.generate").setup_arg_parser()
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = capsys.readouterr().out
    options = [option for action in stock._actions for option in action.option_strings]
    assert len(options) > 30 and [option for option in options if option not in shown] == []


def test_ctrl_c_ends_a_generation(tiny_model_path: Path) -> None:
    process = subprocess.Popen(
        command(
            *("mlx_moe", "generate", "--model", tiny_model_path, "--prompt", PROMPT),
            *("--max-tokens", 100_000),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None and process.stdout.read(20)  # it generates
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert error.endswith("mlx_moe: interrupted\n") and "Traceback" not in error


def test_the_patch_is_undone_when_a_command_fails() -> None:
    stock = mlx_lm.utils.load_model
    with pytest.raises(KeyError), replaced_models("auto", print):
        assert mlx_lm.utils.load_model is not stock
        raise KeyError
    assert mlx_lm.utils.load_model is stock


def test_records_keep_no_model_alive(tiny_model_path: Path) -> None:
    """A server lets go of one model to load another."""
    ran: list[report.Record] = []
    with replaced_models("auto", lambda model: ran.extend(report.records(model))):
        model, tokenizer = mlx_lm.load(str(tiny_model_path))
    mx.eval(model(mx.array([tokenizer.encode(PROMPT)])))
    gone = weakref.ref(model), weakref.ref(model.layers[0].mlp.switch_mlp.gate_proj)
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert sum(record.counts()[2] for record in ran) >= LAYERS


def test_load_replaces_and_passes_options_on(tiny_model_path: Path, float32_model: Path) -> None:
    model, tokenizer, config = load(tiny_model_path, return_config=True, lazy=True)
    stock, _ = mlx_lm.load(str(tiny_model_path))
    exact, _ = mlx_lm.load(str(float32_model))
    assert config["model_type"] == "qwen3_moe"
    assert type(model.layers[0].mlp.switch_mlp) is not type(stock.layers[0].mlp.switch_mlp)
    assert isinstance(model.layers[0].mlp.switch_mlp, type(stock.layers[0].mlp.switch_mlp))
    # Enough text: over a few tokens one expert chosen differently outweighs all rounding.
    text = (tiny_model_path.parent / "prompt.txt").read_text()
    tokens = mx.array([tokenizer.encode(text)[:128]])
    expected = exact(tokens)
    ours, theirs = (mx.linalg.norm(m(tokens) - expected).item() for m in (model, stock))
    assert 0 < ours <= 1.5 * theirs
    assert model._moe_attention.counters.as_dict()["kernel_calls"] >= 2 * LAYERS


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(256, 256, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.projection(x)


@pytest.mark.parametrize(("backend", "dense"), [("auto", 1), ("stock", 0)])
def test_a_model_without_moe_layers_gets_one_log_line(
    backend: str, dense: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="mlx_moe")
    replaced = replace_layers(Dense(), backend)
    expected = ", 1 dense layers replaced" if dense else ""
    assert caplog.messages == [f"test_cli: no MoE layers{expected}"]
    assert replaced.moe is None
    rows = [layer.name for layer in replaced.dense.layers] if replaced.dense else []
    assert rows == ["projection", "(attention product)"][: 2 * dense]
