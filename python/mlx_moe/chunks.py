"""The chunks of a calibration as planning takes them."""

import numpy as np
from numpy.typing import NDArray

from .calibration import Calibration
from .errors import InvalidArgument
from .tiers import LARGEST_CHUNK

Array = NDArray[np.float64]
MOST_CHUNKS = 256  # taken evenly from more; tails of 1 % need no more
FEWEST_FULL = 4  # full chunks; with fewer, shorter ones count too


def chunk_loads(calibration: Calibration, chunk: int) -> list[Array]:
    """Loads [chunks, E] of each layer in chunks of `chunk` tokens.

    Chunks of the calibration that follow each other are put together for a larger `chunk`. Full
    ones only where there are some, else all, each brought to the full number of tokens.

    Raises:
        InvalidArgument: `chunk` is not a multiple of the calibration's, or too large.
    """
    if chunk > LARGEST_CHUNK:
        raise InvalidArgument(f"chunk is {chunk}, expected at most {LARGEST_CHUNK} tokens")
    if chunk < 1 or chunk % calibration.chunk:
        raise InvalidArgument(
            f"chunk is {chunk}, and the calibration counted chunks of {calibration.chunk}: plan "
            f"for a multiple of that, or calibrate with chunks of {chunk}"
        )
    tokens = np.array(calibration.chunk_tokens, np.float64)
    starts = _merge(tokens, chunk)
    sizes = np.add.reduceat(tokens, starts)
    full = np.flatnonzero(sizes >= chunk - 0.5 * calibration.chunk)
    kept = full if len(full) >= FEWEST_FULL else np.arange(len(sizes))
    if len(kept) > MOST_CHUNKS:
        kept = kept[np.linspace(0, len(kept) - 1, MOST_CHUNKS).astype(int)]
    loads = []
    for layer in range(len(calibration.layers)):
        counts = calibration.loads(layer).astype(np.float64)
        merged = np.add.reduceat(counts, starts, axis=0)[kept]
        loads.append(merged * (chunk / sizes[kept])[:, None])
    return loads


def _merge(tokens: Array, chunk: int) -> NDArray[np.int64]:
    """Where each run of chunks begins that together are at most `chunk` tokens."""
    starts, size = [0], tokens[0]
    for i, more in enumerate(tokens[1:], 1):
        if size + more > chunk:
            starts.append(i)
            size = 0
        size += more
    return np.array(starts)
