"""The synthetic checkpoint that the store is measured on, what is routed to it, and its stores."""

from __future__ import annotations

import gzip
import json
import mmap
import os
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moe.store import ExpertStore
from mlx_moe.store_files import PARTS, Checkpoint, Projection, StoredExperts
from mlx_moe.store_forward import Glu

DATA = Path(__file__).parent / "data" / "gpt-oss-20b-experts.json.gz"
LAYERS, EXPERTS, TOP_K, WIDTH = 24, 32, 4, 1024
GROUP = 64
DOMAINS = 6


def inner_for(size: int) -> int:
    """Features between the projections with which all experts take about `size` bytes."""
    each = size / (LAYERS * EXPERTS * 3 * WIDTH * (0.5 + 4 / GROUP))
    return max(GROUP, round(each / GROUP) * GROUP)


def shapes(inner: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (inner, WIDTH), "up_proj": (inner, WIDTH), "down_proj": (WIDTH, inner)}


def write_model(path: Path, inner: int) -> None:
    """Random experts in one file, written a tensor at a time."""
    rng = np.random.default_rng(0)
    header: dict[str, Any] = {}
    at, kinds = 0, (("weight", "U32", 4), ("scales", "BF16", 2), ("biases", "BF16", 2))
    for layer in range(LAYERS):
        for name, (rows, columns) in shapes(inner).items():
            for part, dtype, each in kinds:
                last = columns // 8 if part == "weight" else columns // GROUP
                length = EXPERTS * rows * last * each
                header[f"layers.{layer}.{name}.{part}"] = {
                    "dtype": dtype,
                    "shape": [EXPERTS, rows, last],
                    "data_offsets": [at, at + length],
                }
                at += length
    text = json.dumps(header).encode()
    scratch = path.with_suffix(".tmp")
    with scratch.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            if name.endswith("weight"):
                file.write(rng.bytes(end - begin))
            else:  # small values, none of them odd: bfloat16 from the upper half of float32
                values = rng.uniform(0.001, 0.002, (end - begin) // 2).astype(np.float32)
                file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(path)


def stored(inner: int, layers: int = LAYERS) -> list[StoredExperts]:
    found = []
    for layer in range(layers):
        projections = {
            name: Projection(
                "affine",
                4,
                GROUP,
                (
                    *((f"layers.{layer}.{name}.{p}",) for p in PARTS[:3]),
                    (),
                    (),
                ),
            )
            for name in shapes(inner)
        }
        outputs = {name: rows for name, (rows, _) in shapes(inner).items()}
        dtypes = dict.fromkeys(projections, (mx.bfloat16,))
        found.append(StoredExperts(f"layers.{layer}", EXPERTS, WIDTH, projections, outputs, dtypes))
    return found


def open_store(
    path: Path, inner: int, memory: int, layers: int = LAYERS, **options: Any
) -> ExpertStore:
    """A store of the first layers."""
    experts = stored(inner, layers)
    top_k = {x.name: TOP_K for x in experts}
    checkpoint = Checkpoint.open(path.parent)
    return ExpertStore(checkpoint, experts, memory, top_k=top_k, **options)


def slot_bytes(path: Path, inner: int) -> int:
    with open_store(path, inner, 1 << 40, warm=False) as store:
        return store.total_bytes // (LAYERS * EXPERTS)


def draws(tokens: int, domain: int = 0, seed: int = 0) -> np.ndarray:
    """[tokens, LAYERS, TOP_K]: experts of one of DOMAINS domains, without replacement."""
    every = list(json.loads(gzip.decompress(DATA.read_bytes()))["domains"].values())
    counts = np.array(every[domain % DOMAINS * len(every) // DOMAINS], np.float64)
    keys = np.log(counts / counts.sum(1, keepdims=True) + 1e-9)
    noise = np.random.default_rng([domain, seed]).gumbel(size=(tokens, *keys.shape))
    return np.argsort(-(keys + noise), axis=-1)[..., :TOP_K].astype(np.uint32)


def drop_cache(path: Path) -> None:
    """Have the file's pages leave the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def touch_memory(size: int) -> None:
    """Have the system own so many bytes of free memory. In a virtual machine the first touch of
    memory that the host has not given yet takes longer than reading it full from a disk."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.ndarray((size,), np.uint8, buffer=memory)[::4096] = 1
    memory.close()


def through(layers: list[Any], ids: np.ndarray) -> list[float]:
    """Seconds of each token, ids [tokens, layers, k], through all layers."""
    forwards = [Glu(layer.experts) for layer in layers]
    x = mx.random.normal((1, WIDTH), key=mx.random.key(0)).astype(mx.bfloat16)
    scores = mx.full((1, TOP_K), 0.25, mx.bfloat16)
    mx.eval(x, scores)
    seconds = []
    for token in ids:
        begun = time.perf_counter()
        for layer, forward, chosen in zip(layers, forwards, token, strict=True):
            mx.eval(layer.run(x, mx.array(chosen[None]), scores, forward))
        seconds.append(time.perf_counter() - begun)
    return seconds


def decode(store: ExpertStore, ids: np.ndarray) -> list[float]:
    return through(list(store.layers.values()), ids)
