"""A calibration that is not finished, as it is kept on disk."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .counting import LayerCounts
from .errors import CorruptFile, InvalidArgument
from .identity import ModelIdentity, check_same
from .npz_file import read_npz, write_npz

FORMAT, VERSION = "mlx_moe.calibration-state", 1
AGAIN = "delete it, or start over (resume=False, --no-resume)"


@dataclass
class Progress:
    """How far a calibration has come.

    Attributes:
        documents: how many were begun.
        chunks: done of the last one of these.
        digest: SHA-256 (hex) of the tokens of all that were begun.
        chunk_tokens: tokens of every chunk.
        source_tokens: tokens by the place of a path in the corpus.
        top_k: experts for each token, by layer.
    """

    documents: int = 0
    chunks: int = 0
    digest: str = ""
    chunk_tokens: list[int] = field(default_factory=list)
    source_tokens: dict[str, int] = field(default_factory=dict)
    top_k: dict[str, int] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ValueError unless the numbers go together; AttributeError or TypeError likewise."""
        counts = [self.documents, self.chunks, *self.source_tokens.values(), *self.top_k.values()]
        if not all(type(count) is int and count > 0 for count in [*counts, *self.chunk_tokens]):
            raise ValueError("counts that are not positive numbers")
        most, tokens = len(self.chunk_tokens), sum(self.chunk_tokens)
        if max(self.documents, self.chunks) > most or sum(self.source_tokens.values()) != tokens:
            raise ValueError("counts that do not go together")


def state_path(out: str | Path) -> Path:
    """Where the state of a calibration that will be written to `out` is kept."""
    return Path(f"{out}.partial")


def save_state(
    path: Path,
    identity: ModelIdentity,
    settings: dict[str, Any],
    progress: Progress,
    counts: dict[str, LayerCounts],
) -> None:
    """Write everything needed to go on, whole or not at all."""
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "identity": identity.to_json(),
        "settings": settings,
        "progress": asdict(progress),
        "layers": list(counts),
    }
    states = [layer.state() for layer in counts.values()]
    arrays = {f"{name}.{i}": a for i, state in enumerate(states) for name, a in state.items()}
    write_npz(path, meta, arrays, compress=False)


def load_state(
    path: Path,
    identity: ModelIdentity,
    settings: dict[str, Any],
    counts: dict[str, LayerCounts],
) -> Progress | None:
    """Fill `counts` from a state that `save_state` wrote; None if there is none.

    Raises:
        IdentityMismatch: it is of another model.
        InvalidArgument: it is of other options or files; names them.
        CorruptFile: it cannot be read.
    """
    if not path.exists():
        return None
    meta, arrays = read_npz(path, FORMAT, VERSION)
    check_same(ModelIdentity.from_json(meta.get("identity"), str(path)), identity, str(path))
    try:
        for name, value in settings.items():
            if meta["settings"][name] != value:
                raise InvalidArgument(
                    f"{path} was begun with {name} {meta['settings'][name]!r}, and this is "
                    f"{value!r}: use the same, or {AGAIN}"
                )
        progress = Progress(**meta["progress"])
        progress.check()
        if meta["layers"] != list(counts):
            raise ValueError("other layers")
        for i, layer in enumerate(counts.values()):
            layer.set_state({name: arrays[f"{name}.{i}"] for name in layer.state()})
            if len(layer.loads) != len(progress.chunk_tokens):
                raise ValueError("loads of other chunks")
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise CorruptFile(f"{path} cannot be gone on from ({error}): {AGAIN}") from error
    return progress
