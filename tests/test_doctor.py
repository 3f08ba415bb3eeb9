"""`mlx_moe doctor`: models from their headers alone, by made-up checkpoints and real ones."""

import http.server
import inspect
import io
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import mlx_lm
import mlx_lm.utils
import pytest

import mlx_moe
from mlx_moe.cli import main
from mlx_moe.doctor import doctor, machine_problems
from mlx_moe.doctor_experts import expert_layers, top_k
from mlx_moe.doctor_families import families, family_of, models_directory
from mlx_moe.doctor_files import read_model
from mlx_moe.doctor_memory import can_stream, modes
from mlx_moe.doctor_report import as_text
from mlx_moe.errors import CorruptFile, HubError, ModelNotFound
from mlx_moe.facts import layer_facts
from mlx_moe.find import DEFERRED_FAMILIES
from mlx_moe.machine import this_machine
from mlx_moe.safetensors_headers import BITS, Tensor

E, D, F = 4, 128, 64  # experts, outside and inside
CONFIG = {"model_type": "qwen3_moe", "num_experts_per_tok": 2}
Shapes = dict[str, tuple[str, list[int]]]


def stacked(bits: int | None, group: int = 64, scales: str = "BF16", biases: bool = True) -> Shapes:
    """The experts of a layer as mlx-lm saves them."""
    found: Shapes = {}
    for name, rows, cols in (("gate_proj", F, D), ("up_proj", F, D), ("down_proj", D, F)):
        path = f"model.layers.0.mlp.switch_mlp.{name}"
        if bits is None:
            found[f"{path}.weight"] = (scales, [E, rows, cols])
            continue
        found[f"{path}.weight"] = ("U32", [E, rows, cols * bits // 32])
        found[f"{path}.scales"] = (scales, [E, rows, cols // group])
        if biases:
            found[f"{path}.biases"] = (scales, [E, rows, cols // group])
    return found


def write_model(directory: Path, shapes: Shapes, config: Any = CONFIG, grow: int = 0) -> Path:
    """A model directory whose weights are a hole in a file; `grow` makes it longer or shorter."""
    directory.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (directory / "config.json").write_text(text)
    header, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        size = Tensor(dtype, tuple(shape)).bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps({"__metadata__": {"format": "mlx"}, **header}).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end + grow)
    return directory


def tensors(shapes: Shapes) -> dict[str, Tensor]:
    return {name: Tensor(dtype, tuple(shape)) for name, (dtype, shape) in shapes.items()}


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


def numbered(parent: str, names: tuple[str, ...], suffix: str = "weight") -> Shapes:
    """Two-dimensional weights of each expert; the last name is of the way back."""
    return {
        f"{parent}.{expert}.{name}.{suffix}": ("BF16", [D, F] if name == names[-1] else [F, D])
        for expert in range(E)
        for name in names
    }


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
    assert top_k(config) == expected


# Which family


def test_families_are_mlx_lms() -> None:
    models = models_directory()
    assert models == Path(mlx_lm.utils.__file__).parent / "models"
    found = set(families(models))
    assert found >= {name for name in DEFERRED_FAMILIES if (models / f"{name}.py").is_file()}
    assert found.isdisjoint({"llama", "gemma2", "qwen3", "switch_layers", "cache"})
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
    # a quarter of four experts is one, and two are needed at a time
    assert found["expert streaming"].memory == 1000 + (size - 1000) // 2
    assert found["replaced"].fits and not found["plan, fp16 programs"].fits
    assert found["plan, fp16 programs"].missing == "no Core ML"
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


# The hub


def test_a_model_that_is_not_here_while_offline(capsys) -> None:
    """The tests' own HF_HUB_OFFLINE."""
    with pytest.raises(HubError, match="HF_HUB_OFFLINE keeps this offline: give a model directory"):
        doctor("somebody/some-model")
    assert main(["doctor", "somebody/some-model"]) == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["./no/model", "/no/model", "a/b/c", "~/no-model"])
def test_paths_are_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ModelNotFound, match="there is no model directory"):
        read_model(name)


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves one repository from a directory, and counts the bytes of weights it hands out."""

    directory: Path
    served = 0

    def do_HEAD(self) -> None:
        self.answer(head=True)

    def do_GET(self) -> None:
        self.answer(head=False)

    def answer(self, head: bool) -> None:
        match = re.fullmatch(r"/me/model/resolve/main/([\w.-]+)", self.path.partition("?")[0])
        path = self.directory / match[1] if match else None
        if path is None or not path.is_file():
            self.send_response(404)
            missing = "EntryNotFound" if match else "RepoNotFound"
            self.send_header("X-Error-Code", missing)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size = path.stat().st_size
        first, last = 0, size - 1
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
            first, last = int(wanted[1]), min(int(wanted[2]), size - 1)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("ETag", f'"{path.name}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if head:
            return
        if path.suffix == ".safetensors":
            type(self).served += last - first + 1
        with path.open("rb") as file:
            file.seek(first)
            self.wfile.write(file.read(last - first + 1))

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def hub(tmp_path: Path) -> Any:
    Hub.directory, Hub.served = tmp_path / "hub", 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(hub: Any, tmp_path: Path, name: str, **environment: str) -> Any:
    """`mlx_moe doctor NAME` in a process of its own that takes the server for the hub."""
    own = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
    }
    return subprocess.run(
        [sys.executable, "-m", "mlx_moe", "doctor", name, "--json", "-"],
        capture_output=True, text=True, env=os.environ | own | environment, timeout=120,
    )  # fmt: skip


def test_a_model_on_the_hub_is_not_downloaded(hub: Any, tmp_path: Path) -> None:
    large = {"m.weight": ("BF16", [1 << 14, 1 << 14])}
    write_model(Hub.directory, stacked(4) | large)
    ran = ask(hub, tmp_path, "me/model")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)["model"]
    assert found["where"] == "hub" and found["supported"] and found["bytes"] > 500e6
    assert found["experts"][0]["format"] == "affine 4 bits, groups of 64"
    assert 0 < Hub.served < 200_000
    stored = [path.name for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert "model.safetensors" not in stored
    # the second time offline, with what is in the cache: config.json alone is no model
    again = ask(hub, tmp_path, "me/model", HF_HUB_OFFLINE="1")
    assert again.returncode == 1 and "HF_HUB_OFFLINE keeps this offline" in again.stderr


def test_a_downloaded_model_is_read_offline(hub: Any, tmp_path: Path) -> None:
    snapshot = tmp_path / "home" / "hub" / "models--me--model" / "snapshots" / ("0" * 40)
    write_model(snapshot, stacked(4))
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    ran = ask(hub, tmp_path, "me/model", HF_HUB_OFFLINE="1")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["model"]["where"] == "cache" and Hub.served == 0


def test_half_a_download_is_no_model(hub: Any, tmp_path: Path) -> None:
    snapshot = tmp_path / "home" / "hub" / "models--me--model" / "snapshots" / ("0" * 40)
    write_model(snapshot, stacked(4))
    listed = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(listed))
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    ran = ask(hub, tmp_path, "me/model", HF_HUB_OFFLINE="1")
    assert ran.returncode == 1 and "HF_HUB_OFFLINE keeps this offline" in ran.stderr


@pytest.mark.parametrize(
    ("name", "files", "named"),
    [
        ("me/other", ["config.json"], "no such repository on the hub"),
        ("me/model", ["config.json"], "has no safetensors weights"),
        ("me/model", [], "config.json"),
        ("me/mo..del", [], "it is no repository id"),
    ],
)
def test_refusals_of_the_hub(hub: Any, tmp_path: Path, name: str, files, named: str) -> None:
    Hub.directory.mkdir()
    for file in files:
        (Hub.directory / file).write_text(json.dumps(CONFIG))
    ran = ask(hub, tmp_path, name)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    assert ran.stderr.startswith("mlx_moe: error: ") and named in ran.stderr


def test_a_hub_that_does_not_answer(hub: Any, tmp_path: Path) -> None:
    ran = ask(hub, tmp_path, "me/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert ran.returncode == 1 and "the hub cannot be reached" in ran.stderr
    assert "Traceback" not in ran.stderr


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
    quarter = report["model"]["expert_bytes"] / 4 / 1e6  # of the experts alone
    assert len(report["next"]) == 1
    assert report["next"][0].endswith(f"--expert-memory {quarter:.0f}MB")
