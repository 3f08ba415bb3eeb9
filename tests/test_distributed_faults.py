"""A rank that fails ends the others, with an error that says so, within a bounded time."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import commands
import pytest
import ranks

SCRIPT = Path(__file__).parent / "rank_faults.py"
SLACK = 60  # seconds that a busy machine may take to start Python and notice

# ranks, what one of them does, which, timeout in seconds, what another says.
FAULTS = {
    "killed": (3, "kill", 2, 20, "rank 2 ended without a word"),
    "rank 0 killed": (2, "kill", 0, 20, "rank 0 ended without a word"),
    "raises": (2, "raise", 1, 20, "rank 1: ValueError: this rank has a problem"),
    "stopped": (3, "stop", 2, 4, "rank 2 has given no sign of life for 4 s"),
    "elsewhere": (2, "sleep", 1, 4, "did not come to the sum after within 4 s"),
    "leaves": (2, "leave", 1, 20, "rank 1 ended"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_others_end_with_an_error(fault: str, tmp_path: Path) -> None:
    size, how, who, timeout, words = FAULTS[fault]
    begin = time.monotonic()
    command = [sys.executable, str(SCRIPT), how, str(who), str(timeout)]
    processes = ranks.start(size, tmp_path, command)
    others = [process for rank, process in enumerate(processes) if rank != who]
    for process in others:
        process.wait(ranks.LIMIT)
    seconds = time.monotonic() - begin
    processes[who].kill()
    found = ranks.ended(processes, tmp_path, begin)
    assert seconds < SLACK + (timeout if how in ("stop", "sleep") else 0)
    outputs = [end.output for rank, end in enumerate(found) if rank != who]
    assert all("summed" in output for output in outputs)
    assert any(words in output for output in outputs)
    assert [end.code for rank, end in enumerate(found) if rank != who] == [1] * (size - 1)


def test_a_rank_alone_gives_up(tmp_path: Path) -> None:
    """The ring waits for the others for ever; we do not."""
    command = [sys.executable, str(SCRIPT), "none", "0", "1"]
    env = ranks.ring_of(2, tmp_path)[0]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=ranks.LIMIT)
    assert done.returncode == 1 and "the ranks did not meet within 1 s" in done.stderr


def test_command(tiny_model_path: Path, tmp_path: Path) -> None:
    """As a launcher starts it: rank 0 prints what one process prints, rank 1 nothing."""
    arguments = ("generate", "--model", tiny_model_path, "--prompt", "And God said")
    arguments += ("--max-tokens", 4, "--temp", 0.7, "--seed", 4)
    alone = commands.call("mlx_moe", *arguments)
    first, second = ranks.run(2, tmp_path, *commands.command("mlx_moe", *arguments)[1:])
    assert first.code == second.code == 0, first.output + second.output
    assert commands.generated_text(first.output) == commands.generated_text(alone.stdout)
    assert "50.0% on rank 0, 50.0% on rank 1" in first.output
    assert not [line for line in second.output.splitlines() if not line.startswith("[ring]")]


def test_options_that_ranks_cannot_have(tiny_model_path: Path, tmp_path: Path) -> None:
    arguments = ("generate", "--model", tiny_model_path, "--compare", "--prompt", "x")
    for rank in ranks.run(2, tmp_path, *commands.command("mlx_moe", *arguments)[1:]):
        assert rank.code == 1 and "--compare cannot be used on several ranks" in rank.output
