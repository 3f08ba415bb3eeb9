"""Needles in a haystack, in the manner of RULER's multi-key task (arXiv 2404.06654)."""

import random
from collections.abc import Sequence
from typing import Any

from .errors import InvalidArgument
from .scoring import Question

KEYS = (
    *("anchor", "apple", "basket", "bridge", "candle", "castle", "desert", "dragon", "engine"),
    *("feather", "forest", "garden", "hammer", "harbor", "island", "jacket", "kettle", "ladder"),
    *("lantern", "marble", "meadow", "orange", "palace", "pepper", "rabbit", "ribbon", "saddle"),
    *("shadow", "spider", "temple", "thunder", "tunnel", "valley", "velvet", "window", "winter"),
)
NEEDLES = 4  # facts in each text, one of which is asked for
DIGITS = 5


def needle_questions(
    haystack: Sequence[int], tokenizer: Any, *, length: int, count: int, seed: int = 0
) -> list[Question]:
    """Questions after `length` tokens of text that hide the answer.

    Each text states the secret number of four words, at random depths but for the one that is
    asked for, whose depths are spread evenly over the `count` texts. The choices are the four
    numbers, so that the wrong ones stand in the text too.

    Args:
        haystack: tokens of ordinary text; repeated where it is short.
        length: tokens of each context, facts and question included.

    Raises:
        InvalidArgument: no haystack, or `length` leaves it no room.
    """
    if not haystack:
        raise InvalidArgument(
            "retrieval hides its needles in the text of the data files, and there is none: "
            'give a .txt file or lines of {"text"}'
        )
    rng = random.Random(seed)
    return [
        _question(haystack, tokenizer, length, number / max(1, count - 1), rng)
        for number in range(count)
    ]


def _question(
    haystack: Sequence[int], tokenizer: Any, length: int, depth: float, rng: random.Random
) -> Question:
    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    keys = rng.sample(KEYS, NEEDLES)
    values = [str(v) for v in rng.sample(range(10 ** (DIGITS - 1), 10**DIGITS), NEEDLES)]
    facts = [
        encode(f"\nThe secret number of the {key} is {value}.\n")
        for key, value in zip(keys, values, strict=True)
    ]
    head = encode("")  # nothing, or what the tokenizer begins every text with
    question = encode(f"\nThe secret number of the {keys[0]} is")
    room = length - len(head) - len(question) - sum(map(len, facts))
    if room < 0:
        raise InvalidArgument(
            f"a retrieval text of {length} tokens has no room for its {NEEDLES} needles and the "
            f"question, which take {length - room}: ask for longer texts"
        )
    start = rng.randrange(len(haystack))
    hay = [haystack[(start + i) % len(haystack)] for i in range(room)]
    depths = [depth] + [rng.random() for _ in facts[1:]]
    tokens, at = head, 0
    for place, fact in sorted(zip((round(d * room) for d in depths), facts, strict=True)):
        tokens = tokens + hay[at:place] + fact
        at = place
    tokens = tokens + hay[at:] + question
    choices = tuple(tuple(encode(f" {value}")) for value in values)
    return Question(tuple(tokens), choices, 0, (1.0,) * NEEDLES)
