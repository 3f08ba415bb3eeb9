"""The typed stub of the C++ core says what the compiled module says."""

import ast
import re
from pathlib import Path

import pytest

from mlx_moe import _core

STUB = ast.parse(Path(_core.__file__).with_name("_core.pyi").read_text())


def signature_of(function: object) -> str:
    """A compiled function's signature as nanobind keeps it, made into Python that parses."""
    text = function.__nb_signature__[0][0]  # type: ignore[attr-defined]
    while "[" in text:
        text = re.sub(r"\[[^][]*\]", "", text)  # Sequence[ndarray[device='cpu']]
    return re.sub(r"\\\d+", "None", text)  # \0: the n-th default value


def parameters(definition: ast.FunctionDef) -> tuple[list[str], list[str], int]:
    """Positional names, keyword-only names, and the number of defaults, without self."""
    args = definition.args
    positional = [a.arg for a in args.args if a.arg != "self"]
    defaults = len(args.defaults) + sum(d is not None for d in args.kw_defaults)
    return positional, [a.arg for a in args.kwonlyargs], defaults


def compiled(function: object) -> tuple[list[str], list[str], int]:
    (definition,) = ast.parse(signature_of(function) + ": ...").body
    assert isinstance(definition, ast.FunctionDef)
    return parameters(definition)


def test_functions_have_the_compiled_names_and_parameters() -> None:
    stubbed = {d.name: parameters(d) for d in STUB.body if isinstance(d, ast.FunctionDef)}
    functions = {name: value for name, value in vars(_core).items() if not name.startswith("_")}
    functions = {n: v for n, v in functions.items() if hasattr(v, "__nb_signature__")}
    assert stubbed == {name: compiled(value) for name, value in functions.items()}


CLASSES = [d for d in STUB.body if isinstance(d, ast.ClassDef) and d.name != "Buffer"]


@pytest.mark.parametrize("stub", CLASSES, ids=lambda stub: stub.name)
def test_classes_have_the_compiled_members(stub: ast.ClassDef) -> None:
    cls = getattr(_core, stub.name)
    stubbed = {d.name: parameters(d) for d in stub.body if isinstance(d, ast.FunctionDef)}
    members = {n: v for n, v in vars(cls).items() if not n.startswith("_") or n in stubbed}
    assert set(stubbed) == set(members)
    for name, member in members.items():
        if not isinstance(member, property):
            assert stubbed[name] == compiled(member), name
