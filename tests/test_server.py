"""The stock mlx-lm server over HTTP, run by `mlx_moe run mlx_lm.server`."""

import json
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from commands import command, write_float32

START_UP = 60  # seconds
PROMPT = "In the beginning"
TOKENS = 16


@dataclass
class Server:
    process: subprocess.Popen
    port: int

    def post(self, path: str, **body: Any) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps({"max_tokens": TOKENS, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=START_UP) as response:
            return response.read().decode()

    def complete(self, prompt: str) -> str:
        return json.loads(self.post("/v1/completions", prompt=prompt))["choices"][0]["text"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_UP
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    server.process.kill()
    raise AssertionError(f"the server did not start: {server.process.communicate()[1]}")


@pytest.fixture(scope="module")
def model(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float32(tiny_model_path, tmp_path_factory.mktemp("float32") / "model")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, str]:
    """Stock's greedy continuations, by prompt."""
    stock, tokenizer = mlx_lm.load(str(model))
    return {
        prompt: mlx_lm.generate(stock, tokenizer, prompt, max_tokens=TOKENS)
        for prompt in (PROMPT, "And the king said unto")
    }


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    port = free_port()
    arguments = ("--stats", "json", "mlx_lm.server", "--model", model, "--port", port)
    process = subprocess.Popen(
        command("mlx_moe", "run", *arguments), stderr=subprocess.PIPE, text=True
    )
    server = Server(process, port)
    try:
        wait_until_healthy(server)
        yield server
    finally:
        process.kill()
        process.wait()


def test_completions_equal_stock(server: Server, expected: dict[str, str]) -> None:
    assert {prompt: server.complete(prompt) for prompt in expected} == expected


def test_concurrent_requests_equal_stock(server: Server, expected: dict[str, str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert dict(zip(expected, pool.map(server.complete, expected), strict=True)) == expected


def test_a_streamed_chat_says_what_an_unstreamed_one_says(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    whole = json.loads(server.post("/v1/chat/completions", **chat))
    text = whole["choices"][0]["message"]["content"]
    streamed = server.post("/v1/chat/completions", stream=True, **chat)
    events = [line[len("data: ") :] for line in streamed.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]" and len(events) > 1
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert whole["usage"]["completion_tokens"] == TOKENS and text


def test_ctrl_c_ends_the_server_with_a_report(server: Server) -> None:  # the last test: it stops it
    server.complete(PROMPT)
    server.process.send_signal(signal.SIGINT)
    _, log = server.process.communicate(timeout=30)
    layers, _ = json.JSONDecoder().raw_decode(log, log.index("[\n"))
    experts = [layer for layer in layers if layer["experts"] == 32]
    # No claim on the exit code: the unwrapped stock server, too, at times aborts as it ends
    # ("terminate called without an active exception").
    assert "Traceback" not in log
    assert "6 MoE layers replaced" in log and len(experts) == 6
    assert all(layer["kernel_calls"] > TOKENS and not layer["fallbacks"] for layer in experts)
