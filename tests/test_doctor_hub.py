"""`mlx_moe doctor` on models of the hub: nothing of the weights is downloaded."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from made_checkpoints import CONFIG, stacked, write_model

from mlx_moe.cli import main
from mlx_moe.doctor import doctor
from mlx_moe.doctor_files import read_model
from mlx_moe.errors import HubError, ModelNotFound

# The hub


def test_a_model_that_is_not_here_while_offline(capsys) -> None:
    """The tests' own HF_HUB_OFFLINE."""
    with pytest.raises(HubError, match="HF_HUB_OFFLINE keeps this offline: give a model directory"):
        doctor("somebody/some-model")
    assert main(["doctor", "somebody/some-model"]) == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["./no/model", "/no/model", "a/b/c", "~/no-model"])
def test_paths_are_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ModelNotFound, match="there is no model directory"):
        read_model(name)


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves one repository from a directory, and counts the bytes of weights it hands out."""

    directory: Path
    served = 0

    def do_HEAD(self) -> None:
        self.answer(head=True)

    def do_GET(self) -> None:
        self.answer(head=False)

    def answer(self, head: bool) -> None:
        match = re.fullmatch(r"/me/model/resolve/main/([\w.-]+)", self.path.partition("?")[0])
        path = self.directory / match[1] if match else None
        if path is None or not path.is_file():
            self.send_response(404)
            missing = "EntryNotFound" if match else "RepoNotFound"
            self.send_header("X-Error-Code", missing)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size = path.stat().st_size
        first, last = 0, size - 1
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
            first, last = int(wanted[1]), min(int(wanted[2]), size - 1)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("ETag", f'"{path.name}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if head:
            return
        if path.suffix == ".safetensors":
            type(self).served += last - first + 1
        with path.open("rb") as file:
            file.seek(first)
            self.wfile.write(file.read(last - first + 1))

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def hub(tmp_path: Path) -> Any:
    Hub.directory, Hub.served = tmp_path / "hub", 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(hub: Any, tmp_path: Path, name: str, **environment: str) -> Any:
    """`mlx_moe doctor NAME` in a process of its own that takes the server for the hub."""
    own = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
    }
    return subprocess.run(
        [sys.executable, "-m", "mlx_moe", "doctor", name, "--json", "-"],
        capture_output=True, text=True, env=os.environ | own | environment, timeout=120,
    )  # fmt: skip


def test_a_model_on_the_hub_is_not_downloaded(hub: Any, tmp_path: Path) -> None:
    large = {"m.weight": ("BF16", [1 << 14, 1 << 14])}
    write_model(Hub.directory, stacked(4) | large)
    ran = ask(hub, tmp_path, "me/model")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)["model"]
    assert found["where"] == "hub" and found["supported"] and found["bytes"] > 500e6
    assert found["experts"][0]["format"] == "affine 4 bits, groups of 64"
    assert 0 < Hub.served < 200_000
    stored = [path.name for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert "model.safetensors" not in stored
    # the second time offline, with what is in the cache: config.json alone is no model
    again = ask(hub, tmp_path, "me/model", HF_HUB_OFFLINE="1")
    assert again.returncode == 1 and "HF_HUB_OFFLINE keeps this offline" in again.stderr


def test_a_downloaded_model_is_read_offline(hub: Any, tmp_path: Path) -> None:
    snapshot = tmp_path / "home" / "hub" / "models--me--model" / "snapshots" / ("0" * 40)
    write_model(snapshot, stacked(4))
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    ran = ask(hub, tmp_path, "me/model", HF_HUB_OFFLINE="1")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["model"]["where"] == "cache" and Hub.served == 0


def test_half_a_download_is_no_model(hub: Any, tmp_path: Path) -> None:
    snapshot = tmp_path / "home" / "hub" / "models--me--model" / "snapshots" / ("0" * 40)
    write_model(snapshot, stacked(4))
    listed = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(listed))
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    ran = ask(hub, tmp_path, "me/model", HF_HUB_OFFLINE="1")
    assert ran.returncode == 1 and "HF_HUB_OFFLINE keeps this offline" in ran.stderr


@pytest.mark.parametrize(
    ("name", "files", "named"),
    [
        ("me/other", ["config.json"], "no such repository on the hub"),
        ("me/model", ["config.json"], "has no safetensors weights"),
        ("me/model", [], "config.json"),
        ("me/mo..del", [], "it is no repository id"),
    ],
)
def test_refusals_of_the_hub(hub: Any, tmp_path: Path, name: str, files, named: str) -> None:
    Hub.directory.mkdir()
    for file in files:
        (Hub.directory / file).write_text(json.dumps(CONFIG))
    ran = ask(hub, tmp_path, name)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    assert ran.stderr.startswith("mlx_moe: error: ") and named in ran.stderr


def test_a_hub_that_does_not_answer(hub: Any, tmp_path: Path) -> None:
    ran = ask(hub, tmp_path, "me/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert ran.returncode == 1 and "the hub cannot be reached" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1  # no traceback, and no word of trying again
