"""`mlx_moe generate` and `run` with a plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import mlx_lm
import pytest
from commands import call, generated_text
from static_models import groups_of, plan_of, write_artifacts

from mlx_moe import core
from mlx_moe.identity import identity_of_model

PROMPT = "In the beginning God created the heaven and the earth. " * 4


@pytest.fixture(scope="module")
def planned(tiny_model_path: Path, tmp_path_factory) -> tuple[object, ...]:
    """Arguments for the example model with 24 of 32 experts hot from 8 tokens on."""
    directory = tmp_path_factory.mktemp("planned")
    model, _ = mlx_lm.load(str(tiny_model_path))
    members = [range(at, at + 8) for at in (0, 8, 16)]
    groups = {
        f"model.layers.{i}.mlp.switch_mlp": groups_of(f"l{i}", members, (64, 32, 64), 64)
        for i in range(6)
    }
    identity = identity_of_model(model, tiny_model_path)
    plan = plan_of(model, groups, identity=identity, static_from=8)
    plan.save(directory / "plan.json")
    artifacts = write_artifacts(model, plan, directory / "artifacts")
    return "--plan", directory / "plan.json", "--artifacts", artifacts


def test_rebalancing(tiny_model_path, planned) -> None:
    options = ("--backend", "host", "--rebalance")
    ran = generate(tiny_model_path, *planned, *options)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"\nrebalance: \d+ re-plans in 6 layers, 0 B moved; \d+ shifts", ran.stderr)


@pytest.mark.parametrize(
    ("options", "message"),
    [((), "--rebalance keeps a plan up with routing: give --plan"), (None, "nothing here can")],
)
def test_rebalancing_what_is_not_planned(tiny_model_path, planned, options, message) -> None:
    ran = generate(tiny_model_path, *(planned if options is None else options), "--rebalance")
    assert ran.returncode == 1
    assert message in ran.stderr


def generate(model: Path, *options: object):
    arguments = ("--model", model, "--prompt", PROMPT, "--max-tokens", 8)
    return call("mlx_moe", "generate", *arguments, *options)


def test_generate_with_a_plan(tiny_model_path, planned) -> None:
    ran = generate(tiny_model_path, *planned, "--backend", "host")
    assert ran.returncode == 0, ran.stderr
    cold = generate(tiny_model_path)
    assert generated_text(ran.stdout) == generated_text(cold.stdout)
    assert "6 MoE layers replaced, 6 with a static path" in ran.stderr
    (line,) = (line for line in ran.stderr.splitlines() if line.startswith("static path: "))
    hot, routed = map(int, re.match(r"static path: (\d+) of (\d+) assign", line).groups())
    assert hot > routed / 2
    assert re.search(r" 0 pruned; \d+% padding; \d+ dispatches, 6 waits; ms: bucket \d", line)
    assert "static path" not in cold.stderr


def test_statistics_of_a_plan_as_json(tiny_model_path, planned) -> None:
    options = ("--backend", "host", "--stats", "json", "--overflow", "prune")
    ran = generate(tiny_model_path, *planned, *options)
    assert ran.returncode == 0, ran.stderr
    layers = json.loads(ran.stderr[ran.stderr.index("[\n") :])
    moe = [layer for layer in layers if layer["kind"] == "experts"]
    assert [layer["backend"] for layer in moe] == ["host"] * 6
    assert sum(layer["static"]["pruned"] for layer in moe) > 0
    assert all(layer["static"]["seconds"]["pack"] > 0 for layer in moe)


def test_any_stock_command_with_a_plan(tiny_model_path, planned) -> None:
    stock = ("mlx_lm.generate", "--model", tiny_model_path, "--prompt", PROMPT, "-m", 4)
    ran = call("mlx_moe", "run", *planned, "--backend", "host", *stock)
    assert ran.returncode == 0, ran.stderr
    assert "static path: " in ran.stderr


def test_a_plan_without_its_executor_is_said(tiny_model_path, planned) -> None:
    ran = generate(tiny_model_path, *planned)
    assert ran.returncode == 0, ran.stderr
    assert "all experts stay on the cold path; backend coreml" in ran.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--backend", "host"), "give --plan, --artifacts"),
        (("--plan", "none.json", "--backend", "host"), "there is no plan none.json"),
        pytest.param(
            ("--plan", "none.json", "--backend", "coreml"),
            "backend='coreml': there is no Core ML here",
            marks=pytest.mark.skipif(not core.coreml_missing(), reason="Core ML is here"),
        ),
        (("--artifacts", "none"), "artifacts go with the plan"),
    ],
)
def test_wrong_options_are_one_line(tiny_model_path, options, message: str) -> None:
    ran = generate(tiny_model_path, *options)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("mlx_moe: error: ")
    assert message in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr
