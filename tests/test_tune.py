"""`mlx_moe tune`: fits against known machines, measured curves, and plans that believe them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from plan_data import calibration, facts, skewed, zipf

from mlx_moe import core, cost, tune_profile
from mlx_moe.cli import main
from mlx_moe.cli import tune as cli
from mlx_moe.cost import expert_of
from mlx_moe.devices import NUMBERS, Device, Number, load_device, read_device
from mlx_moe.errors import CorruptFile, InvalidArgument, MissingDependency
from mlx_moe.layer_facts import WeightFacts
from mlx_moe.machine import has_packed_copies
from mlx_moe.measured import Measurements, Sample
from mlx_moe.plan import Plan
from mlx_moe.planner import make_plan
from mlx_moe.tune import DEFAULT, MAKERS, Effort, cache_bytes, save, shape_of, tune
from mlx_moe.tune_cold import Shape, random_layer, routing
from mlx_moe.tune_coreml import MadeUpPrograms
from mlx_moe.tune_fit import cold_numbers, static_numbers
from mlx_moe.tune_static import saved_share

LARGE = 1 << 45
SMALL = Shape(64, 32, 4, 2, WeightFacts("affine", 4, 32, "bfloat16"))
LITTLE = Effort(rows=(1, 8), groups=(1, 2), capacities=(32, 64), repeats=1)
D, F = 2048, 768


def sample(path: str, experts: int, rows: int, seconds: float, inner: int = F) -> Sample:
    return Sample(path, D, inner, experts, rows, seconds)


# Fits


def test_the_cold_path_of_a_known_machine() -> None:
    flops, size, start, speed, bandwidth = 1e6, 4e5, 3e-5, 2e11, 1e10

    def seconds(experts: int, rows: int) -> float:
        return start + experts * max(rows * flops / speed, size / bandwidth)

    samples = [sample("cold", 1, 1, seconds(1, 1))]
    samples += [sample("cold", 16, rows, seconds(16, rows)) for rows in (1, 16, 256)]
    found = cold_numbers(samples, flops, size)
    expected = {"cold_seconds": start, "cold_bandwidth": bandwidth, "cold_flops": speed}
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_static_path_of_a_known_machine() -> None:
    flops, size, dispatch, speed, bandwidth = 1e6, 8e5, 2e-4, 4e12, 1e10
    samples = [
        sample("static", g, c, dispatch + max(g * c * flops / speed, g * size / bandwidth))
        for g in (1, 8)
        for c in (32, 64, 1024, 4096)
    ]
    found = static_numbers(samples, flops, size, dispatch)
    expected = {"static_flops": speed, "static_efficiency": 1.0, "static_bandwidth": bandwidth}
    assert found == pytest.approx(expected, rel=1e-6)


def test_noise_gives_no_impossible_numbers() -> None:
    """One expert slower than sixteen, everything faster than a dispatch."""
    samples = [sample("cold", 1, 1, 5e-3), *(sample("cold", 16, r, 1e-3) for r in (1, 64))]
    assert all(0 < value < 1e30 for value in cold_numbers(samples, 1e6, 1e5).values())
    static = [sample("static", 1, 32, 1e-5)]
    assert all(0 < value < 1e30 for value in static_numbers(static, 1e6, 1e5, 1.0).values())


@pytest.mark.parametrize(("both", "share"), [(3.0, 1.0), (4.0, 0.5), (5.0, 0.0), (9.0, 0.0)])
def test_what_both_at_once_save(monkeypatch, both: float, share: float) -> None:
    taken = iter([3.0, 2.0, both] * 3)
    monkeypatch.setattr("mlx_moe.tune_static.timed_once", lambda call: next(taken))
    assert saved_share([print] * 3, 3) == pytest.approx(share)


# Curves


CURVES = Measurements(
    "2026-01-31",
    0.5,
    (
        *(sample("static", g, c, 1e-6 * g * c + 1e-4) for g in (1, 4) for c in (32, 128)),
        *(sample("cold", 16, rows, 16e-5 * rows) for rows in (1, 10, 100)),
        *(sample("cold", 16, rows, 1.0, inner=64 * F) for rows in (1, 10)),
    ),
)


def test_curves_pass_through_the_samples() -> None:
    for s in CURVES.samples:
        if s.path == "static":
            found = CURVES.static_seconds(D, s.inner, s.experts, float(s.rows))
        else:
            found = CURVES.cold_seconds(D, s.inner, np.array([float(s.rows)])) * s.experts
        assert float(np.squeeze(found)) == pytest.approx(s.seconds), s


def test_curves_between_and_beyond() -> None:
    """Loads in proportion, as the samples are; few slots no less than the fewest."""
    loads = np.array([0.0, 1.0, 3.0, 50.0, 1000.0])
    assert CURVES.cold_seconds(D, F, loads) == pytest.approx(1e-5 * loads)
    assert CURVES.cold_seconds(D, F, np.array([0.5])) == pytest.approx(1e-5)
    few, least = (float(CURVES.static_seconds(D, F, 1, c)) for c in (8.0, 32.0))
    assert few == least
    assert float(CURVES.static_seconds(D, F, 1, 256.0)) == pytest.approx(2 * (128e-6 + 1e-4))
    between = float(CURVES.static_seconds(D, F, 2, 32.0))
    assert 132e-6 < between < 228e-6
    assert float(CURVES.static_seconds(D, F, 8, 32.0)) == pytest.approx(2 * 228e-6)
    # in proportion to the size beyond those measured, on the line through them between
    assert CURVES.cold_seconds(D, F // 2, loads) == pytest.approx(5e-6 * loads)
    assert CURVES.cold_seconds(D, 128 * F, loads[1:2]) == pytest.approx(2 / 16)
    between = (56 * 1e-5 + 7 / 16) / 63
    assert CURVES.cold_seconds(D, 8 * F, loads[1:2]) == pytest.approx(between)


def measured(device: Device, curves: Measurements) -> Device:
    return replace(device, name="mine", measurements=curves)


def test_layers_as_measured_share_units() -> None:
    device = measured(load_device("m2-max"), CURVES).by_measurement()
    assert device is not None
    wait, start = device["sync_seconds"], device["cold_seconds"]
    found = float(cost.layer_seconds(device, 2e-3, 1e-3))
    assert found == pytest.approx(2e-3 + 0.5 * (1e-3 + start) + wait)
    apart = replace(device, curves=replace(CURVES, overlap=None))
    assert float(cost.layer_seconds(apart, 2e-3, 1e-3)) == pytest.approx(2e-3 + wait)


def test_costs_as_measured() -> None:
    expert = expert_of(facts())
    device = measured(load_device("m2-max"), CURVES)
    curves = device.by_measurement()
    assert curves is not None
    for c in (32.0, 77.0):
        assert cost.static_seconds(curves, expert, "fp16", 4, c) == pytest.approx(
            CURVES.static_seconds(D, F, 4, c)
        )
    # and by the numbers where that is not asked for
    plain = load_device("m2-max")
    for one in (device, plain):
        assert cost.static_seconds(one, expert, "fp16", 4, 32) == pytest.approx(
            cost.static_seconds(plain, expert, "fp16", 4, 32)
        )


def test_no_curves_of_one_path_alone() -> None:
    cold = tuple(s for s in CURVES.samples if s.path == "cold")
    assert measured(load_device("m2-max"), replace(CURVES, samples=cold)).by_measurement() is None
    assert load_device("m2-max").by_measurement() is None


# Plans


def curves(static: float, cold: float, overlap: float | None) -> Measurements:
    """FLOP/s of each path at any size."""
    flops = 6.0 * D * F
    return Measurements(
        "2026-01-31",
        overlap,
        (
            *(
                sample("static", g, c, g * c * flops / static)
                for g in (1, 4, 16)
                for c in (32, 512)
            ),
            *(sample("cold", 16, rows, 16 * rows * flops / cold) for rows in (1, 512)),
        ),
    )


@pytest.mark.parametrize(
    ("static", "cold", "overlap", "used"),
    [
        (1e13, 2e12, 1.0, True),  # as fast as the numbers have it
        (1e13, 2e12, 0.0, True),
        (2e12, 2e12, 1.0, True),  # no faster, and beside the other
        (2e12, 2e12, 0.0, False),  # no faster, and in its way
        (1e10, 2e12, 1.0, False),  # far slower
        (1e12, 1e15, None, False),  # a cold path that nothing beats
    ],
)
def test_a_static_path_that_measures_slower_is_not_used(
    tmp_path: Path, static: float, cold: float, overlap: float | None, used: bool
) -> None:
    """The numbers say that it wins; what was measured decides."""
    device = load_device("m4-pro")
    assert all(p.groups for p in make_plan(skewed(count=1, chunks=8), device, memory=LARGE).layers)
    plan = make_plan(
        skewed(count=1, chunks=8), measured(device, curves(static, cold, overlap)), memory=LARGE
    )
    (layer,) = plan.layers
    assert bool(layer.groups) == used and (layer.static_from is not None) == used
    if not used:
        assert "as measured" in layer.reason and "measured on this device, 2026-01-31" in (
            layer.reason
        )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_each_layer_goes_by_what_its_own_size_measured() -> None:
    device, large = load_device("m4-pro"), 8 * F
    slow, quick = curves(1e10, 2e12, 1.0).samples, curves(1e13, 2e12, 1.0).samples
    own = tuple(replace(s, inner=large, seconds=8 * s.seconds) for s in quick)
    both = Measurements("2026-01-31", 1.0, slow + own)
    layers = [facts(0), facts(1, inner=large)]
    loads = [zipf(layer.experts, layer.top_k, 512, 8, 1.0, 0) for layer in layers]
    plan = make_plan(calibration(loads, layers, 512), measured(device, both), memory=LARGE)
    small, big = plan.layers
    assert not small.groups and "as measured" in small.reason
    assert big.groups and big.reason is None


def test_forcing_does_not_ask() -> None:
    device = measured(load_device("m4-pro"), curves(1e10, 2e12, 0.0))
    plan = make_plan(skewed(count=1, chunks=8), device, memory=LARGE, force_hot=0.5)
    assert plan.layers[0].groups


def test_copies_that_do_not_pay_are_not_made() -> None:
    device = load_device("cpu")
    for value, packed in ((0.8, False), (2.0, True)):
        number = Number(value, "times", "mlx_moe tune, 2026-01-31: measured", True)
        numbers = device.numbers | {"packed_speedup": number}
        plan = make_plan(skewed(count=1, chunks=8), replace(device, numbers=numbers), memory=LARGE)
        assert bool(plan.layers[0].packed) == packed
        if not packed:
            assert "mlx_moe tune, 2026-01-31: measured" in plan.layers[0].reason


# Profiles


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m.pop("date"), r"measurements: \['date'\] missing"),
        (lambda m: m.update(date=3), r"measurements.date: .*found 3"),
        (lambda m: m.update(overlap=2), r"measurements.overlap: .*found 2"),
        (lambda m: m.update(samples=[]), "samples"),
        (lambda m: m["samples"][0].update(path="warm"), r"samples\[0\].path: .*found 'warm'"),
        (lambda m: m["samples"][1].update(rows=0), r"samples\[1\].rows: .*found 0"),
        (lambda m: m["samples"][1].update(experts=True), r"samples\[1\].experts: .*found True"),
        (lambda m: m["samples"][1].update(seconds=0), r"samples\[1\].seconds: .*found 0"),
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
    plan = make_plan(skewed(count=1, chunks=8), device)
    assert plan.executor == "cpu" and plan.device.name == "cpu-tuned"


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
