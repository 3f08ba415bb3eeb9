"""A model's config.json and the headers of its weight files, from here or from the hub."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import CorruptFile, HubError, ModelNotFound, MoEError
from .safetensors_headers import SHARDS, Tensor, read_header, tensors_of

CONFIG, INDEX = "config.json", "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelFiles:
    """What is known of a model without reading a weight.

    Attributes:
        name: as it was asked for.
        where: "directory", "cache" (the hub's, on this machine) or "hub" (nothing here yet).
        directory: None on the hub.
        tensors: of all weight files, by name.
        bytes: of the weight files.
        problems: files that are missing or cut short.
    """

    name: str
    where: str
    directory: Path | None
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    bytes: int
    problems: list[str] = field(default_factory=list)


def read_model(name: str) -> ModelFiles:
    """Of a model directory or a Hugging Face repository; headers only, no weights.

    Raises:
        ModelNotFound: neither, or without config.json or weights.
        HubError: the hub cannot be reached (or is not to be), and the model is not here.
        CorruptFile: a file is not what it should be.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return from_directory(path, name)
    if path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFound(f"there is no model directory {name!r}")
    return from_hub(name)


def from_directory(directory: Path, name: str, where: str = "directory") -> ModelFiles:
    config = _config(directory)
    shards = sorted(directory.glob(SHARDS))
    if not shards:
        raise ModelNotFound(
            f"{directory} has no weights that mlx-lm loads ({SHARDS}); if they are in another "
            "format, convert them with mlx_lm.convert"
        )
    tensors: dict[str, Tensor] = {}
    problems, size = [], 0
    for shard in shards:
        header = read_header(shard)
        tensors |= tensors_of(header, shard)
        size += (found := shard.stat().st_size)
        if found < (expected := _end(shard, header)):
            problems.append(f"{shard.name} is cut short: {found} of {expected} bytes")
    missing = sorted(_listed(directory) - {shard.name for shard in shards})
    if missing:
        problems.append(
            f"{len(missing)} of the weight files that {INDEX} lists are missing, the first is "
            f"{missing[0]}"
        )
    return ModelFiles(name, where, directory, config, tensors, size, problems)


def from_hub(name: str) -> ModelFiles:
    """Of the hub's cache on this machine if all is there, else from the hub by HTTP ranges."""
    from huggingface_hub import constants, get_safetensors_metadata, hf_hub_download
    from huggingface_hub.utils import get_session

    with hub_errors(name):
        if (cached := _in_cache(name)) is not None:
            return cached
        if constants.HF_HUB_OFFLINE:
            raise HubError(
                f"{name!r} is no directory and not in the hub's cache, and HF_HUB_OFFLINE keeps "
                "this offline: give a model directory, or unset HF_HUB_OFFLINE"
            )
        # Reading headers, the library tries again for half a minute where nobody answers.
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        config = _json(Path(hf_hub_download(name, CONFIG)))
        found = get_safetensors_metadata(name)
    tensors = {
        tensor: Tensor(info.dtype, tuple(info.shape))
        for file in found.files_metadata.values()
        for tensor, info in file.tensors.items()
    }
    size = sum(tensor.bytes for tensor in tensors.values())
    return ModelFiles(name, "hub", None, config, tensors, size)


def _in_cache(name: str) -> ModelFiles | None:
    """The model as downloaded before, None if any weight file is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    shards = {shard.name for shard in directory.glob(SHARDS)}
    if not shards or _listed(directory) - shards or not (directory / CONFIG).is_file():
        return None
    return from_directory(directory, name, "cache")


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turn what the hub's library raises into `ModelNotFound`, `CorruptFile` and `HubError`."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        NotASafetensorsRepoError,
        RepositoryNotFoundError,
        SafetensorsParsingError,
    )

    try:
        yield
    except MoEError:
        raise
    except HFValidationError as error:
        raise ModelNotFound(
            f"there is no directory {name!r}, and it is no repository id: {_reason(error)}"
        ) from error
    except GatedRepoError as error:
        raise ModelNotFound(
            f"the repository {name!r} is gated: ask for access on its page, then log in with "
            f"`hf auth login` ({_reason(error)})"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"there is no directory {name!r}, and no such repository on the hub, or it is "
            "private: `hf auth login` shows yours"
        ) from error
    except SafetensorsParsingError as error:
        raise CorruptFile(f"{name!r}: {_reason(error)}") from error
    except NotASafetensorsRepoError as error:
        raise ModelNotFound(f"{name!r} has no safetensors weights: {_reason(error)}") from error
    except (
        Exception
    ) as error:  # the hub's, its HTTP library's, and the system's have no common base
        # A LocalEntryNotFoundError is an EntryNotFoundError too, and says that nobody answered.
        missing = isinstance(error, EntryNotFoundError)
        if missing and not isinstance(error, LocalEntryNotFoundError):
            raise ModelNotFound(
                f"the repository {name!r} has no {CONFIG}: it is no model that mlx-lm loads"
            ) from error
        raise HubError(
            f"{name!r} is no directory and not in the hub's cache, and the hub cannot be reached "
            f"({_reason(error)}): give a model directory, or try again online"
        ) from error


def _reason(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0].rstrip(".")


def _config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    if not path.is_file():
        raise ModelNotFound(f"{directory} is no model directory: it has no {CONFIG}")
    return _json(path)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path} is no JSON object")
    return value


def _listed(directory: Path) -> set[str]:
    """The weight files that the index names."""
    index = directory / INDEX
    if not index.is_file():
        return set()
    names = _json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(v, str) for v in names.values()):
        raise CorruptFile(f"{index}: 'weight_map' is missing or cannot be")
    return {os.path.basename(value) for value in names.values()}


def _end(shard: Path, header: dict[str, Any]) -> int:
    """Where the file's last tensor is over."""
    with shard.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    try:
        return start + max((int(t["data_offsets"][1]) for t in header.values()), default=0)
    except (KeyError, TypeError, IndexError, ValueError):
        raise CorruptFile(f"{shard}: a tensor in the header has no data_offsets") from None
