"""One rule for progress bars: on stderr, after two seconds, whether or not that is a terminal."""

import re
from pathlib import Path

import pytest

import mlx_moe
from mlx_moe.progress import PROGRESS_AFTER, progress_bar

SOURCES = sorted(Path(mlx_moe.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize(
    ("shown", "seconds", "visible"),
    [(True, PROGRESS_AFTER - 0.1, False), (True, PROGRESS_AFTER + 0.1, True), (False, 60.0, False)],
)
def test_a_bar_shows_after_two_seconds_where_there_is_no_terminal(
    shown: bool,
    seconds: float,
    visible: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 1000.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    with progress_bar(shown, total=2, unit="batch") as bar:
        now += seconds
        bar.update()
    printed = capsys.readouterr()
    assert printed.out == "" and ("1/2" in printed.err) == visible


def test_it_can_show_before_its_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress_bar(delay=0, iterable=[3, 4], desc="preparing")) == [3, 4]
    assert "preparing" in capsys.readouterr().err


def test_no_other_module_makes_bars() -> None:
    own = [path.name for path in SOURCES if re.search(r"\btqdm[.(]", path.read_text())]
    assert own == ["progress.py"]
