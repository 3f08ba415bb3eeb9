"""Make examples/tiny-qwen3-moe: the trained bf16 model, quantised as `mlx_lm.convert -q` does.

python examples/make_tiny.py --source PATH/TO/bf16-model
"""

import argparse
import json
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx_lm import convert

BITS = 4
GROUP_SIZE = 64
SIZE_LIMIT = 6_000_000  # bytes; the model lives in the repository
HERE = Path(__file__).parent


def make(source: Path, target: Path) -> int:
    """Write the quantised model's files into `target`, keeping its README; return their bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "model"
        convert(str(source), str(made), quantize=True, q_bits=BITS, q_group_size=GROUP_SIZE)
        (made / "README.md").unlink(missing_ok=True)  # a hub card with the source's local path
        # As trained, since transformers 5 writes a tokenizer class that older releases do not know.
        for file in source.glob("tokenizer*.json"):
            (made / file.name).write_bytes(file.read_bytes())
        end_of_text = json.loads((source / "config.json").read_text())["eos_token_id"]
        generation = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
        (made / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")

        size = sum(file.stat().st_size for file in made.iterdir())
        if size > SIZE_LIMIT:
            raise SystemExit(f"{made}: {size} bytes, over the limit of {SIZE_LIMIT}")
        target.mkdir(parents=True, exist_ok=True)
        for file in made.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="the bf16 model's directory")
    parser.add_argument("--target", type=Path, default=HERE / "tiny-qwen3-moe")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)  # the same bytes on every machine
    print(f"{args.target}: {make(args.source, args.target)} bytes")


if __name__ == "__main__":
    main()
