"""`mlx_moe doctor`: what it takes, what is in the way, what to do next; from headers alone."""

import inspect
import io
import json
import math
import pathlib
import re
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_checkpoints import CONFIG, D, E, F, Shapes, numbered, stacked, tensors, write_model

import mlx_moe
from mlx_moe.cli import main
from mlx_moe.doctor import doctor, machine_problems
from mlx_moe.doctor_experts import expert_layers
from mlx_moe.doctor_files import read_model
from mlx_moe.doctor_memory import can_stream, modes
from mlx_moe.doctor_report import as_text
from mlx_moe.errors import CorruptFile, ModelNotFound
from mlx_moe.machine import this_machine
from mlx_moe.safetensors_headers import BITS

# What it takes


def test_what_each_way_takes() -> None:
    layers = expert_layers(tensors(stacked(4)))
    size = sum(tensor.bytes for tensor in tensors(stacked(4)).values()) + 1000
    found = {m.name: m for m in modes(size, layers, 2, size, True, "no Core ML")}
    matrices = E * 3 * D * F
    scales = E * (2 * F + D) * 2
    assert found["stock"].memory == found["replaced"].memory == found["stock"].disk == size
    assert found["plan, fp16 programs"].memory == size + 2 * matrices
    assert found["plan, int8 programs"].disk == size + matrices + scales
    assert found["plan, packed copies"].memory == size + 2 * matrices
    assert found["plan, packed copies"].disk == size
    # A quarter of four experts is one, and two are needed at a time; whole pages each.
    page = resource.getpagesize()
    slot = -(-(size - 1000) // E // page) * page
    assert slot > (size - 1000) // E and found["expert streaming"].memory == 1000 + 2 * slot
    assert found["replaced"].fits and not found["plan, fp16 programs"].fits
    missing = found["plan, fp16 programs"].missing
    assert missing is not None and missing.startswith("no Core ML; --backend host")
    unknown = modes(size, layers, None, None, False, None)
    assert all(mode.fits is None for mode in unknown)
    assert "plan, packed copies" not in {mode.name for mode in unknown}
    assert [m.name for m in modes(size, [], None, size, True, None)] == ["stock", "replaced"]


def test_streaming_is_offered_where_there_is_an_argument_for_it() -> None:
    arguments = inspect.signature(mlx_moe.replace_moe_layers).parameters
    assert can_stream() == ("expert_memory" in arguments)


@pytest.mark.parametrize(
    ("isa", "quota", "mlx_lm", "named"),
    [
        (None, None, "0.32", None),
        (None, 2.0, "0.32", None),
        (None, 0.5, "0.32", "MLX_MOE_NUM_THREADS=1"),
        (None, None, None, "pip install mlx-lm"),
        ("MLX_MOE_ISA=amx cannot run here", None, "0.32", "MLX_MOE_ISA=amx"),
    ],
)
def test_problems_of_the_machine(isa, quota, mlx_lm, named) -> None:
    from dataclasses import replace

    machine = replace(
        this_machine(), threads=2, isa_error=isa, cpu_quota=quota, mlx_lm=mlx_lm, device="cpu"
    )
    found = machine_problems(machine)
    assert found == [] if named is None else named in found[0]


# Without reading weights


def test_only_headers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {f"m.{i}.weight": ("BF16", [1 << 15, 1 << 15]) for i in range(8)}  # 16 GB of holes
    model = write_model(tmp_path / "model", stacked(4) | large)
    weights = model / "model.safetensors"
    header = 8 + struct.unpack("<Q", weights.open("rb").read(8))[0]
    read: list[int] = []
    opened = pathlib.Path.open

    class Watched(io.FileIO):
        def read(self, size: int = -1) -> Any:
            read.append(size if size >= 0 else 1 << 40)
            return super().read(size)

    def watched(path: Path, *arguments: Any, **options: Any) -> Any:
        found = path.name == weights.name
        return Watched(path) if found else opened(path, *arguments, **options)

    monkeypatch.setattr(pathlib.Path, "open", watched)
    report = doctor(str(model))
    assert report["model"]["supported"] and report["model"]["bytes"] > 16e9
    assert 0 < sum(read) <= 2 * header


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc/self/io")
def test_the_process_reads_few_bytes_and_no_mlx_lm(tmp_path: Path) -> None:
    """Of a model of 16 GB, counted by the system: no way of reading it goes unseen."""
    large = {f"m.{i}.weight": ("BF16", [1 << 15, 1 << 15]) for i in range(8)}
    model = write_model(tmp_path / "model", stacked(4) | large)
    script = (
        "import json, sys; from mlx_moe.cli import main\n"
        f"code = main(['doctor', {str(model)!r}, '--json', '-'])\n"
        "print('modules', *sorted({n.partition('.')[0] for n in sys.modules}), file=sys.stderr)\n"
        "print(open('/proc/self/io').read(), file=sys.stderr); sys.exit(code)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["model"]["supported"]
    modules = next(line for line in ran.stderr.splitlines() if line.startswith("modules")).split()
    assert {"mlx_lm", "transformers", "torch"}.isdisjoint(modules)
    assert int(re.search(r"rchar: (\d+)", ran.stderr)[1]) < 200e6  # libraries and Python's files


# Refusals, each by name


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lambda m: m / "other", ModelNotFound, "no model directory"),
        (lambda m: (m / "config.json").unlink(), ModelNotFound, "it has no config.json"),
        (lambda m: (m / "config.json").write_text("{"), CorruptFile, "config.json is not JSON"),
        (lambda m: (m / "config.json").write_text("[]"), CorruptFile, "no JSON object"),
        (lambda m: (m / "config.json").write_text("{}"), CorruptFile, "no model_type"),
        (lambda m: (m / "model.safetensors").unlink(), ModelNotFound, "mlx_lm.convert"),
        (lambda m: (m / "model.safetensors").write_bytes(b"no"), CorruptFile, "does not begin"),
        (
            lambda m: (m / "model.safetensors").write_bytes(struct.pack("<Q", 3) + b"{},"),
            CorruptFile,
            "not JSON",
        ),
        (
            lambda m: (m / "model.safetensors").write_bytes(
                struct.pack("<Q", 9) + b'{"a":{} }' + b"x" * 9
            ),
            CorruptFile,
            "'a' has no dtype and shape",
        ),
        (
            lambda m: (m / "model.safetensors.index.json").write_text('{"weight_map": 3}'),
            CorruptFile,
            "'weight_map'",
        ),
    ],
)
def test_models_that_cannot_be_read(tmp_path: Path, capsys, change, error, named: str) -> None:
    model = write_model(tmp_path / "model", stacked(4))
    changed = change(model)
    name = changed if isinstance(changed, Path) else model
    with pytest.raises(error, match=re.escape(named)):
        doctor(str(name))
    assert main(["doctor", str(name)]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("mlx_moe: error: ") and "Traceback" not in printed


@pytest.mark.parametrize(
    ("shapes", "config", "grow", "index", "named"),
    [
        (stacked(4), {"model_type": "qwen9_moe"}, 0, None, "no family 'qwen9_moe'; it knows qwen"),
        (stacked(4, 16), CONFIG, 0, None, "1 of 1 expert layers"),
        (stacked(4), CONFIG, -100, None, "model.safetensors is cut short"),
        (stacked(4), CONFIG, 0, ["model.safetensors", "model-2.safetensors"], "model-2.safe"),
    ],
)
def test_what_is_in_the_way(tmp_path, capsys, shapes, config, grow, index, named: str) -> None:
    model = write_model(tmp_path / "model", shapes, config, grow)
    if index:
        names = {"weight_map": {str(i): name for i, name in enumerate(index)}}
        (model / "model.safetensors.index.json").write_text(json.dumps(names))
    report = doctor(str(model))
    assert not report["ok"] and not report["model"]["supported"]
    assert len(report["problems"]) == 1 and named in report["problems"][0]
    assert main(["doctor", str(model)]) == 1
    assert "supported  no" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shapes", "config", "note"),
    [
        ({"a.weight": ("BF16", [D, F])}, {"model_type": "llama"}, "no expert layers"),
        (stacked(4), {"model_type": "llama"}, "no switch layers of its own"),
        (stacked(4), CONFIG | {"model_file": "mine.py"}, "--trust-remote-code"),
        (numbered("m.0.mlp.experts", ("gate_proj", "up_proj", "down_proj")), CONFIG, "stacks"),
        (
            numbered("m.0.mlp.experts", ("gate_proj", "up_proj", "down_proj"), "weight_packed")
            | {"m.0.mlp.experts.0.up_proj.weight_scale": ("BF16", [F, 1])},
            CONFIG,
            "bfloat16 with scales experts: whether",
        ),
    ],
)
def test_notes(tmp_path: Path, shapes: Shapes, config: dict, note: str) -> None:
    report = doctor(str(write_model(tmp_path / "model", shapes, config)))
    assert report["ok"] and any(note in found for found in report["model"]["notes"])


# What is printed


def test_the_example_model(tiny_model_path: Path, tmp_path: Path, capsys) -> None:
    target = tmp_path / "report.json"
    assert main(["doctor", str(tiny_model_path), "--json", str(target)]) == 0
    printed = capsys.readouterr().out
    for text in ("6 layers of 32, 4 a token, 192 x 64", "supported  yes", "qwen3_moe"):
        assert text in printed
    assert f"mlx_moe generate --model {tiny_model_path}" in printed
    report = json.loads(target.read_text())
    size = sum(path.stat().st_size for path in tiny_model_path.glob("model*.safetensors"))
    assert report["ok"] and report["model"]["bytes"] == size
    assert report["model"]["expert_bytes"] == sum(
        BITS[tensor.dtype] * _product(tensor.shape) // 8
        for name, tensor in read_model(str(tiny_model_path)).tensors.items()
        if ".switch_mlp." in name
    )


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for length in shape:
        found *= length
    return found


def test_the_machine_alone(capsys) -> None:
    assert main(["doctor", "--json", "-"]) == 0
    printed, text = capsys.readouterr()
    report = json.loads(printed)
    assert report["model"] is None and any("doctor MODEL" in line for line in report["next"])
    assert report["machine"]["isa"] in text and "Core ML" in text
    assert as_text(report) in text


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        (stacked(None), "mlx_lm.convert --hf-path"),
        (stacked(4), "do not fit"),
    ],
)
def test_what_to_do_with_too_large_a_model(tmp_path, monkeypatch, shapes, named: str) -> None:
    model = write_model(tmp_path / "model", shapes | {"m.weight": ("BF16", [1 << 17, 1 << 17])})
    monkeypatch.setattr("mlx_moe.machine.memory_bytes", lambda: 16 << 30)
    monkeypatch.setattr("mlx_moe.doctor_memory.can_stream", lambda: False)
    report = doctor(str(model))
    assert report["ok"] and not report["model"]["modes"][0]["fits"]
    assert len(report["next"]) == 1 and named in report["next"][0]


def test_what_to_do_with_too_many_experts(tmp_path, monkeypatch) -> None:
    """All of them do not fit, and a quarter does."""
    shapes = {name: (dtype, [512 * E, *sizes]) for name, (dtype, (_, *sizes)) in stacked(4).items()}
    model = write_model(tmp_path / "model", shapes)
    monkeypatch.setattr("mlx_moe.machine.memory_bytes", lambda: 10_000_000)
    monkeypatch.setattr("mlx_moe.doctor_memory.can_stream", lambda: True)
    report = doctor(str(model))
    page = resource.getpagesize()
    each = report["model"]["expert_bytes"] // (512 * E)
    quarter = 128 * E * -(-each // page) * page  # as the store rounds; never less
    assert len(report["next"]) == 1
    assert report["next"][0].endswith(f"--expert-memory {math.ceil(quarter / 1e6)}MB")
