"""What is simulated: routing from files, and the command."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from plan_data import calibration, facts, skewed, zipf

from mlx_moe.cache_trace import Trace, TracedLayer, TraceRecorder
from mlx_moe.cli import simulate as cli
from mlx_moe.devices import load_device
from mlx_moe.errors import CorruptFile, InvalidArgument
from mlx_moe.simulate_routing import (
    draw,
    of_calibration,
    of_histograms,
    of_trace,
    read_histograms,
    resampled,
)


@pytest.mark.parametrize("tokens", [1, 7, 512])
@pytest.mark.parametrize(("experts", "top_k"), [(2, 2), (8, 2), (128, 8)])
def test_drawn_loads_are_possible(tokens: int, experts: int, top_k: int) -> None:
    random = np.random.default_rng(0)
    shares = random.dirichlet(np.full(experts, 0.05))  # most on few
    loads = draw(random, shares, tokens, top_k)
    assert loads.sum() == tokens * top_k and loads.max() <= tokens and loads.min() >= 0


def test_drawn_loads_follow_the_shares() -> None:
    shares = np.array([0.4, 0.3, 0.2, 0.1])
    loads = draw(np.random.default_rng(0), shares, 100_000, 1)
    np.testing.assert_allclose(loads / 100_000, shares, atol=0.01)


@pytest.mark.parametrize("experts", [2, 8, 32, 48, 128])
def test_resampling_keeps_the_curve_of_popularity(experts: int) -> None:
    shares = np.random.default_rng(1).dirichlet(np.full(32, 0.5))
    found = resampled(shares, experts)
    assert found.sum() == pytest.approx(1) and (np.diff(found) <= 1e-12).all()
    half = np.sort(shares)[::-1][:16].sum()
    assert found[: experts // 2].sum() == pytest.approx(half)
    if experts == 32:
        np.testing.assert_allclose(found, np.sort(shares)[::-1])


def write_histograms(path: Path, zipped: bool = True, **more: object) -> Path:
    random = np.random.default_rng(3)
    domains = {f"d{i}": random.integers(1, 100, (2, 8)).tolist() for i in range(5)}
    raw = json.dumps({"model": "made-up", "top_k": 2, "domains": domains, **more}).encode()
    path.write_bytes(gzip.compress(raw) if zipped else raw)
    return path


def test_histograms_are_drawn_from_the_same_seed_alike(tmp_path: Path) -> None:
    layers = [facts(0, experts=8), facts(1, experts=8), facts(2, experts=16)]
    found = read_histograms(write_histograms(tmp_path / "h"))
    assert (found.name, found.layers, found.experts, found.top_k) == ("made-up", 2, 8, 2)
    draws = [of_histograms(found, layers, 64, 6, seed) for seed in (1, 1, 2)]
    for i, layer in enumerate(layers):
        assert draws[0].loads[i].shape == (6, layer.experts)
        np.testing.assert_array_equal(draws[0].loads[i], draws[1].loads[i])
    assert not np.array_equal(draws[0].loads[0], draws[2].loads[0])


@pytest.mark.parametrize(
    ("domains", "named"),
    [
        (None, "domains"),
        ({}, "domains"),
        ([1], "domains"),
        ({"a": [[1, 2]], "b": [[1, 2], [3, 4]]}, "'b'"),
        ({"a": [[1, -2]]}, "'a'"),
        ({"a": [[0, 0]]}, "'a'"),
        ({"a": [["x"]]}, "'a'"),
        ({"a": [["1", "2"]]}, "'a'"),
        ({"a": [[True, False]]}, "'a'"),
        ({"a": [[float("nan"), 1]]}, "'a'"),
        ({"a": [[1e308, 1e308]]}, "'a'"),  # their sum is infinite
        ({"a": [[10**400, 1]]}, "'a'"),
        ({"a": 3}, "'a'"),
    ],
)
def test_histograms_that_are_none_name_the_domain(tmp_path: Path, domains, named: str) -> None:
    path = write_histograms(tmp_path / "h", domains=domains)
    with pytest.raises(CorruptFile, match=named):
        read_histograms(path)


@pytest.mark.parametrize("wrong", [{"top_k": 9}, {"top_k": 0}, {"top_k": "2"}, {"model": ["x"]}])
def test_histograms_with_other_facts_that_cannot_be(tmp_path: Path, wrong) -> None:
    with pytest.raises(CorruptFile, match=next(iter(wrong))):
        read_histograms(write_histograms(tmp_path / "h", **wrong))


@pytest.mark.parametrize("raw", [b"", b"{", b"\x1f\x8b\x00", b"\xff\xfe", b"[1]"])
def test_other_files_are_no_histograms(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "h").write_bytes(raw)
    with pytest.raises(CorruptFile):
        read_histograms(tmp_path / "h")
    with pytest.raises(InvalidArgument, match="no file"):
        read_histograms(tmp_path / "none")


def traced() -> Trace:
    layers = [TracedLayer("l0", 8, 2, 100), TracedLayer("l1", 4, 1, 100)]
    recorder = TraceRecorder(layers)
    recorder.add(1, np.array([[1]]))  # the end of a pass that began before
    for ids in ([[0, 1], [1, 2], [0, 1]], [[7, 3]]):
        recorder.add(0, np.array(ids))
        recorder.add(1, np.array([[row[0] % 4] for row in ids]))
    recorder.add(0, np.array([[5, 6]]))  # and one that does not
    return recorder.trace()


def test_a_trace_gives_a_step_for_every_pass() -> None:
    layers = [facts(0, experts=8), facts(1, experts=4, top_k=1)]
    found = of_trace(traced(), layers, "t.npz")
    assert found.tokens.tolist() == [3, 1]
    np.testing.assert_array_equal(
        found.loads[0], [[2, 2, 2, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 1]]
    )
    np.testing.assert_array_equal(found.loads[1], [[1.5, 1.5, 0, 0], [0, 0, 0, 1]])


def test_a_routing_is_planned_by_one_half_and_calibrates_to_itself() -> None:
    made = skewed(chunk=128, chunks=7)
    routing = of_calibration(made, None, "c.npz")
    seen, rest = routing.halves()
    assert seen.steps == 4 and rest.steps == 3
    np.testing.assert_array_equal(rest.loads[1][0], made.loads(1)[1])
    again = seen.calibration()
    np.testing.assert_array_equal(again.loads(0), made.loads(0)[::2])
    assert again.chunk == 128 and again.layers == made.layers
    alone = routing.only(slice(0, 1)).halves()
    assert alone[0].steps == alone[1].steps == 1


def command(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_the_command_prints_a_table_and_json(tmp_path: Path, capsys) -> None:
    path = write_histograms(tmp_path / "h.json.gz")
    out = tmp_path / "out.json"
    sizes = ("--hidden", 512, "--inner", 256)
    picture = tmp_path / "p.png"
    given = ("--histograms", path, "--device", "m2-max", "--chunk", 256, *sizes)
    assert command(*given, "--json", out, "--plot", picture) == 0
    printed = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert printed.startswith("SIMULATED") and picture.read_bytes().startswith(b"\x89PNG")
    names = [r["strategy"] for r in found["results"]]
    assert (
        names == ["cpu", "cold", "naive", "plan", "plan-cpu", "forced"]
        and found["simulated"] is True
    )
    for r in found["results"]:
        assert f"{r['seconds'] * 1e3:.2f}" in printed
    assert command(*given, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out) == found  # the same again


def test_the_command_reads_calibrations_and_traces(tmp_path: Path, capsys) -> None:
    loads = zipf(16, 2, 128, 8, 1.0)
    calibration([loads], [facts()], 128).save(tmp_path / "c.npz")
    assert command("--calibration", tmp_path / "c.npz", "--device", "cpu") == 0
    assert "cold" in capsys.readouterr().out
    traced().save(tmp_path / "t.npz")
    given = ("--trace", tmp_path / "t.npz", "--device", "m4", "--strategy", "cold", "plan")
    assert command(*given, "--hidden", 64, "--inner", 64) == 0
    assert "does not know its processor" not in capsys.readouterr().out  # nothing was packed
    given = ("--trace", tmp_path / "t.npz", "--device", "m4", "--strategy", "naive")
    assert command(*given, "--hidden", 64, "--inner", 64) == 0
    assert "does not know its processor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "m2-max"), "--shape"),
        (("--device", "cpu", "--shape", "gpt-oss-20b", "--strategy", "plan"), "static executor"),
        (("--device", "m3", "--shape", "gpt-oss-20b", "--strategy", "cpu"), "processor"),
        (("--device", "m9"), "no device"),
        (("--shape", "gpt-oss-20b", "--top-k", 64), "top_k"),
        (("--shape", "gpt-oss-20b", "--seed", -1), "seed"),
        (("--shape", "gpt-oss-20b", "--chunk", 1 << 40), "tokens"),
        (("--shape", "gpt-oss-20b", "--steps", 1 << 40), "too many"),
        (("--hidden", 64, "--inner", 64), "--top-k"),
        (("--shape", "gpt-oss-20b", "--json", "."), "directory"),
    ],
)
def test_short_errors(tmp_path: Path, capsys, arguments, message: str) -> None:
    path = write_histograms(tmp_path / "h", top_k=None)
    assert command("--histograms", path, *arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "option"),
    [
        (source, option)
        for source, options in cli.UNUSED.items()
        for option in options
        if option != "shape"
    ],
)
def test_options_without_a_use_are_refused(capsys, source: str, option: str) -> None:
    assert command(f"--{source}", "file", f"--{option}", 2) == 1
    error = capsys.readouterr().err
    assert f"--{option} means nothing with --{source}" in error


def test_a_device_that_is_never_done_is_named(tmp_path: Path, capsys) -> None:
    slow = load_device("m2-max").as_dict()
    slow["numbers"]["cold_bandwidth"]["value"] = 1e-320  # its times are infinite
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    path = write_histograms(tmp_path / "h")
    given = ("--histograms", path, "--shape", "gpt-oss-20b", "--device", tmp_path / "slow.json")
    assert command(*given, "--strategy", "cold") == 1
    assert "takes inf s on cold" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--experts", 1 << 40), ("--bits", 7), ("--hidden", 0)])
def test_sizes_that_cannot_be(capsys, arguments) -> None:
    with pytest.raises(SystemExit):
        command("--histograms", "file", *arguments)
    assert str(arguments[0]) in capsys.readouterr().err
