"""hf:// addresses, against a hub that is a directory of this machine."""

import fnmatch
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError

from mlx_moe import hub
from mlx_moe.errors import HubError, InvalidArgument
from mlx_moe.hub import HubPath


class FakeHub:
    """Repositories as directories ROOT/type/user/name/revision, and what was asked of them."""

    def __init__(self, root: Path):
        self.root = root
        self.fail: Exception | None = None

    def place(self, repo: str, repo_type: str, revision: str | None) -> Path:
        if self.fail:
            raise self.fail
        return self.root / repo_type / repo / (revision or "main")

    def hf_hub_download(
        self, repo_id: str, filename: str, *, revision: Any, repo_type: str, local_dir: Path
    ) -> str:
        source = self.place(repo_id, repo_type, revision) / filename
        if not source.is_file():
            raise EntryNotFoundError(f"404: no {filename} in {repo_id}")
        target = Path(local_dir) / filename
        target.parent.mkdir(parents=True, exist_ok=True)
        return str(shutil.copy(source, target))

    def snapshot_download(
        self, repo_id: str, *, allow_patterns: Any, revision: Any, repo_type: str, local_dir: Path
    ) -> str:
        source = self.place(repo_id, repo_type, revision)
        for file in source.rglob("*"):
            name = file.relative_to(source).as_posix()
            wanted = allow_patterns is None or any(fnmatch.fnmatch(name, p) for p in allow_patterns)
            if file.is_file() and wanted:
                self.hf_hub_download(
                    repo_id, name, revision=revision, repo_type=repo_type, local_dir=local_dir
                )
        return str(local_dir)

    def create_repo(self, repo_id: str, *, repo_type: str, exist_ok: bool) -> None:
        self.place(repo_id, repo_type, None).mkdir(parents=True, exist_ok=exist_ok)

    def upload_file(
        self, *, path_or_fileobj: Path, path_in_repo: str, repo_id: str, **where: Any
    ) -> None:
        target = self.place(repo_id, **where) / path_in_repo
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path_or_fileobj, target)

    def upload_folder(
        self,
        *,
        folder_path: Path,
        path_in_repo: str | None,
        ignore_patterns: list[str],
        delete_patterns: list[str],
        repo_id: str,
        **where: Any,
    ) -> None:
        target = self.place(repo_id, **where) / (path_in_repo or "")
        for file in list(target.rglob("*")) if target.exists() else []:
            name = file.relative_to(target).as_posix()
            if file.is_file() and any(fnmatch.fnmatch(name, p) for p in delete_patterns):
                file.unlink()
        for file in Path(folder_path).rglob("*"):
            name = file.relative_to(folder_path).as_posix()
            if file.is_file() and not any(fnmatch.fnmatch(name, p) for p in ignore_patterns):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target / name)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = FakeHub(tmp_path / "hub")
    for name in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(huggingface_hub, name, getattr(made, name))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    return made


@pytest.mark.parametrize(
    "uri, expected",
    [
        ("hf://me/plans/a/plan.json", HubPath("me/plans", "a/plan.json")),
        ("hf://me/plans/plan.json@v2", HubPath("me/plans", "plan.json", "v2")),
        ("hf://me/plans@v2/plan.json", HubPath("me/plans", "plan.json", "v2")),
        ("hf://me/plans/m2-max/", HubPath("me/plans", "m2-max")),
        ("hf://me/plans", HubPath("me/plans", "")),
        ("hf://datasets/me/cal/c.npz", HubPath("me/cal", "c.npz", None, "dataset")),
    ],
)
def test_addresses(uri: str, expected: HubPath) -> None:
    assert HubPath.parse(uri) == expected
    assert HubPath.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "uri",
    [
        *("hf://me", "hf://", "hf:///x/y", "me/plans/p.json", "hf://me/../p.json"),
        *(
            "hf://a@1/b@2/c",
            "hf://me/plans/p.json@..",
            "hf://me/plans//p.json",
            "hf://me/plans/p.json@",
        ),
    ],
)
def test_other_addresses_are_refused(uri: str) -> None:
    with pytest.raises(InvalidArgument, match="expected hf://user/repo/path@revision"):
        HubPath.parse(uri)


def test_a_path_is_left_as_it_is(fake: FakeHub) -> None:
    fake.fail = AssertionError("the hub was asked")
    assert hub.resolve("some/plan.json") == Path("some/plan.json")
    with hub.output("some/plan.json") as path:
        assert path == Path("some/plan.json")


@pytest.mark.parametrize("address", ["hf://me/plans/a/plan.json", "hf://datasets/me/p/c.npz@v2"])
def test_a_file_goes_there_and_comes_back(address: str, fake: FakeHub, tmp_path: Path) -> None:
    with hub.output(address) as path:
        path.write_text("first")
    assert not path.exists()
    read = hub.resolve(address)
    assert read.read_text() == "first" and not read.is_symlink()
    with hub.output(tmp_path / "kept.json", upload_to=address) as path:
        path.write_text("second")
    assert path.read_text() == hub.resolve(address).read_text() == "second"


def test_artifacts_go_there_and_come_back_whole_and_alone(fake: FakeHub) -> None:
    address = "hf://me/model/m2-max/artifacts@v1"
    for names in (("old.mlpackage/Data/w.bin",), ("new.mlpackage/Data/w.bin", ".compiling/x")):
        with hub.output(address) as directory:
            for name in (*names, "manifest.json"):
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_text(name)
    beside = fake.place("me/model", "model", "v1") / "m2-max" / "plan.json"
    beside.write_text("{}")
    found = hub.resolve(address)
    files = sorted(f.relative_to(found).as_posix() for f in found.rglob("*") if f.is_file())
    assert files == ["manifest.json", "new.mlpackage/Data/w.bin"]
    assert not (found.parent / "plan.json").exists()
    assert hub.resolve("hf://me/model/m2-max/plan.json@v1").read_text() == "{}"


def test_what_is_not_there_is_named(fake: FakeHub) -> None:
    with pytest.raises(HubError, match=r"cannot read hf://me/x/plan.json@v3: 404: no plan.json"):
        hub.resolve("hf://me/x/plan.json@v3")
    with pytest.raises(HubError, match="hf://me/x/artifacts: the repository has no such directory"):
        hub.resolve("hf://me/x/artifacts")


def test_a_failed_upload_keeps_the_work(fake: FakeHub, tmp_path: Path) -> None:
    fake.fail = OSError("no network")
    with (
        pytest.raises(HubError, match=r"cannot upload .*plan.json \(which is kept\) to .*no net"),
        hub.output("hf://me/x/plan.json") as path,
    ):
        path.write_text("work")
    assert path.read_text() == "work"
    assert hub.local_output("hf://me/x/plan.json") == path  # the next attempt finds it
    with (
        pytest.raises(InvalidArgument, match="expected hf://"),
        hub.output(tmp_path / "p.json", upload_to="nonsense"),
    ):
        pytest.fail("the address is checked before the work")


def test_an_interrupted_write_is_not_uploaded(fake: FakeHub) -> None:
    with pytest.raises(KeyboardInterrupt), hub.output("hf://me/x/plan.json") as path:
        path.write_text("half")
        raise KeyboardInterrupt
    assert not fake.root.exists()
