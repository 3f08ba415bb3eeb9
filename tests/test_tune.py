"""`mlx_moe tune`: profiles, what is measured, and the command."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from measured_curves import CURVES, measured
from plan_data import facts, skewed

from mlx_moe import core, tune_profile
from mlx_moe.cli import main
from mlx_moe.cli import tune as cli
from mlx_moe.devices import NUMBERS, Device, load_device, read_device
from mlx_moe.errors import CorruptFile, InvalidArgument, MissingDependency
from mlx_moe.layer_facts import WeightFacts
from mlx_moe.machine import has_packed_copies
from mlx_moe.planner import make_plan
from mlx_moe.tune import DEFAULT, MAKERS, Effort, cache_bytes, save, shape_of, tune
from mlx_moe.tune_cold import Shape, random_layer, routing
from mlx_moe.tune_coreml import MadeUpPrograms

SMALL = Shape(64, 32, 4, 2, WeightFacts("affine", 4, 32, "bfloat16"))
LITTLE = Effort(rows=(1, 8), groups=(1, 2), capacities=(32, 64), repeats=1)


# Profiles


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m.pop("date"), r"measurements: \['date'\] missing"),
        (lambda m: m.update(date=3), "measurements.date: .* found 3"),
        (lambda m: m.update(overlap=2), "overlap: .* found 2"),
        (lambda m: m.update(samples=[]), "samples"),
        (lambda m: m["samples"][0].update(path="warm"), r"samples\[0\].path: .* found 'warm'"),
        (lambda m: m["samples"][1].update(rows=0), r"samples\[1\].rows: .* found 0"),
        (lambda m: m["samples"][1].update(experts=True), "experts: .* found True"),
        (lambda m: m["samples"][1].update(seconds=0), "seconds: expected a time above 0, found 0"),
        (lambda m: m["samples"][1].pop("inner"), "inner"),
    ],
)
def test_measurements_that_cannot_be(tmp_path: Path, change, named: str) -> None:
    device = measured(load_device("m2-max"), CURVES)
    save(device, tmp_path / "mine.json")
    assert read_device(tmp_path / "mine.json") == device
    data = json.loads((tmp_path / "mine.json").read_text())
    change(data["measurements"])
    (tmp_path / "mine.json").write_text(json.dumps(data))
    with pytest.raises(CorruptFile, match=named):
        load_device(tmp_path / "mine.json")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this machine's profile would be."""
    monkeypatch.setenv("MLX_MOE_CACHE", str(tmp_path / "cache"))
    path = tune_profile.profile_path()
    assert path is not None
    path.parent.mkdir(parents=True)
    return path


def test_auto_is_the_tuned_profile_of_this_machine(own: Path, monkeypatch) -> None:
    built_in = load_device("auto")
    save(measured(load_device("m2-max"), CURVES), own.with_name("another-machine.json"))
    assert load_device("auto") == built_in
    tuned = replace(built_in, name="mine", measurements=CURVES)
    save(tuned, own)
    assert load_device("auto") == tuned
    assert load_device("cpu").name == "cpu"
    monkeypatch.setattr(core, "num_threads", lambda: 77)  # another machine, to the kernels
    assert load_device("auto") == built_in


def test_a_broken_profile_is_named(own: Path) -> None:
    own.write_text("{")
    with pytest.raises(CorruptFile, match=own.name):
        load_device("auto")


# Measuring


@pytest.mark.parametrize(
    "weights",
    [
        WeightFacts("affine", 4, 32, "bfloat16"),
        WeightFacts("affine", 8, 32, "float32"),
        WeightFacts("mxfp4", 4, 32, "mxfp4"),
        WeightFacts(None, None, None, "bfloat16"),
    ],
)
def test_made_up_layers(weights: WeightFacts) -> None:
    layer = random_layer(replace(SMALL, weights=weights))
    weight = layer["up_proj"]["weight"]
    bits = weights.bits or 16
    assert weight.nbytes == 4 * 32 * 64 * bits // 8
    assert ("scales" in layer["up_proj"]) == (weights.bits is not None)


def test_a_format_that_the_sizes_do_not_fit() -> None:
    with pytest.raises(InvalidArgument, match="64 x 32 in affine 4 bits"):
        tune(replace(SMALL, weights=WeightFacts("affine", 4, 128, "bfloat16")), effort=LITTLE)


@pytest.mark.parametrize(("rows", "experts"), [(1, 1), (1, 4), (8, 4), (3, 4)])
def test_every_expert_has_its_rows(rows: int, experts: int) -> None:
    x, ids = routing(SMALL, rows, experts)
    loads = np.bincount(np.array(ids).reshape(-1), minlength=4)
    assert x.shape[0] == ids.shape[0] and loads.tolist() == [rows] * experts + [0] * (4 - experts)


def test_the_cpu_profile() -> None:
    device = tune(SMALL, effort=LITTLE)
    assert device.executor == "cpu" and set(device.numbers) == set(NUMBERS["cpu"])
    assert device.measured and Device.from_dict(device.as_dict(), "it") == device
    found = device.measurements
    assert found is not None and found.overlap is None
    assert [(s.path, s.experts, s.rows) for s in found.samples] == [
        ("cold", 1, 1),
        ("cold", 4, 1),
        ("cold", 4, 8),
    ]
    number = device.numbers["packed_speedup"]
    assert "64 x 32 in affine 4 bits" in number.source and found.date in number.source
    if not has_packed_copies():
        assert number.value == 1.0 and "reads weights in place" in number.source
        assert re.search(r"takes \d+ us beside its rows, and a bf16 copy \d+ us", number.source)
    plan = make_plan(skewed(count=1, chunks=8), device)
    assert plan.executor == "cpu" and plan.device.name == "cpu-tuned"
    if number.value <= 1:
        assert "packed does not pay" in plan.layers[0].reason
        assert number.source in plan.layers[0].reason


def test_the_kernels_are_what_is_measured(monkeypatch) -> None:
    before = core.calls()
    tune(SMALL, effort=LITTLE)
    assert sum(core.calls().values()) >= sum(before.values()) + 6  # calls, warming up with them


def test_a_static_executor() -> None:
    device = tune(SMALL, static="host", effort=LITTLE)
    assert device.executor == "static" and set(device.numbers) == set(NUMBERS["static"])
    assumed = {name for name, number in device.numbers.items() if not number.measured}
    assert assumed == {"package_bytes"}
    found = device.measurements
    assert found is not None and found.overlap is not None
    static = [(s.experts, s.rows) for s in found.samples if s.path == "static"]
    assert static == [(1, 32), (1, 64), (2, 32), (2, 64)]
    (layer,) = make_plan(skewed(count=1, chunks=8), device, memory=0).layers
    assert f"measured on this device, {found.date}" in layer.reason


def test_shapes_of_layers() -> None:
    found = shape_of(facts(experts=128, top_k=8, hidden=100, inner=50))
    assert found == Shape(100, 50, 16, 8, facts().weights)
    assert shape_of(facts(experts=2, top_k=2)).experts == 2
    assert DEFAULT.flops == 6 * 2048 * 768


def test_the_last_level_cache(tmp_path: Path) -> None:
    for index, size in (("index0", "48K"), ("index3", "260M")):
        (tmp_path / index).mkdir()
        (tmp_path / index / "size").write_text(f"{size}\n")
    assert cache_bytes(tmp_path) == 260 << 20
    assert cache_bytes(tmp_path / "none") > 0


# The command


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """The command measures little; the shapes that it was to measure."""
    shapes: list[Shape] = []

    def some(shape: Shape, static: str, quick: bool, progress: bool) -> Device:
        shapes.append(shape)
        assert quick
        return tune(SMALL, static=static, effort=LITTLE, progress=progress)

    monkeypatch.setattr("mlx_moe.tune.tune", some)
    return shapes


def test_it_writes_this_machines_profile(own: Path, little, capsys) -> None:
    own.parent.rmdir()  # it makes the directory
    assert main(["tune", "--quick", "--json", "-"]) == 0
    printed, text = capsys.readouterr()
    report = json.loads(printed)
    assert report["path"] == str(own) and read_device(own).as_dict() == report["profile"]
    assert "cold_flops" in text and "packed copies: " in text and "GFLOP/s" in text
    assert load_device("auto").name == "cpu-tuned"
    assert little == [DEFAULT]


def test_it_writes_where_it_is_told(own: Path, tmp_path: Path, little, capsys) -> None:
    calibration, target = tmp_path / "calibration.npz", tmp_path / "host.json"
    skewed(count=2, hidden=128, inner=64).save(calibration)
    given = ["--quick", "--static", "host", "--calibration", str(calibration), "-o", str(target)]
    assert main(["tune", *given]) == 0
    assert read_device(target).executor == "static" and not own.exists()
    assert "both paths at once save" in capsys.readouterr().out
    assert (little[0].hidden, little[0].inner) == (128, 64)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--static", "host"), "give --output"),
        (("-o", "none/of/it.json"), "--output"),
        (("--json", "none/of/it.json"), "--json"),
        (("--calibration", "none.npz"), "none.npz"),
    ],
)
def test_refusals(own: Path, little, capsys, arguments, named: str) -> None:
    assert main(["tune", "--quick", *arguments]) == 1
    error = capsys.readouterr().err
    assert named in error and "Traceback" not in error and not own.exists()


def test_other_static_executors(monkeypatch) -> None:
    with pytest.raises(InvalidArgument, match="'ane'; expected one of auto, none, host, coreml"):
        tune(SMALL, static="ane")
    monkeypatch.setattr("mlx_moe.tune.coreml_missing", lambda: "no Core ML at all")
    with pytest.raises(MissingDependency, match="--static coreml: no Core ML at all"):
        tune(SMALL, static="coreml")


def test_an_apple_machine_without_core_ml(monkeypatch) -> None:
    """The cold path is measured, the static executor's numbers stay assumed."""
    monkeypatch.setattr("mlx_moe.tune.this_device", lambda: "m2-max")
    monkeypatch.setattr("mlx_moe.tune.coreml_missing", lambda: "none here")
    device, built_in = tune(SMALL, effort=LITTLE), load_device("m2-max")
    assert device.executor == "static" and device.name == "m2-max-tuned"
    measured = {name for name, number in device.numbers.items() if number.measured}
    assert measured == {"cold_flops", "cold_bandwidth", "cold_seconds", "memory_bytes"}
    for name in device.numbers.keys() - measured:
        assert device.numbers[name] == built_in.numbers[name]
    assert device.by_measurement() is None


class Tried:
    """Stands in for the process that compiles a package and loads it first."""

    def __init__(self) -> None:
        self.requests: list[dict] = []

    def request(self, request: dict) -> dict:
        self.requests.append(request)
        on = {"ane": [9, 6], "gpu": [0, 0], "cpu": [1, 0], "other": [0, 0]}
        split = {"ane": [0, 0], "gpu": [9, 6], "cpu": [1, 0], "other": [0, 0]}
        return {"placement": {"32": on, "64": split if request["groups"] == 2 else on}}

    def close(self) -> None:
        self.requests.append({})


def test_core_ml_programs(tmp_path: Path, monkeypatch, caplog) -> None:
    """Real packages; Core ML itself is a stand-in that computes nothing."""
    pytest.importorskip("coremltools")
    loaded: list[tuple] = []

    class Executor:
        def load(self, *arguments: object) -> int:
            loaded.append(arguments)
            return len(loaded) - 1

        def submit(self, tiles: list) -> SimpleNamespace:
            for program, x, out in tiles:
                _, groups, width, *_ = loaded[program]
                assert x.shape == out.shape and x.shape[0::2] == (groups, width)
            return SimpleNamespace(wait=lambda: [""] * len(tiles))

    tried = Tried()
    monkeypatch.setattr("mlx_moe.tune.this_device", lambda: "m2-max")
    monkeypatch.setattr("mlx_moe.tune.coreml_missing", lambda: None)
    monkeypatch.setitem(
        MAKERS,
        "coreml",
        lambda path: MadeUpPrograms(
            path, system=SimpleNamespace(CoreMLExecutor=Executor), trials=tried
        ),
    )
    device = tune(SMALL, effort=LITTLE)
    assert device.executor == "static" and device.measurements.has("static")
    *requests, closed = tried.requests
    assert closed == {} and [r["groups"] for r in requests] == [1, 1, 2, 2]
    assert [sorted(r["functions"]) for r in requests] == [
        ["32"],
        ["32", "64"],
        ["32", "64"],
        ["64"],
    ]
    assert loaded[1][0] == {
        32: (requests[1]["compiled"], "c32"),
        64: (requests[1]["compiled"], "c64"),
    }
    assert loaded[1][1:] == (1, 64, "x", "y")
    assert "prefers, of 6 convolutions, 6 for the GPU" in caplog.text
    assert not Path(requests[0]["package"]).parent.exists()


@pytest.mark.parametrize(("load", "said"), [(0.1, False), (9.0, True)])
def test_a_busy_machine_is_said(monkeypatch, load: float, said: bool) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(cli, "processors", lambda: 2)
    assert (cli.others_at_work() is not None) == said
