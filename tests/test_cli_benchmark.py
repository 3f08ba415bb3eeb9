"""`mlx_moe benchmark`: turns, statistics and what it writes."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from commands import call, write_float32

import mlx_moe
from mlx_moe.cli import main
from mlx_moe.cli.benchmark import results
from mlx_moe.cli.measure import Measurement, Trial, Workload, measure
from mlx_moe.loading import Replaced


@pytest.fixture(scope="module")
def float32_model(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float32(tiny_model_path, tmp_path_factory.mktemp("float32") / "model")


WORKLOAD = Workload(
    vocabulary=2048, batch_size=2, prompt_tokens=6, generation_tokens=3, prefill_step_size=4
)


def test_benchmark_takes_turns_and_restores(float32_model: Path) -> None:
    model, _ = mlx_lm.load(str(float32_model))
    kinds = [type(module) for _, module in model.named_modules()]
    measurement = measure(Replaced(model, "auto"), WORKLOAD, 2)
    assert [type(module) for _, module in model.named_modules()] == kinds
    assert {side: len(trials) for side, trials in measurement.trials.items()} == {
        "stock": 2,
        "replaced": 2,
    }
    for trials in measurement.trials.values():
        for trial in trials:
            assert trial.predictions.shape == (2, 6) and len(trial.decode) == 3
    assert measurement.agreement() == 1.0 and measurement.stock_error is None


def test_benchmark_sides_take_turns_at_going_first(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    monkeypatch.setattr(
        "mlx_moe.cli.measure.take_turn", lambda model, side, *rest: turns.append(side)
    )
    measure(Replaced(nn.Linear(4, 4), "auto"), WORKLOAD, 3)
    assert turns == ["stock", "replaced", "replaced", "stock", "stock", "replaced"]


def test_benchmark_statistics() -> None:
    predictions = mx.array([[1, 2, 3, 4]])
    trials = {
        "stock": [Trial(s, [s / 10, s / 5], predictions) for s in (2.0, 6.0, 4.0)],
        "replaced": [Trial(1.0, [0.1], mx.array([[1, 2, 3, 0]]))],
    }
    got = results(Measurement(trials), WORKLOAD)
    assert got["prefill"]["stock"] == pytest.approx(
        {
            "tokens_per_s": 3.0,  # two prompts of 6 tokens in 4 seconds
            "median_ms": 4000,
            "p50_ms": 4000,
            "p95_ms": 5800,
            "p99_ms": 5960,
        }
    )
    assert got["prefill"]["ratio"] == pytest.approx(4)
    assert got["decode"]["stock"]["median_ms"] == pytest.approx(500)
    assert got["decode"]["ratio"] == pytest.approx(5)
    assert got["same_top_token"] == 0.75


def test_benchmark_writes_json(tiny_model_path: Path, tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    small = ("--model", tiny_model_path, "-p", 8, "-g", 2, "-n", 1)
    ran = call("mlx_moe", "benchmark", *small, "--json", target)
    assert ran.returncode == 0, ran.stderr
    assert "prefill replaced" in ran.stdout and "decode stock" in ran.stdout
    report = json.loads(target.read_text())
    assert report["machine"]["isa"] in mlx_moe.core.isas() and report["trials"] == 1
    assert report["prefill"]["replaced"]["tokens_per_s"] > 0 and report["decode"]["ratio"] > 0
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_benchmark_refuses_a_target_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "missing" / "results.json"
    assert main(["benchmark", "--model", "m", "--json", str(target)]) == 1
    assert "there is no such directory" in capsys.readouterr().err
