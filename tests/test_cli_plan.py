"""`mlx_moe plan`: the table, the JSON, the pictures, and short errors."""

import builtins
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from plan_data import skewed

from mlx_moe import calibration_run
from mlx_moe.cli import plan as cli
from mlx_moe.cli.common import check_plot
from mlx_moe.errors import MoEError
from mlx_moe.plan import Plan
from mlx_moe.plan_report import report
from mlx_moe.plan_text import as_text, short_names
from mlx_moe.planner import make_plan

LARGE = 1 << 45
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "calibration.npz"
    skewed(count=3, experts=32, top_k=4).save(path)
    return path


def run(calibration: Path, out: Path, *arguments: object) -> int:
    given = ["--calibration", calibration, "-o", out, *arguments]
    return cli.main([str(argument) for argument in given])


def test_it_prints_a_table_and_writes_the_plan(calibration: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "plan.json"
    assert run(calibration, out, "--device", "m4-pro", "--memory", "8GB") == 0
    printed = capsys.readouterr().out
    plan = Plan.load(out)
    assert plan.device.name == "m4-pro" and plan.options["memory"] == 8_000_000_000
    assert "tokens, model.layers.*.mlp.switch_mlp" in printed
    for layer in plan.layers:
        number = layer.name.split(".")[2]
        (row,) = [line.split() for line in printed.splitlines() if line.startswith(f"{number} ")]
        expected = layer.expected
        for cell in (
            f"{expected.gini:.2f}",
            f"{expected.top_quarter:.0%}",
            f"{len(layer.hot)}/32",
            "-".join(map(str, sorted({layer.tiers[0], layer.tiers[-1]}))),
            str(len(layer.groups)),
            f"{expected.fill:.0%}",
            f"{expected.padding:.0%}",
            f"{expected.overflow:.1%}",
            f"{expected.hot:.0%}",
            f"{expected.bytes / 1e6:.1f}",
            f"{expected.static_ms:.2f}",
            f"{expected.cold_ms:.2f}",
            str(layer.static_from),
        ):
            assert cell in row
    assert "of a budget of 8000 MB" in printed and "assumed" in printed


def test_the_text_of_a_large_model_fits_a_terminal() -> None:
    """The widest that the numbers get: Kimi K2's shape, in 61 layers."""
    calibration = skewed(1, chunks=2, experts=384, top_k=8, hidden=7168)
    found = report(make_plan(calibration, "m3-ultra", memory=LARGE, max_tiers=1))
    (row,) = found["layers"]
    found["layers"] = [{**row, "layer": f"model.layers.{i}.mlp.switch_mlp"} for i in range(61)]
    for row in found["layers"]:
        row |= {"hot_experts": 384, "tiers": [32, 256, 512, 2048], "bytes": 3 * 10**10}
    for device in ("static", "cpu"):
        text = as_text({**found, "executor": device})
        table = text.splitlines()[1 : 1 + len(found["layers"]) + 3]
        assert max(map(len, table)) <= 100 and table[-1].startswith("all ")
        assert text.splitlines()[1].startswith("layer  Gini")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["m.0.a", "m.12.a"], ("m.*.a", ["0", "12"])),
        (["m.3.a"], ("m.*.a", ["3"])),
        (["m.1.a", "m.1.b"], ("m.*.*", ["1.a", "1.b"])),
        (["m.1.a", "n.2.b.c"], ("*", ["m.1.a", "n.2.b.c"])),
        (["experts"], ("*", ["experts"])),
    ],
)
def test_short_names(names: list[str], expected: tuple[str, list[str]]) -> None:
    assert short_names(names) == expected


def test_json_goes_to_stdout_and_the_table_to_stderr(
    calibration: Path, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "plan.json"
    assert run(calibration, out, "--device", "m4-pro", "--memory", "8GB", "--json", "-") == 0
    printed, table = capsys.readouterr()
    found = json.loads(printed)
    plan = Plan.load(out)
    assert "Gini" in table and found["device"] == "m4-pro"
    assert [row["layer"] for row in found["layers"]] == [layer.name for layer in plan.layers]
    overall = found["overall"]
    assert overall["bytes"] == sum(layer.expected.bytes for layer in plan.layers)
    assert overall["static_ms"] == pytest.approx(
        sum(layer.expected.static_ms for layer in plan.layers)
    )
    assert min(row["padding"] for row in found["layers"]) <= overall["padding"]
    assert overall["padding"] <= max(row["padding"] for row in found["layers"])


def test_overall_shares_weigh_by_what_they_are_shares_of() -> None:
    """Of layers that are all alike, overall is what each is."""
    plan = make_plan(skewed(count=1), "m4-pro", memory=LARGE)
    found = report(plan)
    (row,) = found["layers"]
    for key in ("gini", "top_quarter", "fill", "padding", "overflow", "hot"):
        # a chunk's assignments are capped where one expert would have more than all its tokens
        assert found["overall"][key] == pytest.approx(row[key], rel=0.02), key


def test_reasons_and_forcing_are_said(calibration: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "plan.json"
    assert run(calibration, out, "--device", "m2-max", "--memory", "0") == 0
    assert "the memory budget of 0.00 GB is too small" in capsys.readouterr().out
    assert run(calibration, out, "--device", "m2-max", "--force-hot", "0.6") == 0
    assert "forced: 60% of the assignments" in capsys.readouterr().out


def test_the_cpu_says_that_packing_does_not_pay(calibration: Path, tmp_path: Path, capsys) -> None:
    assert run(calibration, tmp_path / "plan.json", "--device", "cpu") == 0
    printed = capsys.readouterr().out
    assert "ms  in place" in printed and "packed does not pay" in printed


def test_pictures(calibration: Path, tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    out, pictures = tmp_path / "plan.json", tmp_path / "pictures"
    for device in ("m4-pro", "cpu"):
        options = ("--device", device, "--memory", "8GB", "--plot", pictures)
        assert run(calibration, out, *options) == 0
        files = sorted(pictures.iterdir())
        assert [path.name for path in files] == ["loads.png", "popularity.png"]
        assert all(path.read_bytes().startswith(PNG) for path in files)
        assert str(files[0]) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("directory", "path", "said"),
    [
        (False, "file.txt", None),
        (False, "new.png", None),
        (False, "none/new.png", "no such directory"),
        (False, ".", "a directory; name a file"),
        (True, ".", None),
        (True, "new/deeper", None),
        (True, "file.txt", "a file; name a directory"),
        (True, "file.txt/deeper", "a file; name a directory"),
    ],
)
def test_where_pictures_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: bool, path: str, said: str | None
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("file.txt").touch()
    with nullcontext() if said is None else pytest.raises(MoEError, match=said):
        check_plot(path, directory=directory)


def test_without_matplotlib_it_is_named_before_the_work(
    calibration: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    found = builtins.__import__

    def without(name, *arguments, **options):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return found(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    out = tmp_path / "plan.json"
    assert run(calibration, out, "--device", "m1", "--plot", tmp_path) == 1
    assert "matplotlib" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--device", "m7"), "m2-max"),
        (("--chunk", "700"), "chunk is 700"),
        (("--capacity-factor", "0"), "capacity_factor"),
        (("--json", "none/of/it.json"), "--json"),
    ],
)
def test_errors_are_short(calibration: Path, tmp_path: Path, capsys, arguments, named) -> None:
    out = tmp_path / "plan.json"
    assert run(calibration, out, *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("mlx_moe: error: ") and named in error and "Traceback" not in error
    assert not out.exists()


def test_a_calibration_that_is_none(tmp_path: Path, capsys) -> None:
    (tmp_path / "c.npz").write_bytes(b"no")
    assert run(tmp_path / "c.npz", tmp_path / "plan.json") == 1
    assert "c.npz" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16GB", 16_000_000_000), ("500MiB", 500 << 20), ("1.5g", 1_500_000_000), ("7", 7)],
)
def test_sizes(text: str, expected: int) -> None:
    assert cli.size(text) == expected


@pytest.mark.parametrize(
    "arguments", [("--memory", "much"), ("--overflow", "0"), ("--force-hot", "2"), ("--chunk", "0")]
)
def test_wrong_usage(calibration: Path, tmp_path: Path, arguments) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(calibration, tmp_path / "plan.json", *arguments)
    assert stopped.value.code == 2


def test_the_example_model(tiny_model_path: Path, tmp_path: Path) -> None:
    """Calibrated for real: skewed, too small for a dispatch, and hot where that is forced."""
    import mlx_lm

    import mlx_moe

    model, tokenizer = mlx_lm.load(str(tiny_model_path))
    text = (tiny_model_path.parent / "prompt.txt").read_text() * 40
    tokens = tokenizer.encode(text)[:2048]
    mlx_moe.replace_moe_layers(model)
    mlx_moe.replace_linear_layers(model)
    found = calibration_run.calibrate(model, [tokens], chunk=256)
    plain = make_plan(found, "m2-max")
    assert all(not layer.groups and layer.reason for layer in plain.layers)
    forced = make_plan(found, "m2-max", force_hot=0.6)
    assert all(layer.expected.hot > 0.55 for layer in forced.layers)
    assert all(layer.expected.gini > 0.3 for layer in forced.layers)
    forced.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == forced
    assert "forced: 60%" in as_text(report(forced))
