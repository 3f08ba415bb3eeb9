"""Help is quick: a command's options are known before mlx-lm, which takes seconds, is imported."""

import contextlib
import io
import subprocess
import sys

import pytest

from mlx_moe.cli import COMMANDS

OWN_PARSER = {"generate"}  # takes over mlx_lm.generate's options, so it has to import them
CODE = """
import contextlib, io, sys
from mlx_moe.cli import main
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([command, "--help"])
    assert f"mlx_moe {command}" in out.getvalue(), command
    loaded = {"mlx_lm", "transformers"} & sys.modules.keys()
    assert not loaded, f"{command} imports {loaded}"
"""


def test_help_does_not_import_mlx_lm() -> None:
    commands = [command for command in COMMANDS if command not in OWN_PARSER]
    subprocess.run([sys.executable, "-c", CODE, *commands], check=True)


@pytest.mark.parametrize("command", sorted(OWN_PARSER))
def test_help_of_a_taken_over_parser_has_its_options(command: str) -> None:
    from mlx_moe.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0 and "--max-tokens" in out.getvalue()
