"""Lines beneath the table of what ran: of ranks, and of static paths."""

import pytest

from mlx_moe.cli.report import Record, ranks_summary, static_summary
from mlx_moe.stats import Counters, RankCounters, StaticCounters


def records(size: int, *forwards: tuple[int, float, float]) -> list[Record]:
    """Two layers that did these forwards: tokens, seconds, seconds of the sum."""
    found = []
    for _ in range(2):
        counters = Counters("layer", set())
        counters.ranks = RankCounters(size)
        for forward in forwards:
            counters.ranks.add(*forward)
        found.append(Record("layer", (), counters))
    return found


@pytest.mark.parametrize(
    ("size", "forwards", "said", "slower"),
    [
        (2, [(64, 3.0, 1.0)], "2 sums took 2.00 s of the 6.00 s of the experts' layers", False),
        (2, [(64, 3.0, 2.0), (1, 1.0, 0.4)], "4 sums took 4.80 s of the 8.00 s", False),
        (2, [(64, 3.0, 0.0), (1, 1.0, 0.6)], "60% of it at one token: more than 2 ranks", True),
        (3, [(64, 3.0, 0.0), (1, 1.0, 0.6)], "60% of it at one token", False),  # 2/3 is level
        (3, [(1, 1.0, 0.5), (1, 1.0, 1.0)], "75% of it at one token: more than 3 ranks", True),
    ],
)
def test_what_sums_took(
    size: int, forwards: list[tuple[int, float, float]], said: str, slower: bool
) -> None:
    text = ranks_summary(records(size, *forwards))
    assert said in text and ("one process" in text) == slower
    assert ("at one token" in text) == any(tokens == 1 for tokens, *_ in forwards)


def test_without_sums_there_is_no_line() -> None:
    alone = Counters("layer", set())
    assert ranks_summary([Record("layer", (), alone)]) == ranks_summary(records(2)) == ""
    assert "ranks" not in alone.as_dict()
    alone.ranks = RankCounters(2)
    alone.ranks.add(1, 1.0, 0.5)
    assert alone.as_dict()["ranks"]["token_sum_seconds"] == 0.5


@pytest.mark.parametrize("name", ["cold_groups", "nan_importance", "failed_tiles"])
def test_what_is_unusual_is_told(name: str) -> None:
    counters = Counters("layer", set())
    counters.static = StaticCounters("layer", set())
    counters.static.add(forwards=1, hot=8, **{name: 3})
    assert f"3 {name.replace('_', ' ')}" in (static_summary([Record("x", (), counters)]) or "")
