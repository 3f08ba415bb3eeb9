"""The documentation: commands and options exist, links lead somewhere, all of it is listed."""

import ast
import contextlib
import importlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from mlx_moe.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *(ROOT / name / "README.md" for name in ("benchmarks", "examples")),
    ]
)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ENDS = {"|", "<", ">", "&&", ";", ">>"}

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="no checkout")


def shell_lines(text: str) -> list[str]:
    """Lines of indented and shell code blocks, continuations joined, and code within the text."""
    blocks = [block for match in SHELL.finditer(text) for block in match.group(1).splitlines()]
    plain = FENCE.sub("", text)
    indented = [line[4:] for line in plain.splitlines() if line.startswith("    ")]
    joined = "\n".join([*blocks, *indented]).replace("\\\n", " ")
    return [*joined.splitlines(), *INLINE.findall(plain)]


def calls(text: str) -> list[list[str]]:
    """The words of each command of the page, after what comes before its own name."""
    found = []
    for line in shell_lines(text):
        try:
            words = shlex.split(re.sub(r"[\[\]]", " ", line), comments=True)
        except ValueError:
            continue  # no command line
        for i, word in enumerate(words):
            if word in ENDS:
                words = words[:i]
                break
        starts = [i for i, w in enumerate(words) if w in ("mlx_moe", "python", "make")]
        if starts and (starts[0] == 0 or words[0] in ("mlx.launch", "flock", "nice")):
            found.append(words[starts[0] :])
    return found


@cache
def help_of(command: str) -> str:
    """What `mlx_moe COMMAND --help` prints."""
    module = importlib.import_module(f"mlx_moe.cli.{command.replace('-', '_')}")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        module.main(["--help"])
    return printed.getvalue()


def options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)]


def has(text: str, option: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text) is not None


def wrong(words: list[str]) -> str | None:
    """What is wrong with a command, if anything."""
    if words[0] == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        asked = [w for w in words[1:] if re.fullmatch(r"[a-z][\w-]*", w)]
        return next((f"no target {w}" for w in asked if w not in targets), None)
    if words[0] == "python":
        if len(words) < 2 or not words[1].startswith("benchmarks/") or "NAME" in words[1]:
            return None
        script = ROOT / words[1]
        if not script.is_file():
            return f"no file {words[1]}"
        source = script.read_text()
        return next(
            (f"{words[1]} has no {o}" for o in options(words) if f'"{o}"' not in source), None
        )
    if len(words) < 2 or words[1] in ("COMMAND", "--version", "-h", "--help", "..."):
        return None
    command, own = words[1].rstrip(","), words[2:]
    if command not in COMMANDS:
        return f"no command {command}"
    if command == "run":  # what comes after the stock command's name is that command's
        own = own[: next((i for i, w in enumerate(own) if w.startswith("mlx_lm")), len(own))]
    shown = help_of(command)
    return next((f"{command} has no {o}" for o in options(own) if not has(shown, o)), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_of_the_page_exist(page: Path) -> None:
    found = calls(page.read_text())
    bad = [f"{shlex.join(words)}: {error}" for words in found if (error := wrong(words))]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("mlx_moe generate --model M --prompt x", None),
        ("mlx_moe generate --modle M", "--modle"),
        ("mlx_moe fly", "fly"),
        ("mlx_moe run --expert-memory 8GB mlx_lm.server --port 1", None),
        ("mlx_moe run --port 1 mlx_lm.server", "--port"),
        ("mlx_moe plan --calibration c.npz -o p --devise x", "--devise"),
        ("python benchmarks/tiers.py --check", None),
        ("python benchmarks/tiers.py --cheque", "--cheque"),
        ("python benchmarks/tires.py", "tires"),
        ("make demo", None),
        ("make haste", "haste"),
    ],
)
def test_wrong_commands_are_found(line: str, error: str | None) -> None:
    (words,) = calls(f"    {line} | tee out  # --why\n")
    found = wrong(words)
    assert found is None if error is None else error in (found or "")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    bad = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue  # elsewhere
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        if not other.exists():
            bad.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(other):
            bad.append(f"{target}: no such heading of {sorted(anchors(other))}")
    assert not bad, "\n".join(bad)


def missing_names(code: str) -> list[str]:
    """What Python code takes from mlx_moe that is not there; SyntaxError where it is none."""
    missing = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_moe"):
            module, names = node.module or "", [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "mlx_moe":
            module, names = "mlx_moe", [node.attr]
        else:
            continue
        found = importlib.import_module(module)
        missing += [f"{module}.{name}" for name in names if not hasattr(found, name)]
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_of_the_page_takes_what_there_is(page: Path) -> None:
    blocks = PYTHON.findall(page.read_text())
    assert [name for block in blocks for name in missing_names(block)] == []


def test_missing_names_are_found() -> None:
    code = "import mlx_moe\nfrom mlx_moe.store import ExpertStore, Shop\nmlx_moe.lode('M')\n"
    assert missing_names(code) == ["mlx_moe.store.Shop", "mlx_moe.lode"]


def test_the_index_lists_every_page_and_command() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    missing = [page for page in sorted(pages) if f"]({page}" not in index]
    missing += [command for command in COMMANDS if f"`{command}`" not in index]
    assert not missing


def test_the_picture_is_well_formed() -> None:
    import xml.etree.ElementTree as tree

    root = tree.parse(ROOT / "docs" / "flow.svg").getroot()
    assert root.tag.endswith("svg") and root.get("viewBox")


def test_every_benchmark_is_described_and_made() -> None:
    directory = ROOT / "benchmarks"
    runs = {path.stem for path in directory.glob("*.py") if "__main__" in path.read_text()}
    described = (directory / "README.md").read_text()
    assert [name for name in sorted(runs) if f"benchmarks/{name}.py" not in described] == []
    made = re.search(
        r"^BENCHMARKS := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert set(made[1].replace("\\", "").split()) == runs - {"quality", "floor"}
