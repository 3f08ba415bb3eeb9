"""Documents as tokens, whatever they were read from."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np

from .errors import InvalidArgument


@dataclass(frozen=True)
class Document:
    """Tokens that are prefilled together, and the place of their file in the corpus's `paths`."""

    tokens: list[int]
    source: int = 0


@runtime_checkable
class Corpus(Protocol):
    """Documents, the same ones each time, such as `TextFiles`.

    Attributes:
        paths: what they are read from.
        size, bytes_read: bytes of all that, and of what was read so far; 0 where unknown.
        digests: SHA-256 (hex) of what was read so far of each path.
    """

    @property
    def paths(self) -> Sequence[Any]: ...
    @property
    def size(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def digests(self) -> list[str]: ...
    def __iter__(self) -> Iterator[Document]: ...


class TokenLists:
    """Documents that are tokens already: sequences of ids, or one such sequence."""

    paths = ("tokens",)
    size = bytes_read = 0

    def __init__(self, tokens: Any):
        self._documents = [tokens] if _is_one_document(tokens) else tokens
        self._hash = hashlib.sha256()

    @property
    def digests(self) -> list[str]:
        return [self._hash.hexdigest()]

    def __iter__(self) -> Iterator[Document]:
        self._hash = hashlib.sha256()
        for document in self._documents:
            ids = np.array(document)
            if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
                raise InvalidArgument(
                    f"a document is {ids.dtype} {list(ids.shape)}; expected token ids [T]"
                )
            self._hash.update(ids.astype("<i8").tobytes())
            if ids.size:
                yield Document(ids.tolist())


def _is_one_document(tokens: Any) -> bool:
    if isinstance(tokens, (mx.array, np.ndarray)):
        return tokens.ndim == 1
    return isinstance(tokens, (list, tuple)) and all(isinstance(t, int) for t in tokens)


def parts(corpus: Corpus, most: int, total: int | None) -> Iterator[Document]:
    """The corpus's documents in parts of `most` tokens, `total` tokens of all together."""
    left = total
    for document in corpus:
        for start in range(0, len(document.tokens), most):
            tokens = document.tokens[start : start + most][:left]
            yield replace(document, tokens=tokens)
            if left is not None:
                left -= len(tokens)
                if left <= 0:
                    return
