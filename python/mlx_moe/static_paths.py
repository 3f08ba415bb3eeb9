"""The static halves of a model's layers, and running without them for a while."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from .find import named_modules
from .static import StaticLayer
from .static_path import StaticPath


def static_paths(model: Any, attributes: tuple[str, ...]) -> list[StaticPath]:
    """The static halves that are open, of modules with one of `attributes`."""
    kept = (m.__dict__.get(a) for m in named_modules(model).values() for a in attributes)
    paths = [layer.static for layer in kept if layer is not None]
    return [path for path in paths if path is not None and path.layer is not None]


@contextmanager
def with_layers(
    paths: Sequence[StaticPath], layers: Sequence[StaticLayer | None]
) -> Iterator[None]:
    """Other static layers on the paths while open; None: all on the cold path."""
    before = [path.layer for path in paths]
    try:
        for path, layer in zip(paths, layers, strict=True):
            path.layer = layer
        yield
    finally:
        for path, layer, own in zip(paths, layers, before, strict=True):
            if path.layer is layer:  # else it was closed meanwhile
                path.layer = own


def all_cold(model: Any) -> AbstractContextManager[None]:
    """Every assignment, of shared experts too, runs on the cold path while open."""
    paths = static_paths(model, ("_moe_layer", "_moe_shared"))
    return with_layers(paths, [None] * len(paths))
