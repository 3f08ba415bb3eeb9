"""Two ranks over the ring on this machine compute what one process computes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import numpy as np
import pytest
import rank_models
import ranks
from families import FAMILIES, build, switches
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU
from stored_models import save

import mlx_moe
from mlx_moe.distributed import Ranks, join, ranks_of
from mlx_moe.distributed_layer import matching_rows
from mlx_moe.distributed_weights import Cut, InMemory
from mlx_moe.errors import ExpertsOnDisk, InvalidArgument, RankLost
from mlx_moe.store_files import Checkpoint
from mlx_moe.store_names import loaded

F32 = 1e-6  # relative error: another order of the sums


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one run says."""
    folder = tmp_path_factory.mktemp("ranks")
    here = Path(__file__).parent
    example = here.parent / "examples" / "tiny-qwen3-moe"
    for rank in ranks.run(2, folder, here / "rank_models.py", folder, example):
        assert rank.code == 0, rank.output
    return [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", rank_models.CASES)
def test_output_is_that_of_one_process(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        assert max(rank["cases"][case]["errors"].values()) < F32
    assert found[0]["cases"][case]["bits"] == found[1]["cases"][case]["bits"]


@pytest.mark.parametrize("case", rank_models.CASES)
def test_each_rank_holds_its_part(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        assert 0.4 <= rank["cases"][case]["share"] <= 0.6
        assert (rank["cases"][case]["kernels"] > 0) == case.startswith(
            ("fused", "biases", "two", "nvfp4")
        )
        assert rank["cases"][case].get("restored", True)


def test_what_is_cut(found: list[dict[str, Any]]) -> None:
    """Inner features are 128; the hottest expert of `auto` is halved, others stay whole."""
    for rank in found:
        assert rank["cases"]["fused, whole experts"]["widths"] == [128]
        assert rank["cases"]["fused, slices"]["widths"] == [64]
        assert rank["cases"]["fused, some of each, 4-bit"]["widths"] == [64, 128]


REFUSED = {
    "plan": ("InvalidArgument", "plan and group"),
    "group": ("InvalidArgument", "mx.distributed.init()"),
    "options": ("RankMismatch", "split is 'all' on rank 0 and 'none' on rank 1"),
    "backend": ("RankMismatch", "the backend is 'cpu' on rank 0 and 'stock' on rank 1"),
    "model": ("RankMismatch", "the model is"),
    "placement": ("RankMismatch", "the placement of experts is"),
    "twice": ("UnsupportedLayer", "shared over ranks already"),
    "alone": ("InvalidArgument", "restore_moe_layers(model) first"),
    "restore": ("InvalidArgument", "were let go"),
    "training": ("InvalidArgument", "training"),
    "gradient": ("InvalidArgument", "no gradients"),
    "gradient of a graph": ("InvalidArgument", "no gradients"),
    "changed": ("InvalidArgument", "after the experts"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(found: list[dict[str, Any]], what: str) -> None:
    kind, words = REFUSED[what]
    for rank in found:
        message = rank["refusals"][what]
        assert message.startswith(f"{kind}: ") and words in message


def test_example_model(found: list[dict[str, Any]], tiny_model_path: Path) -> None:
    model, tokenizer = mlx_moe.load(tiny_model_path)
    text = mlx_lm.generate(model, tokenizer, "In the beginning", max_tokens=6)
    for rank in found:
        example = rank["example"]
        assert example["text"] == text
        assert text.startswith(example["text of a graph"]) and example["text of a graph"]
        assert example["held"] <= 0.6 * example["whole"]


def test_only_own_bytes_are_read(found: list[dict[str, Any]]) -> None:
    """Not the other rank's experts; headers and samples are read beside what one process reads."""
    for rank in found:
        example = rank["example"]
        if example["spared"]:  # Linux counts
            assert example["spared"] > 0.7 * (example["whole"] - example["held"])


@pytest.mark.parametrize("case", rank_models.DISAGREE)
def test_routing_is_that_of_rank_0(found: list[dict[str, Any]], case: str) -> None:
    """Rank 1's router was negated: it is overruled, and both see that. Where blocks weigh the
    experts' outputs themselves, rank 1 has other results; rank 0's do not depend on them."""
    weighs_itself = rank_models.CASES[case][0] == "gpt_oss"
    for rank in found[: 1 if weighs_itself else 2]:
        assert rank["disagree"][case]["sends"]
        assert max(rank["disagree"][case]["errors"].values()) < F32


def test_scores_meet_their_experts(found: list[dict[str, Any]]) -> None:
    """Rank 0's experts in another order; in the second row one that this rank did not choose."""
    ids, own = np.array([[5, 2, 7], [1, 2, 3]]), np.array([[7, 5, 2], [3, 4, 1]])
    assert matching_rows(ids, own).tolist() == [2, 0, 1, 5, 4, 3]
    for rank in found:
        assert max(rank["other order"].values()) < F32


def test_layers_replaced_before(found: list[dict[str, Any]]) -> None:
    """Their kernels are counted, training mode of then does not keep parts from them, and experts
    that cannot be cut are named."""
    for rank in found:
        assert min(rank["replaced before"]["kernels"]) > 0
        assert "experts of 2 layers stay whole: the 128 inner" in rank["replaced before"]["note"]


def test_time_in_sums_is_counted(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for counts in rank["replaced before"]["ranks"]:  # a prompt and a token
            assert (counts["size"], counts["sums"], counts["token_sums"]) == (2, 2, 1)
            for of in ("", "token_"):
                assert 0 < counts[f"{of}sum_seconds"] < counts[f"{of}seconds"]
            assert counts["token_seconds"] < counts["seconds"]


def test_one_slice_is_a_copy() -> None:
    """A view would keep all experts in memory, and the kernels do not read its columns."""
    module = SwitchGLU(64, 4096, 4)
    mx.eval(module.parameters())
    whole = mx.get_active_memory()
    cut = Cut(slice(None), slice(1024, 2048))
    array = InMemory(module).stack("down_proj", "weight", [(2, cut)])
    wanted = np.array(module.down_proj.weight)[2:3, :, 1024:2048]
    assert np.array_equal(np.array(array), wanted)
    mlx_moe.core.Matrix(weight=array)
    del module
    assert mx.get_active_memory() < whole / 4


def test_transformed_experts_are_let_go(tmp_path: Path) -> None:
    """What a loader computes is not kept once this rank's part is cut out of it."""
    family = next(f for f in FAMILIES if f.name == "llama4")
    model = build(family)
    for _, switch in switches(model):
        switch.gate_proj.weight = mx.zeros((8, 1024, 64))
        switch.up_proj.weight = mx.zeros((8, 1024, 64))
        switch.down_proj.weight = mx.zeros((8, 64, 1024))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text("{}")
    files = Checkpoint.open(tmp_path)
    model.sanitize = lambda arrays: {n: a + 0 for n, a in arrays.items()}
    model.load_weights(list(loaded(model, files).items()))
    del weights
    before = mx.get_active_memory()
    replacement = mlx_moe.replace_moe_layers(
        model, group=Ranks(mx.distributed.init()), checkpoint=tmp_path
    )
    held = sum(row._layer.ranked.nbytes for row in replacement.layers)
    assert mx.get_active_memory() - before < 1.3 * held


def test_what_ranks_hold_is_neither_saved_nor_changed(tmp_path: Path) -> None:
    model = build(next(f for f in FAMILIES if f.name == "qwen3_moe"))
    folder, group = save(model, tmp_path / "model"), Ranks(mx.distributed.init())
    replacement = mlx_moe.replace_moe_layers(model, group=group, checkpoint=folder)
    before = tree_flatten(model.parameters())
    for change in (
        lambda: mlx_lm.utils.save_model(tmp_path, model, donate_model=True),
        lambda: model.save_weights(str(tmp_path / "w.npz")),
        lambda: model.set_dtype(mx.float16),
    ):
        with pytest.raises(ExpertsOnDisk, match="on other ranks"):
            change()
    now = tree_flatten(model.parameters())
    assert all(a is b for (_, a), (_, b) in zip(now, before, strict=True))
    replacement.restore()
    model.set_dtype(mx.float16)
    assert {a.dtype for _, a in tree_flatten(model.parameters())} == {mx.float16}


def test_models_that_mlx_lm_shards(found: list[dict[str, Any]]) -> None:
    for rank in found:
        sharded = rank["sharded"]
        for how in ("without group", "with group"):
            assert max(sharded[how].values()) < F32
            assert sharded[f"kernels {how}"] == 4  # two layers, two forwards
        assert "2 layers are summed by their own blocks" in sharded["note"]


def test_models_of_one_group_share_its_watch(found: list[dict[str, Any]]) -> None:
    assert [rank["watches"] for rank in found] == [2, 2]


def test_others_that_mlx_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MPI starts ranks, with an MLX that has no MPI: they would all do everything."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert join() is None
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(RankLost, match="one of several ranks"):
        join()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_timeouts(monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(InvalidArgument, match="timeout"):
        join(timeout=timeout)


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread that watches, and no socket of it."""
    group = mx.distributed.init()
    monkeypatch.setattr(Ranks, "agree", _fails)
    monkeypatch.setattr("mlx.core.distributed.Group.size", lambda _: 2)
    with pytest.raises(RankLost):
        Ranks(group)
    for thread in threading.enumerate():
        if thread.name == "mlx_moe ranks":
            thread.join(5)
            assert not thread.is_alive()


def test_ranks_are_made_once_a_group() -> None:
    first, second = mx.distributed.init(), mx.distributed.init()
    ranks = ranks_of(first)
    assert ranks_of(first) is ranks and ranks_of(ranks) is ranks
    assert ranks_of(second) is not ranks and ranks_of(second).group is second
    ranks.close()
    assert ranks_of(first) is not ranks
    with pytest.raises(InvalidArgument, match="init"):
        ranks_of("ring")


def _fails(*_: Any) -> None:
    raise RankLost("for the test")
