"""`mlx_moe calibrate` as a user runs it: output, errors, Ctrl-C and kill -9."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commands import TIMEOUT, command
from tqdm import tqdm

from mlx_moe import Calibration
from mlx_moe.calibration_state import state_path
from mlx_moe.cli import main

LINE = json.dumps({"text": "In the beginning God created the heaven and the earth. " * 6}) + "\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(LINE * 20)
    return path


def arguments(model: Path, data: Path, out: Path, *more: object) -> list[str]:
    given = ["calibrate", "--model", model, "--data", data, "-o", out, "--chunk-size", 32, *more]
    return list(map(str, given))


def test_writes_a_calibration_and_a_table(
    tiny_model_path: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "c.npz", tmp_path / "c.json"
    assert main(arguments(tiny_model_path, data, out, "--json", report)) == 0
    found = Calibration.load(out)
    assert found.chunk == 32 and max(found.chunk_tokens) == 32
    assert found.sources[0].path == str(data) and found.sources[0].tokens == found.tokens
    assert found.identity.name == "tiny-qwen3-moe" and found.identity.sample is not None
    written = json.loads(report.read_text())
    assert written["tokens"] == found.tokens and len(written["layers"]) == 6
    row = written["layers"][0]
    assert row["assignments"] == int(found.loads(0).sum()) == 4 * found.tokens
    assert 0.2 < row["gini"] < 1 and row["scores"] is True
    printed = capsys.readouterr().out
    assert "model.layers.5.mlp.switch_mlp" in printed and f"{row['gini']:.2f}" in printed
    assert not state_path(out).exists()


def test_the_progress_bars_total_is_of_whole_documents(
    tiny_model_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def update(self, n: float | None = 1) -> bool | None:
            if self.total is not None:  # before the first chunk nobody knows
                totals.append(self.total)
            return super().update(n)

    monkeypatch.setattr("mlx_moe.progress.tqdm", Bar)
    data.write_text(LINE * 3)
    out = tmp_path / "c.npz"
    assert main(arguments(tiny_model_path, data, out)) == 0
    assert len(totals) > 3 and set(totals) == {Calibration.load(out).tokens}


def test_json_to_stdout_is_json(
    tiny_model_path: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c.npz"
    assert main(arguments(tiny_model_path, data, out, "--json", "-", "--max-tokens", 40)) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["tokens"] == 40 and "top quarter" in captured.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--data": "nowhere.txt"}, "nowhere.txt: there is no such file"),
        ({"-o": "nowhere/c.npz"}, "--output nowhere/c.npz: there is no such directory"),
        ({"--model": "nowhere"}, "there is no directory 'nowhere'"),
    ],
)
def test_errors_are_one_line(
    tiny_model_path: Path,
    data: Path,
    tmp_path: Path,
    change: dict[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = arguments(tiny_model_path, data, tmp_path / "c.npz")
    for option, value in change.items():
        given[given.index(option) + 1] = value
    assert main(given) == 1
    assert message in capsys.readouterr().err


def test_a_bad_line_is_named_and_mending_it_goes_on(
    tiny_model_path: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.write_text(LINE * 3 + "{bad}\n" + LINE)
    out, whole = tmp_path / "c.npz", tmp_path / "whole.npz"
    assert main(arguments(tiny_model_path, data, out)) == 1
    assert f"{data}:4: the line is not JSON" in capsys.readouterr().err
    assert state_path(out).exists() and not out.exists()
    data.write_text(LINE * 5)
    assert main(arguments(tiny_model_path, data, out)) == 0
    assert main(arguments(tiny_model_path, data, whole)) == 0
    assert out.read_bytes() == whole.read_bytes()


@pytest.fixture(scope="module")
def whole(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration that nothing stopped; beside it is what it read."""
    out = tmp_path_factory.mktemp("whole") / "c.npz"
    (out.parent / "data.jsonl").write_text(LINE * 20)
    assert main(arguments(tiny_model_path, out.parent / "data.jsonl", out)) == 0
    return out


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_a_stopped_command_goes_on(
    tiny_model_path: Path, whole: Path, tmp_path: Path, end: signal.Signals
) -> None:
    data, out = whole.parent / "data.jsonl", tmp_path / "c.npz"
    # A kill loses what came after the last save: here, every chunk is saved.
    line = command("mlx_moe", *arguments(tiny_model_path, data, out, "--save-every", 0))
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + TIMEOUT
    while not state_path(out).exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(end)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == (130 if end == signal.SIGINT else -signal.SIGKILL), errors
    assert ("interrupted" in errors) == (end == signal.SIGINT)
    assert (f"{state_path(out)} has the counts" in errors) == (end == signal.SIGINT)
    assert state_path(out).exists() and not out.exists()
    assert main(arguments(tiny_model_path, data, out, "--max-tokens", 10_000_000)) == 1  # another
    assert main(arguments(tiny_model_path, data, out)) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["c.npz"]
