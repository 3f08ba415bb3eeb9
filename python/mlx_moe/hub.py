"""Plans, calibrations and artifacts on the Hugging Face hub: hf://user/repo/path@revision."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import HubError, InvalidArgument, MoEError

SCHEME = "hf://"
TYPES = {"models": "model", "datasets": "dataset", "spaces": "space"}
FILES = frozenset({".json", ".jsonl", ".npz", ".txt", ".md", ".csv", ".yaml", ".toml"})


@dataclass(frozen=True)
class HubPath:
    """A file or directory of a repository.

    Attributes:
        repo: "user/name".
        path: in the repository; "" for all of it.
        revision: a branch, tag or commit; None for the default branch.
        type: "model", "dataset" or "space".
    """

    repo: str
    path: str
    revision: str | None = None
    type: str = "model"

    @classmethod
    def parse(cls, uri: str) -> "HubPath":
        """Of hf://[datasets/]user/repo/path@revision, or hf://user/repo@revision/path.

        Raises InvalidArgument for anything else.
        """
        parts = uri.removeprefix(SCHEME).removesuffix("/").split("/")
        kind = TYPES[parts.pop(0)] if parts[0] in TYPES else "model"
        revisions = [part.partition("@")[2] for part in parts if "@" in part]
        parts = [part.partition("@")[0] for part in parts]
        wrong = len(parts) < 2 or not all(parts) or {".", ".."} & {*parts, *revisions}
        if not uri.startswith(SCHEME) or wrong or len(revisions) > 1 or "" in revisions:
            raise InvalidArgument(
                f"{uri!r} is no place on the hub; expected {SCHEME}user/repo/path@revision, the "
                "path and @revision as needed"
            )
        revision = revisions[0] if revisions else None
        return cls("/".join(parts[:2]), "/".join(parts[2:]), revision, kind)

    @property
    def is_file(self) -> bool:
        return PurePosixPath(self.path).suffix.lower() in FILES

    @property
    def local(self) -> Path:
        """Where what is read from or going there lies on this machine."""
        from huggingface_hub.constants import HF_HOME

        name = f"{self.type}s--{self.repo.replace('/', '--')}"
        return Path(HF_HOME) / "mlx_moe" / name / (self.revision or "main").replace("/", "--")

    def __str__(self) -> str:
        kind = "" if self.type == "model" else f"{self.type}s/"
        path = f"/{self.path}" if self.path else ""
        return f"{SCHEME}{kind}{self.repo}{path}{f'@{self.revision}' if self.revision else ''}"


def is_uri(path: str | Path) -> bool:
    return str(path).startswith(SCHEME)


def resolve(path_or_uri: str | Path) -> Path:
    """The local path of a file or directory, fetched first if it is on the hub.

    A path that ends as files do (.json, .npz, ...) is a file, any other a directory. Real files,
    not links into the hub's cache: Core ML opens packages by their directory. What is there
    already, and unchanged, is not fetched again.

    Raises:
        InvalidArgument: a malformed hf:// address.
        HubError: there is no such thing, or the hub cannot be reached.
    """
    if not is_uri(path_or_uri):
        return Path(path_or_uri)
    from huggingface_hub import hf_hub_download, snapshot_download

    place = HubPath.parse(str(path_or_uri))
    where: dict[str, Any] = {
        "revision": place.revision,
        "repo_type": place.type,
        "local_dir": place.local,
    }
    with _hub_errors(f"cannot read {place}"):
        if place.is_file:
            return Path(hf_hub_download(place.repo, place.path, **where))
        patterns = [f"{place.path}/*"] if place.path else None
        root = Path(snapshot_download(place.repo, allow_patterns=patterns, **where))
    if not (root / place.path).is_dir():
        raise HubError(f"{place}: the repository has no such directory")
    return root / place.path


def local_output(path_or_uri: str | Path) -> Path:
    """Where to write what is asked for at `path_or_uri`; the same again after an interruption."""
    if not is_uri(path_or_uri):
        return Path(path_or_uri)
    place = HubPath.parse(str(path_or_uri))
    path = place.local.with_name(f"{place.local.name}.uploads") / (place.path or "all")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def output(path_or_uri: str | Path, upload_to: str | None = None) -> Iterator[Path]:
    """Write to the path that this gives; what is there at the end is uploaded if it is to be.

    Args:
        path_or_uri: a path, or an hf:// address: then it is uploaded and not kept here.
        upload_to: an hf:// address to upload to beside keeping it.

    Raises as `upload`; what was written is kept then.
    """
    if upload_to is not None:
        HubPath.parse(upload_to)  # before the work
    path = local_output(path_or_uri)
    yield path
    for target in filter(None, (upload_to, path_or_uri if is_uri(path_or_uri) else None)):
        upload(path, str(target))
    if is_uri(path_or_uri):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def upload(path: str | Path, uri: str) -> None:
    """Put a file or directory on the hub, in a repository that is made if need be.

    A directory's older packages that are not among the new ones are removed there.

    Raises:
        InvalidArgument: a malformed hf:// address, or there is no such path.
        HubError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi

    path, place = Path(path), HubPath.parse(uri)
    if not path.exists():
        raise InvalidArgument(f"{path} is not there to be uploaded")
    api = HfApi()
    where: dict[str, Any] = {
        "repo_id": place.repo,
        "repo_type": place.type,
        "revision": place.revision,
    }
    with _hub_errors(f"cannot upload {path} (which is kept) to {place}"):
        api.create_repo(place.repo, repo_type=place.type, exist_ok=True)
        if path.is_dir():
            api.upload_folder(
                folder_path=path,
                path_in_repo=place.path or None,
                ignore_patterns=[".*"],
                delete_patterns=["*.mlpackage/*"],
                **where,
            )
        else:
            api.upload_file(path_or_fileobj=path, path_in_repo=place.path or path.name, **where)


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    try:
        yield
    except MoEError:
        raise
    except (
        Exception
    ) as error:  # the hub's, its HTTP library's, and the system's have no common base
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise HubError(f"{what}: {reason}") from error
