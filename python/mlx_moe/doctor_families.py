"""Which architectures the installed mlx-lm knows, read from its files without importing it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

SWITCH = "switch_layers"  # the file whose classes every family's experts are
TYPES, ARCHITECTURES = "MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING"


@dataclass(frozen=True)
class Family:
    """What a model's config.json says of its architecture.

    Attributes:
        model_type: as it is there, None if it is not.
        name: of mlx-lm's file for it, or of the model's own.
        known: whether mlx-lm has that file.
        experts: whether the file, or one that it imports, has switch layers; None if not known.
        own_code: the model brings its file along (`model_file`).
    """

    model_type: str | None
    name: str | None
    known: bool
    experts: bool | None
    own_code: bool = False


def models_directory() -> Path | None:
    """mlx_lm/models of the installed mlx-lm; None if there is none."""
    spec = find_spec("mlx_lm")  # of a top-level package: nothing is imported
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (models := Path(location, "models")).is_dir():
            return models
    return None


def family_of(config: dict[str, Any], models: Path | None) -> Family:
    """The family that mlx-lm would take for a model."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        return Family(None, None, False, None)
    if isinstance(own := config.get("model_file"), str):
        return Family(model_type, own, True, None, own_code=True)
    if models is None:
        return Family(model_type, model_type, False, None)
    name = _file_of(model_type, config.get("architectures"), models)
    if not name.isidentifier() or not (models / f"{name}.py").is_file():
        return Family(model_type, name, False, None)
    return Family(model_type, name, True, has_switch_layers(name, models))


def like(model_type: str, models: Path) -> list[str]:
    """Up to three files with switch layers whose names are nearest."""
    names = sorted({path.stem for path in models.glob("*.py")} - {SWITCH})
    near = get_close_matches(model_type, names, n=len(names), cutoff=0.5) if names else []
    return list(islice((name for name in near if has_switch_layers(name, models)), 3))


def has_switch_layers(name: str, models: Path) -> bool:
    """Of its own, or of a file that it imports."""
    seen, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        waiting += _imports(models / f"{name}.py")
    return SWITCH in seen


@cache  # every family's file leads to the same few others
def _imports(path: Path) -> tuple[str, ...]:
    """Sibling files that a file imports."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            if node.module:
                yield node.module.partition(".")[0]
            else:
                yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_lm.models."):
            yield str(node.module).split(".")[2]


def _file_of(model_type: str, architectures: Any, models: Path) -> str:
    utils = _parsed(models.parent / "utils.py")
    listed = [architectures] if isinstance(architectures, str) else architectures
    remapped = _table(utils, ARCHITECTURES)
    for architecture in listed if isinstance(listed, list) else []:
        if isinstance(architecture, str) and (model_type, architecture) in remapped:
            return str(remapped[model_type, architecture])
    return str(_table(utils, TYPES).get(model_type, model_type))


def _table(module: ast.Module, name: str) -> dict[Any, Any]:
    """A dict of constants that a module assigns to `name`; empty if there is none."""
    for node in module.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                return {}
            return value if isinstance(value, dict) else {}
    return {}


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])
