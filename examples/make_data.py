"""Make the calibration and evaluation sets of `data/` from plain text.

    python examples/make_data.py --text DIR [--tokenizer examples/tiny-qwen3-moe] [-o examples/data]

DIR holds NAME.calibration.txt and NAME.valid.txt, the model's training text and text that it has
not seen. For each NAME are written:

    NAME.calibration.jsonl  {"text": passage} from the training text
    NAME.choice.jsonl       {"context", "choices", "answer"}: find the true continuation among four
    NAME.text.jsonl         {"text": passage} from the unseen text that no item uses

The first part of the unseen text is cut into stretches of CONTEXT + CONTINUATION tokens. The wrong
choices are continuations of other items: real text of the same kind and of as many tokens. The same
input gives the same files, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

EXAMPLES = Path(__file__).parent
CONTEXT, CONTINUATION, CHOICES = 32, 8, 4  # tokens, tokens, choices of an item
ITEMS = 800  # of each kind of text
PASSAGE = 2048  # characters, to the end of the line that reaches them
CALIBRATION, TEXT = 100_000, 40_000  # characters of each kind of text


def passages(text: str, characters: int) -> list[dict[str, str]]:
    """Whole lines of the first `characters`, some PASSAGE characters together."""
    found, lines = [], []
    for line in text[:characters].splitlines(keepends=True):
        lines.append(line)
        if sum(map(len, lines)) >= PASSAGE:
            found.append({"text": "".join(lines)})
            lines = []
    return found


class Stretches:
    """Cuts text into (context, continuation) pairs whose tokens are those of their text."""

    def __init__(self, text: str, tokenizer: Any):
        self.tokenizer = tokenizer
        self.tokens = tokenizer.encode(text)
        self.end = 0  # of the last pair, in tokens

    def __iter__(self) -> Iterator[tuple[str, str]]:
        cut = CONTEXT
        while cut + CONTINUATION <= len(self.tokens):
            pair = self._pair(cut)
            if pair:
                self.end = cut + CONTINUATION
                yield pair
                cut += CONTEXT + CONTINUATION
            else:
                cut += 1

    def _pair(self, cut: int) -> tuple[str, str] | None:
        first, last = cut - CONTEXT, cut + CONTINUATION
        context = self.tokenizer.decode(self.tokens[first:cut])
        continuation = self.tokenizer.decode(self.tokens[cut:last])
        kept = self.tokenizer.encode(context + continuation) == self.tokens[first:last]
        fits = kept and ends_with(self.tokenizer, context, continuation)
        return (context, continuation) if fits and continuation.strip() else None

    def rest(self) -> str:
        return self.tokenizer.decode(self.tokens[self.end :])


def ends_with(tokenizer: Any, context: str, continuation: str) -> bool:
    """Whether both have their numbers of tokens and stay apart when they are read as one text."""
    head, whole = tokenizer.encode(context), tokenizer.encode(context + continuation)
    return len(head) == CONTEXT and len(whole) == CONTEXT + CONTINUATION and whole[:CONTEXT] == head


def choice_items(
    pairs: Sequence[tuple[str, str]], tokenizer: Any, seed: str
) -> list[dict[str, Any]]:
    """Items whose wrong choices are other items' continuations, of as many tokens here too."""
    rng = random.Random(seed)
    items = []
    for context, true in pairs:
        choices = [true]
        while len(choices) < CHOICES:
            other = rng.choice(pairs)[1]
            if other not in choices and ends_with(tokenizer, context, other):
                choices.append(other)
        rng.shuffle(choices)
        items.append({"context": context, "choices": choices, "answer": choices.index(true)})
    return items


def take(stretches: Stretches, count: int) -> list[tuple[str, str]]:
    pairs = [pair for pair, _ in zip(stretches, range(count), strict=False)]
    if len(pairs) < count:
        raise SystemExit(f"the unseen text has {len(pairs)} items, expected {count}")
    return pairs


def write(path: Path, records: Sequence[dict[str, Any]]) -> None:
    scratch = path.with_name(path.name + ".new")
    with scratch.open("w") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    os.replace(scratch, path)
    print(f"{path}: {len(records)} lines, {path.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="directory of the texts")
    parser.add_argument("--tokenizer", default=str(EXAMPLES / "tiny-qwen3-moe"))
    parser.add_argument("-o", "--output", type=Path, default=EXAMPLES / "data")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer, model_max_length=1 << 30)
    options.output.mkdir(parents=True, exist_ok=True)
    files = sorted(options.text.glob("*.valid.txt"))
    if not files:
        raise SystemExit(f"{options.text} has no NAME.valid.txt")
    for file in files:
        name = file.name.removesuffix(".valid.txt")
        training = file.with_name(f"{name}.calibration.txt").read_text()
        stretches = Stretches(file.read_text(), tokenizer)
        items = choice_items(take(stretches, ITEMS), tokenizer, name)
        target = options.output
        write(target / f"{name}.calibration.jsonl", passages(training, CALIBRATION))
        write(target / f"{name}.choice.jsonl", items)
        write(target / f"{name}.text.jsonl", passages(stretches.rest(), TEXT))


if __name__ == "__main__":
    main()
