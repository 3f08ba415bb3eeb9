"""The benchmarks take from each other what there is."""

import ast
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
FILES = sorted(FOLDER.glob("*.py"))

pytestmark = pytest.mark.skipif(not FILES, reason="no checkout")


@cache
def names_of(module: str) -> frozenset[str]:
    """What a benchmark's file defines or imports."""
    found: set[str] = set()
    for node in ast.parse((FOLDER / f"{module}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        else:
            found |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return frozenset(found)


def missing(source: str) -> list[str]:
    """What the source takes from other benchmarks that they do not have."""
    tree, modules, found = ast.parse(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (FOLDER / f"{node.module}.py").is_file():
            own = names_of(str(node.module))
            found += [f"{node.module}.{a.name}" for a in node.names if a.name not in own]
    local = {name: module for name, module in modules.items() if (FOLDER / f"{module}.py").exists()}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            continue
        module = local.get(node.value.id)
        if module is not None and node.attr not in names_of(module):
            found.append(f"{module}.{node.attr}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_it_takes_what_there_is(path: Path) -> None:
    assert missing(path.read_text()) == []


def test_what_is_missing_is_found() -> None:
    source = "import common as c\nfrom workload import Shape, Size\nc.timed(c.timer)\n"
    assert missing(source) == ["workload.Size", "common.timer"]
