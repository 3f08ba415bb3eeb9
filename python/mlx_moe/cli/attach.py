"""`mlx_moe attach`: a model directory that stock, unwrapped mlx-lm commands run replaced."""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import MoEError
from ..identity import ATTACHED as KEY
from .common import add_backend_option, command

MODEL_FILE = "mlx_moe_model.py"
MODEL_SOURCE = '''\
"""Written by `mlx_moe attach`: builds the model of config.json with its layers replaced."""

from pathlib import Path

try:
    from mlx_moe.attached import AttachedArgs
    from mlx_moe.attached import build as Model  # noqa: F401, N812
except ImportError as error:
    raise ImportError("this model needs mlx_moe, to be installed from a checkout") from error


class ModelArgs:
    @staticmethod
    def from_dict(config):
        return AttachedArgs.from_dict(config, Path(__file__).parent)
'''


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_moe attach",
        description="Write a model directory that stock mlx-lm commands run with the layers "
        "replaced: mlx_lm.generate --model DIR --trust-remote-code. Its files are links to the "
        "model's own, so that it takes no space and must not outlive them.",
    )
    parser.add_argument("--model", required=True, help="Model directory or Hugging Face repo")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="The directory to write"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="Allow a model that comes with its own model_file, which runs as a check",
    )
    add_backend_option(parser)
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    import mlx_lm.utils

    from ..loading import missing_model_is_an_error
    from ..replace import resolve_backend

    resolve_backend(args.backend)
    with missing_model_is_an_error(args.model):
        source = mlx_lm.utils._download(args.model)
    attach(source, args.output, args.backend, args.trust_remote_code)
    print(f"Written: {args.output}")
    print(f"mlx_lm.generate --model {args.output} --trust-remote-code --prompt ...")
    return 0


def attach(source: Path, output: Path, backend: str, trust_remote_code: bool) -> None:
    """Write the directory `output`, which links to the files of the model in `source`."""
    import mlx_lm.utils

    from ..loading import missing_model_is_an_error, trust_option

    config = read_config(source)
    if "model_file" in config and not trust_remote_code:
        raise MoEError(
            f"{source} runs its own code, {config['model_file']}: "
            "pass --trust-remote-code if you trust it"
        )
    if output.resolve().is_relative_to(source.resolve()):
        raise MoEError(f"{output} is inside the model's own directory: give one outside {source}")
    config[KEY] = {"backend": backend, "model_file": config.get("model_file")}
    config["model_file"] = MODEL_FILE
    with new_directory(output) as scratch:
        for file in source.iterdir():
            if not file.name.startswith(".") and file.name != "config.json":
                (scratch / file.name).symlink_to(file.resolve())
        (scratch / MODEL_FILE).write_text(MODEL_SOURCE)
        (scratch / "config.json").write_text(json.dumps(config, indent=4) + "\n")
        # A check that the layers can be replaced; lazy: no weights are read.
        load_model = mlx_lm.utils.load_model
        with missing_model_is_an_error(source):
            load_model(scratch, lazy=True, **trust_option(load_model, True))


def read_config(source: Path) -> dict:
    path = source / "config.json"
    try:
        config = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MoEError(f"{source} is no model directory: it has no config.json") from error
    except ValueError as error:
        raise MoEError(f"{path} is not valid JSON: {error}") from error
    if KEY in config:
        raise MoEError(f"{source} was itself written by `mlx_moe attach`: attach its source model")
    return config


@contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """A scratch directory that becomes `output` when all went well, else vanishes."""
    if os.path.lexists(output):
        raise MoEError(f"{output} exists already: give a directory that is not there yet")
    scratch = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        scratch.chmod(0o755)  # mkdtemp lets nobody else in
        yield scratch
        scratch.rename(output)
    except BaseException as error:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, MoEError):
            raise MoEError(f"cannot write {output}: {error.strerror or error}") from error
        raise
