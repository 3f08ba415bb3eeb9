"""Types of the C++ core (docstrings: csrc/bindings*.cpp); tests/test_stub.py compares the two."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

class Buffer(Protocol):
    """An evaluated, row-contiguous array on the CPU: mx.array, numpy and others with DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

class Packed:
    def __init__(
        self, matrix: Matrix, experts: Sequence[int], previous: Packed | None = None
    ) -> None: ...
    @property
    def nbytes(self) -> int: ...

class Matrix:
    def __init__(
        self,
        weight: Buffer,
        scales: Buffer | None = None,
        biases: Buffer | None = None,
        *,
        mode: str = "affine",
        bits: int = 0,
        group_size: int = 0,
        global_scale: Buffer | None = None,
        bias: Buffer | None = None,
        packed: Packed | None = None,
    ) -> None: ...
    @property
    def experts(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def mode(self) -> str: ...
    @property
    def bits(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

Tensor = tuple[int, int | None] | None

class Submitted:
    def wait(self) -> list[str]: ...

class StaticExecutor:
    def submit(self, tiles: Sequence[tuple[int, Buffer, Buffer]]) -> Submitted: ...
    @property
    def counts(self) -> dict[str, int]: ...

class HostExecutor(StaticExecutor):
    def __init__(self, *, dispatch_seconds: float = 0.0, in_flight: int = 4) -> None: ...
    def load(
        self,
        blob: str,
        width: int,
        inner: int,
        activation: str,
        capacities: Sequence[int],
        experts: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]],
        parameters: Mapping[str, float] = ...,
    ) -> int: ...
    @property
    def weight_bytes(self) -> int: ...

class CoreMLExecutor(StaticExecutor):
    def __init__(self, *, in_flight: int = 4, surfaces: bool = True) -> None: ...
    def load(
        self,
        functions: Mapping[int, tuple[str, str]],
        groups: int,
        width: int,
        input: str,
        output: str,
    ) -> int: ...
    @property
    def buffers(self) -> dict[str, int]: ...

def coreml_missing() -> str: ...
def coreml_compile(package: str) -> str: ...
def coreml_placement(compiled: str, function: str) -> dict[str, tuple[int, int]]: ...

class Acquired:
    @property
    def matrices(self) -> tuple[Matrix, ...]: ...
    def release(self) -> None: ...
    def __enter__(self) -> Acquired: ...
    def __exit__(self, *args: Any) -> None: ...

class Store:
    def __init__(
        self,
        paths: Sequence[str],
        layers: Sequence[tuple[str, Sequence[tuple[str, int, int, Sequence[Sequence[str]]]]]],
        budget: int,
        *,
        policy: str = "lru",
        period: int = 0,
        counts: Sequence[int] = ...,
        pinned: Sequence[int] = ...,
        readers: int = 4,
        direct: bool = False,
        timeout: float = 60.0,
    ) -> None: ...
    def acquire(self, layer: int, experts: Buffer) -> Acquired: ...
    def prefetch(self, layer: int, experts: Buffer, *, warm: bool = False) -> None: ...
    def resident(self, layer: int) -> list[int]: ...
    def stats(self) -> dict[str, Any]: ...
    def check_files(self) -> None: ...
    def close(self) -> None: ...
    @property
    def idle(self) -> bool: ...
    @property
    def direct(self) -> bool: ...
    @property
    def experts(self) -> list[int]: ...
    @property
    def slot_bytes(self) -> list[int]: ...

class LayerScheduler:
    def __init__(
        self,
        experts: tuple[Any, ...],
        units: Sequence[tuple[Any, ...]],
        *,
        shift: float,
        noise: float,
        hysteresis: float,
        horizon: float,
        minimum: float,
        split_gain: float,
        spread: float,
        serial: bool,
    ) -> None: ...
    def plan(self, histogram: Buffer, counted: float) -> None: ...
    def adopt(self, parts: Buffer, histogram: Buffer, counted: float) -> None: ...
    def observe(self, histogram: Buffer) -> dict[str, Any] | None: ...
    @property
    def placement(self) -> NDArray[np.uint32] | None: ...
    @property
    def counts(self) -> dict[str, Any]: ...

def schedule_place(
    histogram: Buffer,
    units: Sequence[tuple[Any, ...]],
    experts: tuple[Any, ...],
    *,
    split_gain: float = 0.001,
    noise: float = 0.0,
    counting: float = 1.0,
    serial: bool = False,
) -> NDArray[np.uint32]: ...
def schedule_seconds(
    histogram: Buffer,
    units: Sequence[tuple[Any, ...]],
    experts: tuple[Any, ...],
    parts: Buffer,
) -> list[float]: ...
def total_variation(a: Buffer, b: Buffer, expected: bool = False) -> float: ...
def replay(
    experts: Buffer,
    slot_bytes: Buffer,
    layers: Buffer,
    offsets: Buffer,
    ids: Buffer,
    budget: int,
    *,
    policy: str = "lru",
    period: int = 0,
    counts: Sequence[int] = ...,
    pinned: Sequence[int] = ...,
) -> dict[str, Any]: ...
def safetensors(path: str) -> list[tuple[str, str, tuple[int, ...], int, int]]: ...
def addresses(arrays: Sequence[Buffer]) -> list[int]: ...
def isa() -> str: ...
def isas() -> list[str]: ...
def num_threads() -> int: ...
def calls() -> dict[str, int]: ...
def empty(shape: Sequence[int], dtype: str) -> Any: ...
def swiglu(x: Buffer, ids: Buffer, gate: Matrix, up: Matrix, down: Matrix, out: Buffer) -> None: ...
def swiglu_combine(
    x: Buffer, ids: Buffer, scores: Buffer, gate: Matrix, up: Matrix, down: Matrix, out: Buffer
) -> None: ...
def weighted_sum(
    y: Buffer, scores: Buffer, gate: Matrix, up: Matrix, down: Matrix, out: Buffer
) -> None: ...
def grouped(x: Buffer, ids: Buffer, matrix: Matrix, out: Buffer) -> None: ...
def linear(x: Buffer, matrix: Matrix, out: Buffer) -> None: ...
def softmax(scores: Buffer, scale: float, period: int, out: Buffer) -> None: ...
def bucket(ids: Buffer, num_experts: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...
def capacity(
    order: Buffer,
    offsets: Buffer,
    capacities: Buffer,
    importance: Buffer | None = None,
    overflow: Literal["spill", "prune"] = "spill",
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]: ...
def pack(
    x: Buffer,
    kept: Buffer,
    kept_offsets: Buffer,
    experts: Buffer,
    capacity: int,
    k: int,
    dtype: Literal["float16", "bfloat16", "float32"] = "float16",
) -> tuple[NDArray[Any], NDArray[np.int32]]: ...
def pack_groups(
    x: Buffer,
    kept: Buffer | Sequence[Buffer],
    kept_offsets: Buffer | Sequence[Buffer],
    experts: Sequence[Buffer],
    k: int,
    tiles: Sequence[Buffer],
    slots: Sequence[Buffer],
) -> None: ...
def combine(
    rows: Buffer | Sequence[Buffer],
    assignments: Buffer | Sequence[Buffer],
    scores: Buffer,
    out: Buffer,
    accumulate: bool = False,
) -> None: ...
