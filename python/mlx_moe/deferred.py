"""The experts' output before it is computed, so that the weighted sum can be fused into it."""

from typing import Any, Protocol

import mlx.core as mx

from .weights import FLOATS, promote


class Experts(Protocol):
    """A forward that has been asked for and not yet run."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    def run(self, scores: mx.array | None = None) -> mx.array:
        """Outputs [..., k, D]; or with `scores` [..., k, 1] their weighted sum [..., D]."""


class Deferred:
    """Stands for `y` of shape [..., k, D], or for `y * scores` with scores [..., k, 1].

    `(y * scores).sum(axis=-2)` becomes one fused C++ call; `shape` and `dtype` (stock's, with
    its promotion) are known without computing; anything else acts on the computed array.
    """

    __slots__ = ("_array", "_experts", "_scores", "_y", "dtype", "shape")

    def __init__(
        self, experts: Experts, y: "Deferred | None" = None, scores: mx.array | None = None
    ):
        """The output of `experts`, or `y * scores` of an earlier `y`."""
        self._experts = experts
        self._y = y
        self._scores = scores
        self._array: mx.array | None = None
        self.shape = experts.shape
        self.dtype = experts.dtype if scores is None else promote(experts.dtype, scores.dtype)

    def __mlx_array__(self) -> mx.array:
        if self._array is None:
            if self._y is None or self._scores is None:
                self._array = self._experts.run()
            else:
                self._array = self._y.__mlx_array__() * self._scores
        return self._array

    def __mul__(self, other: Any) -> Any:
        if self._array is None and self._scores is None and _is_scores(other, self.shape):
            return Deferred(self._experts, self, other)
        return self.__mlx_array__() * other

    __rmul__ = __mul__

    def sum(self, axis: Any = None, keepdims: bool = False, **kwargs: Any) -> mx.array:
        weighted = self._y is not None and self._y._array is None and self._array is None
        if weighted and axis in (-2, len(self.shape) - 2) and not keepdims:
            return self._experts.run(self._scores)
        return self.__mlx_array__().sum(axis, keepdims, **kwargs)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__mlx_array__(), name)


def _is_scores(other: Any, shape: tuple[int, ...]) -> bool:
    return (
        isinstance(other, mx.array)
        and other.dtype in FLOATS
        and tuple(other.shape) == (*shape[:-1], 1)
    )


def _delegate(name: str) -> Any:
    def method(self: Deferred, *args: Any, **kwargs: Any) -> Any:
        args = tuple(a.__mlx_array__() if isinstance(a, Deferred) else a for a in args)
        return getattr(self.__mlx_array__(), name)(*args, **kwargs)

    method.__name__ = name
    return method


# Python looks operators up on the class, past __getattr__.
_OPERATORS = """
    add radd sub rsub truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul neg abs invert
    eq ne lt le gt ge and or xor lshift rshift getitem setitem iter bool int float
    array dlpack dlpack_device repr str format
"""
for _name in [f"__{name}__" for name in _OPERATORS.split()]:
    if hasattr(mx.array, _name):
        setattr(Deferred, _name, _delegate(_name))
