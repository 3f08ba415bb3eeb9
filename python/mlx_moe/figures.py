"""Pictures with matplotlib, which need not be installed."""

from pathlib import Path
from typing import Any

from .durable import whole
from .errors import InvalidArgument, MissingDependency


def require_matplotlib() -> Any:
    """matplotlib.figure; raises MissingDependency, before anything is run."""
    try:
        from matplotlib import figure
    except ImportError as error:
        raise MissingDependency(
            "--plot needs matplotlib: pip install 'mlx-npumoe[plot]', or pip install matplotlib"
        ) from error
    return figure


def save(figure: Any, path: Path, **options: Any) -> None:
    """Write a picture, whole or not at all; the name's ending says of which kind.

    Raises InvalidArgument for a kind that matplotlib cannot write, or a place that nobody can.
    """
    try:
        with whole(path) as scratch:
            figure.savefig(scratch, format=path.suffix[1:].lower(), **options)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot write {path}: {error}") from error
