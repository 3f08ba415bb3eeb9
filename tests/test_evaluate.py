"""Evaluation against brute force in float64: scores, divergence, counted drops, the control."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from families import FAMILIES, build, switches
from static_models import groups_of, plan_of, write_artifacts

from mlx_moe import evaluate, replace_moe_layers
from mlx_moe.cli import main
from mlx_moe.errors import InvalidArgument
from mlx_moe.evaluation_data import Source
from mlx_moe.evaluation_sides import limited, stock_classes
from mlx_moe.evaluation_tasks import divergence
from mlx_moe.scoring import Question, SharedContexts, WholeRows, batches, caches_repeat
from mlx_moe.static import StaticLayer
from mlx_moe.static_paths import all_cold, static_paths, with_layers

CHUNK = 512
HOT, TIER = (0, 1, 2, 3, 4), 64


class Numbers:
    """A tokenizer that is not asked for anything."""

    bos_token = None


def family(name: str) -> nn.Module:
    return build(next(f for f in FAMILIES if f.name == name))


def log_softmax(logits: Any) -> np.ndarray:
    x = np.array(logits.astype(mx.float32), np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def questions(vocabulary: int, count: int, seed: int = 0) -> list[Question]:
    """Contexts of one length and of others; choices of one to five tokens."""
    rng = np.random.default_rng(seed)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(0, vocabulary, n))

    made = []
    for number in range(count):
        length = 12 if number % 3 else int(rng.integers(2, 40))
        choices = tuple(tokens(int(rng.integers(1, 6))) for _ in range(2 + number % 3))
        made.append(Question(tokens(length), choices, number % 2, (1.0,) * len(choices)))
    return made


def text(vocabulary: int, windows: int) -> Source:
    tokens = np.random.default_rng(1).integers(0, vocabulary, windows * CHUNK + 1)
    return Source("text", [int(t) for t in tokens])


def vocabulary(model: nn.Module) -> int:
    return int(model.args.vocab_size)


@pytest.mark.parametrize("chunk", [16, 64, 4096])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])  # whose cache repeats, whose does not
def test_scores_of_continuations(name: str, chunk: int) -> None:
    model = family(name)
    replace_moe_layers(model, backend="cpu")
    asked = questions(vocabulary(model), 20)
    shareable = caches_repeat(model)
    assert shareable == (name == "qwen3_moe")
    units = batches(asked, range(len(asked)), chunk, shareable)
    kinds = {type(unit) for unit in units}
    assert kinds == {WholeRows} if not shareable or chunk == 4096 else SharedContexts in kinds
    seen = {}
    for unit in units:
        found = unit.run(model)
        for row, total, greedy in zip(found.rows, found.total, found.greedy, strict=True):
            assert (row.question, row.choice) not in seen
            seen[row.question, row.choice] = (total, greedy)
    assert len(seen) == sum(len(q.choices) for q in asked)
    for (number, choice), (total, greedy) in seen.items():
        context, ending = asked[number].context, asked[number].choices[choice]
        logs = log_softmax(model(mx.array([context + ending]))[0])[len(context) - 1 : -1]
        assert total == pytest.approx(logs[range(len(ending)), ending].sum(), abs=1e-4)
        assert greedy == (logs.argmax(axis=1) == ending).all()


def test_greedy_continuations_are_found() -> None:
    model = family("qwen3_moe")
    context = (1, 2, 3)
    tokens = list(context)
    for _ in range(3):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1])))
    wrong = (*tokens[3:5], (tokens[5] + 1) % vocabulary(model))
    asked = [Question(context, (tuple(tokens[3:]), wrong), 0, (1.0, 1.0))]
    for chunk in (3, 100):
        units = batches(asked, [0], chunk, True)
        assert [bool(g) for u in units for g in u.run(model).greedy] == [True, False]


def test_divergence() -> None:
    rng = np.random.default_rng(0)
    p, q = (rng.normal(0, 3, (130, 50)) for _ in range(2))
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))
    expected = (np.exp(p) * (p - q)).sum()
    assert divergence(p.astype(np.float32), q.astype(np.float32)) == pytest.approx(expected, 1e-5)


@pytest.fixture
def model() -> nn.Module:
    return family("qwen3_moe")


@pytest.fixture
def planned(model: nn.Module, tmp_path: Path) -> tuple[Any, Path]:
    """Five of eight experts of every layer hot, in tiles of 64."""
    groups = {}
    for name, module in switches(model):
        inner = module.gate_proj.weight.shape[1]
        groups[name] = groups_of(name, [HOT[:3], HOT[3:]], [TIER, TIER], inner)
    plan = plan_of(model, groups, static_from=CHUNK // 4)
    return plan, write_artifacts(model, plan, tmp_path / "artifacts")


def run(model: nn.Module, planned: tuple[Any, Path], source: Source, **options: Any) -> Any:
    plan, artifacts = planned
    options = {"reference": "cpu", "overflow": "prune", **options}
    return evaluate(model, Numbers(), [source], plan=plan, artifacts=artifacts, **options)


@pytest.mark.parametrize("reference", ["stock", "cpu"])
def test_replaced_layers_say_the_same(model: nn.Module, reference: Any) -> None:
    source = text(vocabulary(model), 2)
    source.questions = questions(vocabulary(model), 30)
    logs = log_softmax(model(mx.array([source.text[:CHUNK]]))[0])
    more = log_softmax(model(mx.array([source.text[CHUNK : 2 * CHUNK]]))[0])
    losses = -np.concatenate([logs, more])[range(2 * CHUNK), source.text[1:]]
    found = evaluate(model, Numbers(), [source], reference=reference)
    (side,) = found.sides
    assert side.metrics["text"]["tokens"] == 2 * CHUNK
    assert side.metrics["text"]["perplexity"].value == pytest.approx(np.exp(losses.mean()), 1e-4)
    assert abs(side.metrics["text"]["kl"].value) < 1e-7
    assert side.metrics["text"]["top1"].value == 1.0
    assert side.metrics["text"]["perplexity_ratio"].value == pytest.approx(1, abs=1e-6)
    choice = side.metrics["choice"]
    assert (choice["gained"], choice["lost"], choice["items"]) == (0, 0, 30)
    assert not hasattr(type(model.layers[0].mlp.switch_mlp), "_moe_base")  # stock again


def test_divergence_and_drops_of_a_pruned_plan(model: nn.Module, planned: tuple[Any, Path]) -> None:
    """Against the same forwards by hand: outputs, and loads beyond the limit in layer one."""
    source = text(vocabulary(model), 2)
    found = run(model, planned, source, capacity_factors=[0.25])
    side = found.sides[1]
    assert side.side.factor == 0.25 and 0 < side.drop_rate < 1

    plan, artifacts = planned
    replace_moe_layers(model, plan, artifacts=artifacts, backend="host", overflow="prune")
    paths = static_paths(model, ("_moe_layer",))
    layers = [limited(path.layer, 0.25, "prune", "router") for path in paths]
    ids: list[np.ndarray] = []
    first = model.layers[0].mlp.switch_mlp._moe_layer
    first.observer = lambda module, layer, x, indices, scores: ids.append(np.array(indices))
    kl = 0.0
    for at in (0, CHUNK):
        tokens = mx.array([source.text[at : at + CHUNK]])
        with all_cold(model):
            reference = log_softmax(model(tokens)[0])
        with with_layers(paths, layers):
            kl += (np.exp(reference) * (reference - log_softmax(model(tokens)[0]))).sum()
    assert side.metrics["text"]["kl"].value == pytest.approx(kl / (2 * CHUNK), rel=1e-3)
    loads = [np.bincount(i.reshape(-1), minlength=8)[list(HOT)] for i in ids[1::2]]
    over = sum(int(np.maximum(load - TIER // 4, 0).sum()) for load in loads)
    assert over > 0 and first.counters.as_dict()["static"]["pruned"] == over


def test_counts_are_of_every_assignment(model: nn.Module, planned: tuple[Any, Path]) -> None:
    source = text(vocabulary(model), 1)
    source.questions = questions(vocabulary(model), 3)  # too few for the static path
    found = run(model, planned, source, capacity_factors=[0.5, 8.0], overflow="spill")
    top_k = model.args.num_experts_per_tok
    for side in found.sides:
        counts = side.side.counts
        parts = sum(counts[name] for name in ("hot", "cold", "spilled", "pruned"))
        rows = sum(len(q.context) + max(map(len, q.choices)) for q in source.questions)
        assert counts["assignments"] == parts > CHUNK * top_k * len(model.layers)
        assert counts["assignments"] < (CHUNK + 8 * rows) * top_k * len(model.layers)
        assert counts["pruned"] == 0 and counts["cold"] > 0
    plan, half, all_fit = (side.side.counts for side in found.sides)
    assert half["spilled"] > plan["spilled"] > all_fit["spilled"] == 0
    assert found.sides[1].metrics["text"]["kl"].value < 1e-3  # spilled: exact but for fp16


def test_random_control_drops_as_many(model: nn.Module, planned: tuple[Any, Path]) -> None:
    for layer in model.layers:  # scores far apart, so that it matters which are dropped
        layer.mlp.gate.weight = layer.mlp.gate.weight * 4
    source = text(vocabulary(model), 2)
    options: Any = {"capacity_factors": [0.25], "random_control": True}
    found = run(model, planned, source, **options)
    by_score, at_random = found.sides[2:]
    assert (by_score.side.random, at_random.side.random) == (False, True)
    assert at_random.drop_rate == pytest.approx(by_score.drop_rate, abs=0.02)
    assert at_random.metrics["text"]["kl"].value > 1.1 * by_score.metrics["text"]["kl"].value


def test_limits_keep_the_most_important() -> None:
    groups = plan_group()
    layer = StaticLayer("layer", None, [groups], 2, 1, "prune")
    ids = np.zeros((40, 1), np.int32)
    importance = np.random.default_rng(0).random(40).astype(np.float32)
    kept = limited(layer, 0.25, "prune", "router").split(ids, importance)
    assert sorted(kept.overflow) == sorted(np.argsort(importance)[: 40 - 8])
    control = limited(layer, 0.25, "prune", "router", seed=3)
    dropped = [control.split(ids, importance).overflow for _ in range(2)]
    assert [len(d) for d in dropped] == [32, 32] and set(dropped[0]) != set(dropped[1])
    over = limited(layer, 1.125, "prune", "router").split(ids, importance)
    assert len(over.tiles) == 2 and len(over.overflow) == 40 - 36


def plan_group() -> Any:
    from mlx_moe.static import Group

    return Group("g", np.array([0], np.int32), (32,), (0,), 1 << 20)


def test_an_evaluation_where_nothing_is_hot_is_refused(
    model: nn.Module, planned: tuple[Any, Path]
) -> None:
    source = Source("few", questions=questions(vocabulary(model), 1))
    with pytest.raises(InvalidArgument, match="no assignment ran on the static executor"):
        run(model, planned, source)
    assert run(model, planned, source, allow_cold=True).sides[0].hot_share == 0.0


def test_a_plan_for_the_kernels_has_no_capacities(
    model: nn.Module, planned: tuple[Any, Path]
) -> None:
    plan = replace(planned[0], executor="cpu")
    source = Source("few", questions=questions(vocabulary(model), 2))
    with pytest.raises(InvalidArgument, match="no capacities"):
        evaluate(model, Numbers(), [source], plan=plan, capacity_factors=[0.5])


def test_stock_classes_are_stock(model: nn.Module) -> None:
    tokens = mx.array([[1, 2, 3, 4]])
    before = np.array(model(tokens))
    replace_moe_layers(model, backend="cpu")
    module = model.layers[0].mlp.switch_mlp
    calls = module._moe_layer.counters.calls
    with stock_classes(model):
        inside = model(tokens)
        mx.eval(inside)
    assert (np.array(inside) == before).all() and module._moe_layer.counters.calls == calls
    assert hasattr(type(module), "_moe_base")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference": "gpu"}, "reference is 'gpu'"),
        ({"tasks": ["sing"]}, "task is 'sing'"),
        ({"capacity_factors": [0.5]}, "give a plan"),
        ({"capacity_factors": [-1.0]}, "not a positive number"),
        ({"random_control": True}, "give a plan"),
        ({"tasks": ["kl"]}, "more than 512 tokens"),
        ({"tasks": ["retrieval"]}, "hides its needles"),
    ],
)
def test_arguments(model: nn.Module, options: Any, message: str) -> None:
    source = Source("few", questions=questions(vocabulary(model), 2))
    with pytest.raises(InvalidArgument, match=message):
        evaluate(model, Numbers(), [source], **options)
    assert not hasattr(type(model.layers[0].mlp.switch_mlp), "_moe_base")
    with pytest.raises(InvalidArgument, match="no questions"):
        evaluate(model, Numbers(), [Source("none")])


def test_a_replaced_model_is_refused(model: nn.Module) -> None:
    replace_moe_layers(model, backend="cpu")
    with pytest.raises(InvalidArgument, match="restore_moe_layers"):
        evaluate(model, Numbers(), [text(vocabulary(model), 1)])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, Path]]:
    """The example model, a plan for it and its artifacts."""
    path = Path(__file__).parent.parent / "examples" / "tiny-qwen3-moe"
    loaded, _ = mlx_lm.load(str(path))
    groups = {
        name: groups_of(name, [range(12), range(12, 24)], [64, 64], 64)
        for name, _ in switches(loaded)
    }
    directory = tmp_path_factory.mktemp("tiny")
    plan = plan_of(loaded, groups, static_from=64)
    plan.save(directory / "plan.json")
    write_artifacts(loaded, plan, directory / "artifacts")
    yield path, directory / "plan.json", directory / "artifacts"


def test_command(tiny: tuple[Path, Path, Path], tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    model, plan, artifacts = tiny
    data = Path(__file__).parent.parent / "examples" / "data"
    items = tmp_path / "items.jsonl"
    items.write_text("\n".join((data / "pydoc.choice.jsonl").read_text().split("\n")[:32]))
    arguments = ["evaluate", "--model", model, "--plan", plan, "--artifacts", artifacts]
    arguments += ["--data", items, data / "code.text.jsonl", "--reference", "cpu", "--json", "-"]
    arguments += ["--tasks", "kl", "choice", "retrieval", "--retrieval-items", 1]
    arguments += ["--retrieval-length", 256, "--text-tokens", 1024, "--overflow", "prune"]
    arguments += ["--capacity-factor", 0.5, 1, "--plot", tmp_path / "plot.png"]
    assert main(list(map(str, arguments))) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert [s["capacity_factor"] for s in report["sides"]] == [None, 0.5, 1.0]
    assert "choice, 32 items of 4" in captured.err and "95 % confidence" in captured.err
    half, whole = report["sides"][1:]
    assert half["drop_rate"] > whole["drop_rate"] and half["hot_share"] < whole["hot_share"]
    assert half["text"]["kl"]["value"] > whole["text"]["kl"]["value"] > 0
    assert 0.5 < whole["choice"]["reference"]["value"] < 1
    assert whole["retrieval"]["items"] == 1 and whole["retrieval"]["length"] == 256
    assert (report["overflow"], report["importance"]) == ("prune", "router")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--capacity-factor", "0.5"], "needs --plan"),
        (["--capacity-factor", "0"], "not a positive number"),
        (["--plan", "p", "--random-control"], "needs --overflow prune"),
        (["--plan", "p", "--plot", "x.png"], "two or more capacity factors"),
    ],
)
def test_wrong_usage(more: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["evaluate", "--model", "m", "--data", "d", *more])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_missing_files_are_one_line(tiny: tuple[Path, Path, Path], capsys: Any) -> None:
    assert main(["evaluate", "--model", str(tiny[0]), "--data", "none.jsonl"]) == 1
    assert capsys.readouterr().err.startswith("mlx_moe: error: none.jsonl: there is no")


def test_whole_rows_are_padded_with_their_own_tokens() -> None:
    asked = [Question((1, 2), ((3,), (4, 5, 6)), 0, (1.0, 1.0))]
    (unit,) = batches(asked, [0], 4096, False)
    seen: list[np.ndarray] = []

    def fake(tokens: mx.array, cache: Any = None) -> mx.array:
        seen.append(np.array(tokens))
        return mx.zeros((*tokens.shape, 10))

    assert isinstance(unit, WholeRows)
    fake.layers = []  # type: ignore[attr-defined]
    found = unit.run(fake)
    assert seen[0].tolist() == [[1, 2, 1, 2], [1, 2, 4, 5]]
    assert found.total.tolist() == pytest.approx([-math.log(10), -3 * math.log(10)])
