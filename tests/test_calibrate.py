"""Counting: against brute force on stock models of every family, and going on after a stop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from families import FAMILIES, VOCAB, Family, build, switches
from routing_record import assert_quantiles, record

import mlx_moe
from mlx_moe import Calibration, InvalidArgument, NoMoELayers, calibrate
from mlx_moe.calibration_state import read_npz, state_path, write_npz
from mlx_moe.counting import LayerCounts
from mlx_moe.errors import BadData, CorruptFile, IdentityMismatch

CHUNK = 16
BY_NAME = {family.name: family for family in FAMILIES}
LONGCAT = [f for f in FAMILIES if f.name == "longcat_flash"]


def documents(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def counted(call: dict[str, Any]) -> list[tuple[int, list[int]]]:
    """(token, its experts) of a recorded call, those of weight zero left out."""
    scores = call.get("scores", np.ones(call["ids"].shape))
    return [
        (t, [int(e) for e, s in zip(ids, row, strict=True) if s != 0])
        for t, (ids, row) in enumerate(zip(call["ids"], scores, strict=True))
    ]


def brute_force(calls: list[dict[str, Any]], experts: int) -> dict[str, Any]:
    """Loads, pairs, and every norm and score by expert, one assignment at a time."""
    loads = np.zeros((len(calls), experts), int)
    pairs = np.zeros((experts, experts), int)
    norms: list[list[float]] = [[] for _ in range(experts)]
    scores: list[list[float]] = [[] for _ in range(experts)]
    for c, call in enumerate(calls):
        for t, chosen in counted(call):
            for e in chosen:
                loads[c, e] += 1
                norms[e].append(call["norms"][t])
                if "scores" in call:
                    slot = [i for i, s in enumerate(call["scores"][t]) if call["ids"][t, i] == e]
                    scores[e].append(max(call["scores"][t, i] for i in slot))
                for other in chosen:
                    pairs[e, other] += 1
    return {"loads": loads, "pairs": pairs, "norms": norms, "scores": scores}


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_counts_of_every_family_are_those_of_stock_calls(family: Family) -> None:
    texts = documents(24, 9)
    model = build(family)
    scored = family.path == "fused"
    calls = record(model, texts, CHUNK, weighted=scored)
    classes = [type(module) for _, module in model.named_modules()]
    found = calibrate(model, texts, chunk=CHUNK)
    assert [type(module) for _, module in model.named_modules()] == classes
    assert found.chunk_tokens == [16, 8, 9] and found.tokens == 33
    assert [layer.name for layer in found.layers] == sorted(
        calls, key=[n for n, _ in switches(model)].index
    )
    for i, layer in enumerate(found.layers):
        assert layer.family == family.name or layer.family in type(model).__module__
        if family.name == "longcat_flash":
            continue  # its zero experts: below
        expected = brute_force(calls[layer.name], layer.experts)
        assert layer.top_k == family.top_k
        np.testing.assert_array_equal(found.loads(i), expected["loads"])
        np.testing.assert_array_equal(found.coactivation(i), expected["pairs"])
        assert_quantiles(found.norm_quantiles(i), expected["norms"])
        assert np.isnan(found.score_quantiles(i)).all() != scored
        if scored:
            assert_quantiles(found.score_quantiles(i), expected["scores"])


@pytest.mark.parametrize("family", LONGCAT, ids=str)
def test_zero_experts_do_not_count(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    texts = documents(40)
    chosen: list[tuple[Any, Any]] = []  # as the router gives them, in the order of the layers
    router = type(model.model.layers[0].mlp.router)
    stock = router.__call__

    def recording(self: Any, x: mx.array) -> Any:
        ids, scores = stock(self, x)
        chosen.append((np.array(ids).reshape(-1, 3), np.array(scores).reshape(-1, 3)))
        return ids, scores

    with monkeypatch.context() as patch:
        patch.setattr(router, "__call__", recording)
        calls = record(model, texts, 64, weighted=False)
    found = calibrate(model, texts, chunk=64)
    assert type(model.model.layers[0].mlp.router) is router
    dropped = 0
    for i, (layer, (ids, scores)) in enumerate(zip(found.layers, chosen, strict=True)):
        call = {**calls[layer.name][0], "scores": np.where(ids < layer.experts, scores, 0)}
        expected = brute_force([call], layer.experts)
        dropped += int((ids >= layer.experts).sum())
        np.testing.assert_array_equal(found.loads(i), expected["loads"])
        np.testing.assert_array_equal(found.coactivation(i), expected["pairs"])
        assert_quantiles(found.score_quantiles(i), expected["scores"])
        assert found.loads(i).sum() == (ids < layer.experts).sum() < ids.size
    assert dropped > 0


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "longcat_flash"])
@pytest.mark.parametrize("before", ["stock", "replaced"])
@pytest.mark.parametrize("backend", ["stock", "cpu"])
def test_layers_are_left_as_found(name: str, before: str, backend: str) -> None:
    if name not in BY_NAME:
        pytest.skip(f"this mlx-lm has no {name}")
    texts = documents(20)
    model = build(BY_NAME[name])
    expected = calibrate(model, texts, chunk=CHUNK)
    if before == "replaced":
        mlx_moe.replace_moe_layers(model, backend="cpu")
    model.train()
    modules = dict(model.named_modules())
    state = {n: (type(m), m.training, set(m.__dict__)) for n, m in modules.items()}
    found = calibrate(model, texts, chunk=CHUNK, backend=backend)
    assert {n: (type(m), m.training, set(m.__dict__)) for n, m in modules.items()} == state
    for _, module in switches(model):
        layer = module.__dict__.get("_moe_layer")
        assert (layer is not None) == (before == "replaced")
        assert layer is None or layer.observer is None
    assert_same(found, expected)


def test_a_failed_run_leaves_the_model_as_found() -> None:
    model = build(BY_NAME["qwen3_moe"])
    classes = [type(module) for _, module in model.named_modules()]

    def failing() -> Any:
        yield documents(20)[0]
        raise RuntimeError("data went away")

    with pytest.raises(RuntimeError, match="went away"):
        calibrate(model, failing(), chunk=CHUNK)
    assert [type(module) for _, module in model.named_modules()] == classes


def assert_same(found: Calibration, expected: Calibration) -> None:
    assert found.chunk_tokens == expected.chunk_tokens and found.layers == expected.layers
    for a, b in zip(found.statistics, expected.statistics, strict=True):
        for name in ("loads", "coactivation", "score_quantiles", "norm_quantiles"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


# Documents and their lengths


def test_documents_are_cut_and_tokens_limited() -> None:
    model = build(BY_NAME["qwen3_moe"])
    text = documents(50)[0]
    found = calibrate(model, [text], chunk=CHUNK, max_document=20, max_tokens=45)
    assert found.chunk_tokens == [16, 4, 16, 4, 5]
    parts = calibrate(model, [text[:20], text[20:40], text[40:45]], chunk=CHUNK)
    assert_same(found, parts)
    assert found.sources[0].tokens == 45


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3]),
        mx.array([1, 2, 3]),
        [[1, 2, 3]],
        iter([[1, 2, 3]]),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_forms_of_tokens(tokens: Any) -> None:
    found = calibrate(build(BY_NAME["qwen3_moe"]), tokens)
    assert found.chunk_tokens == [3] and found.sources[0].tokens == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 0}, "chunk is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_document": -1}, "max_document is -1"),
        ({"out": "/nowhere/at/all.npz"}, "no such directory"),
        ({"tokens": [[0.5]]}, "expected token ids"),
        ({"backend": "gpu"}, "backend is 'gpu'"),
    ],
    ids=lambda value: str(value),
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        calibrate(build(BY_NAME["qwen3_moe"]), **{"tokens": [[1, 2]], **options})


def test_a_directory_that_cannot_be_written_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(InvalidArgument, match="its directory cannot be written in"):
        calibrate(nn.Module(), [[1, 2]], out=tmp_path / "c.npz")


def test_no_tokens_and_no_experts() -> None:
    with pytest.raises(BadData, match="no tokens"):
        calibrate(build(BY_NAME["qwen3_moe"]), [[]])
    with pytest.raises(NoMoELayers):
        calibrate(nn.Linear(4, 4), [[1]])


# Going on after a stop


class Stopping:
    """Lists of tokens that stop short with an exception, as Ctrl-C or a bad line would."""

    def __init__(self, texts: list[list[int]], after: int, error: type[BaseException]):
        self.texts, self.after, self.error = texts, after, error

    def __iter__(self) -> Any:
        yield from self.texts[: self.after]
        raise self.error


TEXTS = documents(40, 7, 33, 20, 16, seed=2)


def whole(path: Path) -> bytes:
    calibrate(build(BY_NAME["qwen2_moe"]), TEXTS, chunk=CHUNK, out=path)
    return path.read_bytes()


@pytest.mark.parametrize("after", [1, 2, 3, 5])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_going_on_ends_as_one_whole_run(
    tmp_path: Path, after: int, error: type[BaseException]
) -> None:
    out = tmp_path / "c.npz"
    model = build(BY_NAME["qwen2_moe"])
    with pytest.raises(error):
        calibrate(model, Stopping(TEXTS, after, error), chunk=CHUNK, out=out)
    assert state_path(out).exists() and not out.exists()
    ran = Forwards(model)
    calibrate(model, TEXTS, chunk=CHUNK, out=out)
    left = sum(-(-len(text) // CHUNK) for text in TEXTS[after:])
    assert ran.count == left
    assert out.read_bytes() == whole(tmp_path / "whole.npz")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.npz", "whole.npz"]


class Forwards:
    """How often a model was called from now on."""

    def __init__(self, model: nn.Module):
        self.count, base = 0, type(model)

        def __call__(inner: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return base.__call__(inner, *args, **kwargs)

        body = {"__call__": __call__, "__module__": base.__module__}
        model.__class__ = type(base.__name__, (base,), body)


@pytest.mark.parametrize("call", range(1, 21))
def test_an_interrupt_at_any_layer_of_any_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """In the middle of documents and chunks, and before a document's first chunk is counted."""
    out = tmp_path / "c.npz"
    model = build(BY_NAME["qwen2_moe"])
    stage, calls = LayerCounts.stage, 0

    def interrupting(self: LayerCounts, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        stage(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LayerCounts, "stage", interrupting)
        with pytest.raises(KeyboardInterrupt):
            calibrate(model, TEXTS, chunk=CHUNK, out=out)
    assert state_path(out).exists() == (call > 2)
    calibrate(model, TEXTS, chunk=CHUNK, out=out)
    assert out.read_bytes() == whole(tmp_path / "whole.npz")


class Killed(BaseException):
    """Stands for kill -9: nothing may be written after it."""


@pytest.mark.parametrize("forward", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("save_every", [0.0, 1e9])
def test_a_kill_loses_what_came_after_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forward: int, save_every: float
) -> None:
    out = tmp_path / "c.npz"
    model = build(BY_NAME["qwen2_moe"])
    stage, calls = LayerCounts.stage, 0

    def killing(self: LayerCounts, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2 * forward:  # in the second layer: the first has counted this chunk already
            monkeypatch.setattr("mlx_moe.calibration_run.save_state", lambda *_: None)
            raise Killed
        stage(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LayerCounts, "stage", killing)
        with pytest.raises(Killed):
            calibrate(model, TEXTS, chunk=CHUNK, out=out, save_every=save_every)
    monkeypatch.undo()
    kept = save_every == 0 and forward > 1
    assert state_path(out).exists() == kept
    calibrate(model, TEXTS, chunk=CHUNK, out=out)
    assert out.read_bytes() == whole(tmp_path / "whole.npz")


def interrupted(path: Path, **options: Any) -> nn.Module:
    model = build(BY_NAME["qwen2_moe"])
    with pytest.raises(KeyboardInterrupt):
        tokens = Stopping(TEXTS, 3, KeyboardInterrupt)
        calibrate(model, tokens, out=path, **{"chunk": CHUNK, **options})
    return model


def test_another_run_does_not_go_on(tmp_path: Path) -> None:
    out = tmp_path / "c.npz"
    model = interrupted(out)
    before = state_path(out).read_bytes()
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"chunk": 8}, InvalidArgument, "chunk 16"),
        ({"max_document": 99}, InvalidArgument, "max_document 4096"),
        ({"max_tokens": 99}, InvalidArgument, "max_tokens None"),
        ({"tokens": documents(40, 7, 33, seed=3)}, InvalidArgument, "other data"),
        ({"tokens": TEXTS[:2]}, InvalidArgument, "other data"),
        ({"model": build(BY_NAME["qwen3_moe"])}, IdentityMismatch, "'qwen2_moe'.*'qwen3_moe'"),
    ]
    for change, error, message in refused:
        given = {"model": model, "tokens": TEXTS, "chunk": CHUNK, **change}
        with pytest.raises(error, match=message):
            calibrate(given.pop("model"), given.pop("tokens"), out=out, **given)
        assert state_path(out).read_bytes() == before and not out.exists()
    calibrate(model, TEXTS[:2], chunk=8, out=out, resume=False)
    assert Calibration.load(out).chunk == 8 and not state_path(out).exists()


@pytest.mark.parametrize("cut", [0, 10, 1000, -10])
def test_a_damaged_state_is_refused(tmp_path: Path, cut: int) -> None:
    out = tmp_path / "c.npz"
    model = interrupted(out)
    state = state_path(out)
    state.write_bytes(state.read_bytes()[:cut])
    with pytest.raises(CorruptFile, match=r"c\.npz\.partial"):
        calibrate(model, TEXTS, chunk=CHUNK, out=out)


@pytest.mark.parametrize(
    "change",
    [
        lambda meta, _: meta["progress"].update(documents="x"),
        lambda meta, _: meta["progress"].update(chunks=99),
        lambda meta, _: meta["progress"].update(source_tokens=None),
        lambda meta, _: meta["progress"].update(top_k=[]),
        lambda meta, _: meta["progress"]["chunk_tokens"].__setitem__(0, 1),
        lambda _, arrays: arrays.update({"loads.0": np.zeros(8, np.uint32)}),
    ],
)
def test_a_changed_state_is_refused(tmp_path: Path, change: Any) -> None:
    out = tmp_path / "c.npz"
    model = interrupted(out)
    meta, lazy = read_npz(state_path(out), "mlx_moe.calibration-state", 1)
    arrays = dict(lazy)
    change(meta, arrays)
    write_npz(state_path(out), meta, arrays)
    with pytest.raises(CorruptFile, match=r"c\.npz\.partial cannot be gone on from"):
        calibrate(model, TEXTS, chunk=CHUNK, out=out)


def test_the_public_name_is_the_function_whatever_was_imported() -> None:
    import mlx_moe.calibration_run
    import mlx_moe.cli.calibrate

    assert callable(mlx_moe.calibrate)
