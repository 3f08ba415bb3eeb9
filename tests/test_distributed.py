"""Two ranks over the ring on this machine compute what one process computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
import rank_models
import ranks

import mlx_moe

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
    "model": ("RankMismatch", "the model is"),
    "placement": ("RankMismatch", "the placement of experts is"),
    "twice": ("UnsupportedLayer", "shared over ranks already"),
    "alone": ("InvalidArgument", "restore_moe_layers(model) first"),
    "restore": ("InvalidArgument", "were let go"),
    "training": ("InvalidArgument", "training"),
    "gradient": ("InvalidArgument", "no gradients"),
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
        assert example["held"] <= 0.6 * example["whole"]


def test_only_own_bytes_are_read(found: list[dict[str, Any]]) -> None:
    """Not the other rank's experts; headers and samples are read beside what one process reads."""
    for rank in found:
        example = rank["example"]
        if example["spared"]:  # Linux counts
            assert example["spared"] > 0.7 * (example["whole"] - example["held"])


def test_routing_is_that_of_rank_0(found: list[dict[str, Any]]) -> None:
    """Rank 1's router was negated: it is overruled, and both see that."""
    for rank in found:
        assert rank["disagree"]["sends"]
        assert max(rank["disagree"]["errors"].values()) < F32


def test_models_that_mlx_lm_shards(found: list[dict[str, Any]]) -> None:
    for rank in found:
        sharded = rank["sharded"]
        for how in ("without group", "with group"):
            assert max(sharded[how].values()) < F32
            assert sharded[f"kernels {how}"] == 4  # two layers, two forwards
        assert "2 layers are summed by their own blocks" in sharded["note"]
