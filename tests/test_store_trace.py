"""`mlx_moe trace` and `mlx_moe simulate-cache`, and the file between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from routing_record import recorded

from mlx_moe.cache_replay import replay, smallest_budget, warm_set
from mlx_moe.cache_trace import Trace, TracedLayer, TraceRecorder
from mlx_moe.cli import main
from mlx_moe.errors import CorruptFile, InvalidArgument, MemoryLimit
from mlx_moe.store_files import Checkpoint

PROMPT = "In the beginning God created the heaven and the earth."


def small_trace(forwards: int = 60, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    recorder = TraceRecorder([TracedLayer("a", 6, 2, 4096), TracedLayer("b", 5, 2, 8192)])
    recorder.add(0, rng.integers(0, 6, (20, 2)))
    recorder.add(1, rng.integers(0, 5, (20, 2)))
    for i in range(forwards):
        recorder.add(i % 2, rng.choice(5, (1, 2), replace=False))
    return recorder.trace()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """The example model's trace of a prompt, as the command writes it, and its report."""
    model = Path(__file__).parent.parent / "examples" / "tiny-qwen3-moe"
    folder = tmp_path_factory.mktemp("trace")
    out, report = folder / "t.npz", folder / "t.json"
    given = ["trace", "--model", model, "--prompt", PROMPT, "--max-tokens", 12, "-o", out]
    assert main([*map(str, given), "--backend", "stock", "--json", str(report)]) == 0
    return model, out, json.loads(report.read_text())


def test_a_trace_is_what_the_stock_model_was_called_with(traced: Any) -> None:
    path, out, report = traced
    trace = Trace.load(out)
    model, tokenizer = mlx_lm.load(str(path))
    calls: dict[str, list[dict[str, Any]]] = {}
    mx.random.seed(0)
    with recorded(model, calls, weighted=False):
        mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=12)
    names = [layer.name for layer in trace.layers]
    assert names == list(calls) and trace.identity is not None
    for number, name in enumerate(names):
        mine = np.flatnonzero(trace.layer == number)
        # The two may stop at different times: a token is asked for ahead.
        for at, call in zip(mine, calls[name], strict=False):
            experts = trace.experts[trace.offsets[at] : trace.offsets[at + 1]]
            np.testing.assert_array_equal(experts, np.unique(call["ids"]))
            assert trace.tokens[at] == len(call["ids"])
        row = report["layers"][number]
        assert row["forwards"] == len(mine) and row["decoded"] >= 11
    assert abs(len(mine) - len(calls[name])) <= 1


def test_a_trace_knows_what_the_stores_slots_take(traced: Any) -> None:
    from mlx_moe import core
    from mlx_moe.layers import PROJECTIONS
    from mlx_moe.store_files import stored_experts

    path, out, _ = traced
    model, _ = mlx_lm.load(str(path))
    checkpoint = Checkpoint.open(path)
    experts = [
        stored_experts(checkpoint, f"model.layers.{i}.mlp.switch_mlp", layer.mlp.switch_mlp, kind)
        for i, layer in enumerate(model.model.layers)
        for kind in (PROJECTIONS["glu"],)
    ]
    sources = [(x.name, [p.source() for p in x.projections.values()]) for x in experts]
    store = core.Store([str(p) for p in checkpoint.paths], sources, 1 << 20)
    assert store.slot_bytes == [layer.bytes for layer in Trace.load(out).layers]
    assert store.experts == [layer.experts for layer in Trace.load(out).layers]
    store.close()


def test_traces_come_back_from_their_file(tmp_path: Path) -> None:
    trace = small_trace()
    trace.save(tmp_path / "t.npz")
    found = Trace.load(tmp_path / "t.npz")
    assert found.layers == trace.layers and found.identity is None
    for name in ("layer", "tokens", "offsets", "experts"):
        np.testing.assert_array_equal(getattr(found, name), getattr(trace, name))
    with pytest.raises(InvalidArgument, match="no file"):
        Trace.load(tmp_path / "none.npz")
    with pytest.raises(InvalidArgument, match="shape"):
        TraceRecorder(trace.layers).add(0, np.arange(3))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    (
        ("experts", lambda a: a[:-1], r"experts is uint16 \[\d+\]; expected"),
        ("experts", lambda a: np.full_like(a, 77), "out of range"),
        ("experts", lambda a: a[::-1].copy(), "out of range|do not rise"),
        ("layer", lambda a: a + 1, "no such layer"),
        ("tokens", lambda a: a * 0, "without tokens"),
        ("tokens", lambda a: a[1:], r"tokens is int32 \[\d+\]; expected"),
        ("offsets", lambda a: np.r_[a[:1], a[-2:0:-1], a[-1:]], "offsets fall"),
        ("offsets", lambda a: a[::-1].copy(), r"expected uint16 \[0\]"),
        ("layer", lambda a: a.astype(float), r"layer is float64 \[\d+\]; expected int32"),
    ),
)
def test_traces_that_cannot_be_are_refused(
    tmp_path: Path, name: str, change: Any, says: str
) -> None:
    path = tmp_path / "t.npz"
    small_trace().save(path)
    with np.load(path) as file:
        arrays = dict(file)
    arrays[name] = change(arrays[name])
    np.savez(path, **arrays)
    with pytest.raises(CorruptFile, match=says):
        Trace.load(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CorruptFile):
        Trace.load(path)


def test_replays_at_every_budget() -> None:
    trace = small_trace()
    least, total = smallest_budget(trace), int(trace.sizes.sum())
    assert least == 2 * 8192 and total == 6 * 4096 + 5 * 8192
    uses = len(trace.experts)
    for budget in (least, least + 4096, total // 2, total):
        found = {p: replay(trace, budget, p) for p in ("lru", "lfu", "lfu:1", "pinned", "belady")}
        for one in found.values():
            phases = (one.prefill, one.decode)
            assert sum(p.hits + p.misses for p in phases) == uses
            assert found["belady"].bytes_read <= one.bytes_read
            assert one.decode.hits + one.decode.misses == 2 * 60
        if budget == total:
            distinct = {
                (a, b)
                for a, b in zip(
                    np.repeat(trace.layer, np.diff(trace.offsets)), trace.experts, strict=True
                )
            }
            assert {o.prefill.misses + o.decode.misses for o in found.values()} == {len(distinct)}
    with pytest.raises(MemoryLimit, match="one token of a layer takes 16384"):
        replay(trace, least - 1, "lru")
    for wrong in ("best", "lfu:x"):
        with pytest.raises(InvalidArgument, match="polic"):
            replay(trace, least, wrong)


def test_a_warm_set_leaves_room_for_a_token() -> None:
    trace = small_trace()
    counts = np.array([5, 9, 0, 1, 2, 3, 8, 0, 1, 7, 6])
    chosen = warm_set(counts, trace, 2 * 8192 + 8192 + 4096)
    assert chosen == [1, 6]  # 4096 and 8192: the others have no room
    assert warm_set(counts, trace, 2 * 8192) == []


def test_simulate_cache_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_trace().save(tmp_path / "t.npz")
    trace = str(tmp_path / "t.npz")
    given = ["simulate-cache", "--trace", trace, "--budget", "50%", "40000", "4GB", "100%"]
    given += ["--bandwidth", "1GB"]
    assert main([*given, "--json", "-"]) == 0
    out = capsys.readouterr()
    report = json.loads(out.out)
    assert [r["budget"] for r in report["results"][::6]] == [32768, 40000, 65536]  # all, at most
    assert report["decoded_tokens"] == 30 and report["expert_bytes"] == 65536
    for row in report["results"]:
        expected = replay(small_trace(), row["budget"], row["policy"])
        assert row["bytes_read"] == expected.bytes_read
        assert row["hit_rate"] == expected.decode.hit_rate
        seconds = expected.decode.bytes_read / 1e9 / 30
        assert row["read_seconds_per_token"] == pytest.approx(seconds)
        if row["policy"] == report["best"][str(row["budget"])]:
            others = [r for r in report["results"] if r["budget"] == row["budget"]]
            tried = [r["bytes_read"] for r in others if r["policy"] not in ("pinned", "belady")]
            assert row["bytes_read"] == min(tried)
    assert "belady" in out.err and "reads least" in out.err
    assert main(["simulate-cache", "--trace", trace]) == 0
    assert capsys.readouterr().out.count("belady") == 4  # 10 % would not do


def test_simulate_cache_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    small_trace().save(tmp_path / "t.npz")
    picture = tmp_path / "hits.png"
    assert main(["simulate-cache", "--trace", str(tmp_path / "t.npz"), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    (
        (["--trace", "none.npz"], "no file"),
        (["--trace", "t.npz", "--budget", "1000"], "one token of a layer"),
        (["--trace", "t.npz", "--policy", "best"], "unknown policy"),
        (["--trace", "t.npz", "--json", "none/x.json"], "no such directory"),
        (["--trace", "other.npz"], "other.npz"),
    ),
)
def test_simulate_cache_says_what_is_wrong(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    small_trace().save("t.npz")
    Path("other.npz").write_bytes(b"PK nothing")
    assert main(["simulate-cache", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("mlx_moe: error: ") and says in error


def test_trace_says_what_is_wrong(
    tmp_path: Path, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "t.npz")
    model = str(tiny_model_path)
    for arguments, says in (
        (["--model", model, "--data", str(tmp_path / "none.txt"), "-o", out], "no such file"),
        (["--model", model, "--prompt", "a", "-o", str(tmp_path / "no" / "t")], "no such dir"),
        (["--model", str(tmp_path / "none"), "--prompt", "a", "-o", out], "none"),
        (["--model", model, "--prompt", "", "-o", out], "no token"),
    ):
        assert main(["trace", *arguments]) == 1
        error = capsys.readouterr().err
        assert "mlx_moe: error: " in error and says in error
    assert not Path(out).exists()
