"""The expert store: reads against the disk, decoding under a limit, first tokens, memory.

A synthetic model of 4-bit experts in a file of `--size`; routing drawn from gpt-oss-20b's domains.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from common import format_seconds, print_machine, write_json

from mlx_moe import core
from mlx_moe.cache_policies import Belady, Simulation
from mlx_moe.store import ExpertStore
from mlx_moe.store_files import PARTS, Checkpoint, Projection, StoredExperts
from mlx_moe.store_forward import Glu

DATA = Path(__file__).parent / "data" / "gpt-oss-20b-experts.json.gz"
LAYERS, EXPERTS, TOP_K, WIDTH = 24, 32, 4, 1024
GROUP = 64
DOMAINS = 6
FILL = 24  # tokens that fill the slots, not timed
CHUNK = 1 << 20
PARTS_OF_IT = ("reads", "decode", "first", "memory", "full")


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


def stored(inner: int) -> list[StoredExperts]:
    found = []
    for layer in range(LAYERS):
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


def open_store(path: Path, inner: int, memory: int, **options: Any) -> ExpertStore:
    experts = stored(inner)
    top_k = {x.name: TOP_K for x in experts}
    checkpoint = Checkpoint.open(path.parent)
    return ExpertStore(checkpoint, experts, memory, top_k=top_k, **options)


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


def sequential(path: Path, seconds: float = 5.0) -> float:
    """Bytes a second of dd-like reads past the page cache, 1 MiB at a time."""
    import mmap

    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer, done, begun = mmap.mmap(-1, CHUNK), 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        got = os.preadv(file, [buffer], done)
        if got < CHUNK:
            break
        done += got
    rate = done / (time.perf_counter() - begun)
    os.close(file)
    return rate


def throughput(path: Path, inner: int, direct: bool) -> float:
    """Bytes a second of the store, a layer's experts at a time, in slots that were used before."""
    everything = np.arange(EXPERTS, dtype=np.int32)
    with open_store(path, inner, path.stat().st_size // 8, direct=direct, prefetch=False) as store:
        for layer in range(LAYERS // 6):
            store._core.acquire(layer, everything).release()
        drop_cache(path)
        before, begun = store.stats()["bytes_read"], time.perf_counter()
        for layer in range(LAYERS):
            store._core.acquire(layer, everything).release()
        return float((store.stats()["bytes_read"] - before) / (time.perf_counter() - begun))


def decode(store: ExpertStore, ids: np.ndarray) -> list[float]:
    return through(list(store.layers.values()), ids)


def through(layers: list[Any], ids: np.ndarray) -> list[float]:
    """Seconds of each token through all layers."""
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


def stacked(path: Path, inner: int) -> list[list[core.Matrix]]:
    """Matrices over arrays in memory, as replaced layers have them."""
    tensors = mx.load(str(path))
    mx.eval(tensors)
    return [
        [
            core.Matrix(
                *(tensors[f"{x.name}.{name}.{part}"] for part in PARTS[:3]),
                bits=4,
                group_size=GROUP,
            )
            for name in x.projections
        ]
        for x in stored(inner)
    ]


class InMemory:
    """A layer whose experts are all there, with the call of a stored one."""

    def __init__(self, experts: StoredExperts, matrices: list[core.Matrix]):
        self.experts, self.matrices = experts, matrices

    def run(self, x: mx.array, ids: mx.array, scores: Any, forward: Glu) -> mx.array:
        return forward.whole(x, ids, scores, self.matrices)


def belady(before: np.ndarray, ids: np.ndarray, slots: int) -> float:
    """Share of hits of the optimum over `ids`, when `before` came before them."""
    first = np.arange(LAYERS)[:, None] * EXPERTS
    steps = np.sort(np.concatenate([before, ids]).astype(np.int64) + first, axis=-1)
    steps = steps.reshape(-1, TOP_K)
    bank = Simulation(np.ones(LAYERS * EXPERTS), slots, Belady(LAYERS * EXPERTS, steps.ravel()))
    outcomes = [bank.access(step) for step in steps][len(before) * LAYERS :]
    return sum(o.hits for o in outcomes) / (len(ids) * LAYERS * TOP_K)


def peak(path: Path, inner: int, memory: int, tokens: int) -> int:
    """Bytes of memory that a process of its own had at most, less before it opened the store."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import store\n"
        "from pathlib import Path\n"
        "store.memory_child(Path(sys.argv[2]), *map(int, sys.argv[3:]))\n"
    )
    given = [str(Path(__file__).parent), str(path), str(inner), str(memory), str(tokens)]
    ran = subprocess.run(
        [sys.executable, "-c", code, *given], capture_output=True, text=True, check=True
    )
    return int(ran.stdout)


def memory_child(path: Path, inner: int, memory: int, tokens: int) -> None:
    before = most_memory()
    with open_store(path, inner, memory, direct=True, policy="lfu") as store:
        decode(store, draws(tokens))
        forward = Glu(next(iter(store.layers.values())).experts)
        x = mx.random.normal((512, WIDTH)).astype(mx.bfloat16)
        ids = mx.argsort(mx.random.uniform(shape=(512, EXPERTS)))[:, :TOP_K].astype(mx.uint32)
        ids = mx.contiguous(ids)
        mx.eval(x, ids)
        for layer in store.layers.values():
            mx.eval(layer.run(x, ids, None, forward))
    print(most_memory() - before)


def most_memory() -> int:
    """Bytes that this process had at most; getrusage would count its parent's, too."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


def first_token(path: Path, inner: int, memory: int, counts: Path, warm: bool) -> float:
    """Seconds from opening the store to the first token, after half a second of other loading."""
    drop_cache(path)
    begun = time.perf_counter()
    with open_store(path, inner, memory, direct=True, counts=counts, warm=warm) as store:
        time.sleep(0.5)  # the other weights, the tokenizer
        decode(store, draws(40)[-1:])
        return time.perf_counter() - begun - 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=1.0, help="GB of experts (1)")
    parser.add_argument("--tokens", type=int, default=120, help="to decode (120)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--parts", nargs="+", choices=PARTS_OF_IT, default=PARTS_OF_IT)
    parser.add_argument("--json")
    args = parser.parse_args()
    print_machine()
    results: dict[str, Any] = {}
    inner = inner_for(int(args.size * 1e9))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "model.safetensors"
        write_model(path, inner)
        drop_cache(path)
        total = open_total(path, inner)
        print(f"{total / 1e9:.2f} GB in {LAYERS} x {EXPERTS} experts, top-{TOP_K}")
        if "reads" in args.parts:
            measure_reads(path, inner, args.repeats, results)
        if "decode" in args.parts:
            measure_decode(path, inner, total, args.tokens, args.repeats, results)
        if "first" in args.parts:
            measure_first(path, inner, total, Path(folder), args.repeats, results)
        if "memory" in args.parts:
            limit = total // 4
            more = peak(path, inner, limit, 12) - limit
            results["memory_beyond_limit"] = more
            print(f"memory: limit {limit / 1e6:.0f} MB, peak {more / 1e6:+.0f} MB beyond it")
        if "full" in args.parts:
            measure_full(path, inner, args.tokens, args.repeats, results)
    write_json(args.json, results)


def open_total(path: Path, inner: int) -> int:
    with open_store(path, inner, 1 << 40, warm=False) as store:
        return store.total_bytes


def measure_reads(path: Path, inner: int, repeats: int, results: dict[str, Any]) -> None:
    rates: dict[str, list[float]] = {"sequential": [], "direct": [], "cached": []}
    for _ in range(repeats):
        rates["sequential"].append(sequential(path))
        rates["direct"].append(throughput(path, inner, True))
        rates["cached"].append(throughput(path, inner, False))
    base = statistics.median(rates["sequential"])
    for name, found in rates.items():
        rate = statistics.median(found)
        results[f"read_{name}"] = found
        print(f"read {name:<11} {rate / 1e9:6.2f} GB/s  {rate / base:.2f} x sequential")


def measure_decode(
    path: Path, inner: int, total: int, tokens: int, repeats: int, results: dict[str, Any]
) -> None:
    quarter, best = total // 4, []
    slot = total // (LAYERS * EXPERTS)
    sides: dict[str, tuple[int, dict[str, Any]]] = {
        "no cache": (TOP_K * slot, {"policy": "lru", "prefetch": False}),
        "25 % lru": (quarter, {"policy": "lru", "prefetch": False}),
        "25 % lfu": (quarter, {"policy": "lfu", "prefetch": False}),
        "25 % lfu, counts": (quarter, {"policy": "lfu", "prefetch": False}),
        "25 % lfu, reads ahead": (quarter, {"policy": "lfu"}),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    hits: dict[str, list[dict[str, Any]]] = {}
    for repeat in range(repeats):
        ids, before = draws(tokens, repeat), draws(FILL, repeat, seed=2)
        best.append(belady(before, ids, LAYERS * EXPERTS // 4))
        counts = path.with_name(f"counts-{repeat}.npz")
        with open_store(path, inner, quarter, direct=True, counts=counts, policy="lfu") as store:
            decode(store, draws(64, repeat, seed=1))  # other tokens of the domain
        for name, (memory, options) in sides.items():
            if name.endswith("counts"):
                options = options | {"counts": copied(counts)}
            with open_store(path, inner, memory, direct=True, **options) as store:
                decode(store, before)  # until the slots are full
                first = store.stats()
                seconds[name].append(statistics.mean(decode(store, ids)))
                hits.setdefault(name, []).append(since(first, store.stats()))
    base = statistics.median(seconds["no cache"])
    optimum = statistics.mean(best)
    print(f"decode, {tokens} tokens of {repeats} domains; belady hits {optimum:.3f}")
    for name, found in seconds.items():
        median = statistics.median(found)
        line = f"  {name:<22} {format_seconds(median):>8} a token  {base / median:6.2f} x no cache"
        if name in hits:
            rate = statistics.mean(stats["hit_rate"] for stats in hits[name])
            ahead = [sum(s[f"prefetch_{k}"] for s in hits[name]) for k in ("useful", "issued")]
            line += f"  hits {rate:.3f}, {rate / optimum:.2f} x belady"
            line += f", ahead {ahead[0]} of {ahead[1]}"
        print(line)
    results["decode"] = {"seconds": seconds, "stats": hits, "belady": best}


def measure_full(path: Path, inner: int, tokens: int, repeats: int, results: Any) -> None:
    """Every expert in a slot, against arrays in memory, in turns of ten tokens."""
    matrices = stacked(path, inner)
    memory = [InMemory(x, m) for x, m in zip(stored(inner), matrices, strict=True)]
    with open_store(path, inner, 1 << 40, direct=True, prefetch=False) as store:
        decode(store, all_experts())
        sides: dict[str, list[Any]] = {"slots": list(store.layers.values()), "arrays": memory}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(repeats):
            ids = draws(tokens, repeat)
            for part in range(0, len(ids), 10):
                for name, layers in sides.items():
                    seconds[name] += through(layers, ids[part : part + 10])
    slots, arrays = (statistics.median(seconds[name]) for name in sides)
    print(
        f"all experts in memory: slots {format_seconds(slots)} a token, arrays "
        f"{format_seconds(arrays)}: {arrays / slots:.2f} x their tokens/s"
    )
    results["full"] = seconds


def since(first: dict[str, Any], stats: dict[str, Any]) -> dict[str, Any]:
    names = ("hits", "misses", "prefetch_useful", "prefetch_issued", "bytes_read", "stall_seconds")
    found = {name: stats[name] - first[name] for name in names}
    asked = found["hits"] + found["misses"] + found["prefetch_useful"]
    return found | {"hit_rate": found["hits"] / asked}


def copied(counts: Path) -> Path:
    """A copy that the store may add to."""
    return Path(shutil.copy(counts, counts.with_name("copy.npz")))


def all_experts() -> np.ndarray:
    """Tokens that ask for every expert once."""
    every = np.arange(EXPERTS, dtype=np.uint32).reshape(-1, 1, TOP_K)
    return np.repeat(every, LAYERS, axis=1)


def measure_first(
    path: Path, inner: int, total: int, folder: Path, repeats: int, results: dict[str, Any]
) -> None:
    counts, memory = folder / "counts.npz", total // 4
    with open_store(path, inner, memory, direct=True, counts=counts, policy="lfu") as store:
        decode(store, draws(30))
    sides: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats):
        for warm in sides:
            sides[warm].append(first_token(path, inner, memory, counts, warm))
    cold, warmed = (statistics.median(sides[w]) for w in (False, True))
    results["first_token"] = {"cold": sides[False], "warmed": sides[True]}
    print(
        f"first token: {format_seconds(cold)}, with counts {format_seconds(warmed)}: "
        f"{cold / warmed:.2f} x faster"
    )


if __name__ == "__main__":
    main()
