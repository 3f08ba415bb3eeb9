"""Progress bars: for whatever takes more than two seconds, on stderr, terminal or not."""

import sys
from typing import Any

from tqdm import tqdm

PROGRESS_AFTER = 2.0  # seconds


def progress_bar(shown: bool = True, *, delay: float = PROGRESS_AFTER, **options: Any) -> Any:
    """A tqdm bar, with tqdm's `options`, that is gone when it is done.

    Args:
        shown: False for callers that were told to be silent.
        delay: seconds before it shows; 0 where the first step alone is known to take longer.
    """
    return tqdm(disable=not shown, delay=delay, leave=False, file=sys.stderr, **options)
