"""Commands on a model whose experts stay on disk say what they say with all of them in memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx_lm
import numpy as np
import pytest
from commands import call, command, generated_text
from test_server import PROMPT, TOKENS, Server, free_port, wait_until_healthy

import mlx_moe
from mlx_moe.cache_trace import Trace
from mlx_moe.cli import streaming
from mlx_moe.cli.generate import main as generate
from mlx_moe.cli.run import main as run
from mlx_moe.cli.trace import main as trace
from mlx_moe.errors import InvalidArgument
from mlx_moe.expert_memory import ExpertMemory
from mlx_moe.patch import replaced_models
from mlx_moe.store_counts import ExpertCounts

PROMPTS = (PROMPT, "And the king said unto")
TOTAL = 6 * 32 * 24576  # bytes: layers, experts, and a slot of each


@pytest.fixture(scope="module")
def expected(tiny_model_path: Path) -> dict[str, str]:
    """Greedy continuations with all experts in memory, by prompt."""
    model, tokenizer = mlx_moe.load(tiny_model_path)
    return {p: mlx_lm.generate(model, tokenizer, p, max_tokens=TOKENS) for p in PROMPTS}


@pytest.mark.parametrize("limit", ("100kB", "25%", "100%"))
def test_load(limit: str, tiny_model_path: Path, expected: dict[str, str]) -> None:
    memory = ExpertMemory(limit, counts=False)
    model, tokenizer = mlx_moe.load(tiny_model_path, expert_memory=memory)
    found = {p: mlx_lm.generate(model, tokenizer, p, max_tokens=TOKENS) for p in PROMPTS}
    assert found == expected


def test_generate_and_its_summary(tiny_model_path: Path, expected: dict[str, str]) -> None:
    arguments = ("--model", tiny_model_path, "--prompt", PROMPT, "--max-tokens", TOKENS)
    options = ("--ignore-chat-template", "--expert-memory", "25%", "--expert-policy", "lru")
    ran = call("mlx_moe", "generate", *arguments, *options)
    assert ran.returncode == 0, ran.stderr
    assert generated_text(ran.stdout).strip() == expected[PROMPT].strip()
    assert "experts: at most 1.2 MB of 4.7 MB in memory" in ran.stderr
    assert f"{streaming.STEP_SIZE} tokens at a time" in ran.stderr
    (line,) = (line for line in ran.stderr.splitlines() if line.startswith("expert store: "))
    assert "limit 1.2 MB of 4.7 MB (lru)" in line
    for part in (
        r"\d+ experts asked for, \d+\.\d% in memory",
        r"\d+ of \d+ read ahead were used",
        r"\d+ wasted; [\d.]+ MB read, [\d.]+ s of waiting, \d+ evictions",
    ):
        assert re.search(part, line), line


@pytest.fixture(scope="module")
def server(tiny_model_path: Path) -> Iterator[Server]:
    port = free_port()
    ours = ("--stats", "json", "--expert-memory", "25%")
    stock = ("mlx_lm.server", "--model", tiny_model_path, "--port", port)
    process = subprocess.Popen(
        command("mlx_moe", "run", *ours, *stock), stderr=subprocess.PIPE, text=True
    )
    server = Server(process, port)
    try:
        wait_until_healthy(server)
        yield server
    finally:
        process.kill()
        process.wait()


def test_server(server: Server, expected: dict[str, str]) -> None:
    assert {prompt: server.complete(prompt) for prompt in expected} == expected
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(server.complete, expected))
    assert all(texts)
    server.process.send_signal(signal.SIGINT)
    _, log = server.process.communicate(timeout=30)
    records, _ = json.JSONDecoder().raw_decode(log, log.index("[\n"))
    (store,) = (record for record in records if record["kind"] == "store")
    assert "Traceback" not in log and store["total_bytes"] == TOTAL
    assert 0 < store["resident_bytes"] <= store["limit_bytes"] == TOTAL // 4
    assert store["bytes_read"] > 0 and 0 < store["hit_rate"] < 1


def test_trace(tiny_model_path: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(tiny_model_path), "--prompt", PROMPT, "--max-tokens", "8", "-o"]
    for name, options in (("resident", []), ("stored", ["--expert-memory", "25%"])):
        assert trace([*arguments, str(tmp_path / f"{name}.npz"), *options]) == 0
    found, expected = (Trace.load(tmp_path / f"{name}.npz") for name in ("stored", "resident"))
    assert found.layers == expected.layers and found.identity == expected.identity
    np.testing.assert_array_equal(found.experts, expected.experts)


@pytest.mark.parametrize(
    ("arguments", "says"),
    (
        (["run", "--expert-memory", "1GB", "mlx_lm.fuse", "--model", "m"], "mlx_lm.fuse needs"),
        (["run", "--expert-memory", "1GB", "mlx_lm", "lora", "--model", "m"], "mlx_lm.lora needs"),
        (["generate", "--expert-policy", "lru", "--model", "m"], "goes with --expert-memory"),
    ),
)
def test_what_does_not_go_together(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = {"run": run, "generate": generate}[arguments[0]]
    assert main(arguments[1:]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("text", ("much", "0%", "101%", "-1GB", "0"))
def test_what_is_no_limit(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        generate(["--model", "m", f"--expert-memory={text}"])
    assert "argument --expert-memory: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ("lfv", "pinned", "lfu:", "lfu:0", ""))
def test_what_is_no_policy(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        generate(["--model", "m", "--expert-memory=1GB", f"--expert-policy={text}"])
    assert "argument --expert-policy: policy " in capsys.readouterr().err
    with pytest.raises(InvalidArgument, match="policy"):
        memory = ExpertMemory(1, text)
        replaced_models("auto", lambda _: None, {"expert_memory": memory}).__enter__()


STEP = [streaming.STEP, str(streaming.STEP_SIZE)]


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    (
        ("mlx_lm.server", ["--port", "1"], [*STEP, "--port", "1"]),
        ("mlx_lm", ["server", "--port", "1"], ["server", *STEP, "--port", "1"]),
        ("mlx_lm.chat", ["--prefill-step-size", "7"], ["--prefill-step-size", "7"]),
        ("mlx_lm.generate", ["--prefill-step=7"], ["--prefill-step=7"]),
        ("mlx_lm.server", ["--prefill-response", "7"], [*STEP, "--prefill-response", "7"]),
        ("mlx_lm.perplexity", ["--model", "m"], ["--model", "m"]),
    ),
)
def test_prompts_are_read_in_longer_steps_unless_told(
    command: str, given: list[str], expected: list[str]
) -> None:
    assert streaming.stock_arguments(command, given) == expected


@pytest.mark.parametrize("name", ("generate", "chat", "server", "benchmark"))
def test_a_command_without_such_steps_is_given_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As generate and chat of mlx-lm 0.31."""
    monkeypatch.setattr(streaming, "STEP", "--no-such-step")
    assert streaming.stock_arguments(f"mlx_lm.{name}", ["--model", "m"]) == ["--model", "m"]


GENERATING = """
import sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
import mlx_moe
from mlx_moe import store
from mlx_lm.generate import stream_generate
store.KEEP = 0.0
model, tokenizer = mlx_moe.load(sys.argv[1], expert_memory="10%")
for response in stream_generate(model, tokenizer, "In the beginning", max_tokens=1000000):
    print(response.token, flush=True)
"""


def test_a_run_that_is_killed_leaves_its_counts_whole(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "MLX_MOE_CACHE": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", GENERATING, str(tiny_model_path)],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert process.stdout is not None
    while not list(tmp_path.rglob("*.npz")):  # they are saved beside the forwards
        assert process.stdout.readline()
    for _ in range(3):
        assert process.stdout.readline()
    process.kill()
    process.communicate()
    (path,) = (p for p in tmp_path.rglob("*.npz") if not p.name.startswith("."))
    counts = ExpertCounts.load(path)
    assert len(counts.layers) == 6 and all(uses.any() for uses in counts.uses)
