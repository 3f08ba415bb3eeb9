"""kt-kernel's MoE (AMXInt4: int8 activations, per-channel 4-bit weights quantised online).

The compiled extension of the wheel is loaded alone: the Python package around it needs torch.
"""

from __future__ import annotations

import glob
import importlib.util
import sys
import time
from argparse import Namespace
from types import ModuleType
from typing import Any

import numpy as np
from worker import Missing, Sample, serve
from workload import SHAPES, Shape, random_rows, route, to_bf16

CLASSES = {"q4": "AMXInt4_MOE", "bf16": "AMXBF16_MOE"}


def extension() -> ModuleType:
    package = importlib.util.find_spec("kt_kernel")
    if package is None or not package.submodule_search_locations:
        raise Missing("kt-kernel is not installed")
    files = glob.glob(f"{package.submodule_search_locations[0]}/_kt_kernel_ext_amx*.so")
    if not files:
        raise Missing("this kt-kernel has no AMX extension")
    spec = importlib.util.spec_from_file_location("kt_kernel_ext", files[0])
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["kt_kernel_ext"] = module
    spec.loader.exec_module(module)
    return module


def worker_pool(kt: ModuleType, threads: int) -> Any:
    config = kt.WorkerPoolConfig()
    config.subpool_count, config.subpool_numa_map = 1, [0]
    config.subpool_thread_count = [threads]
    return kt.CPUInfer(config)


def random_moe(
    kt: ModuleType,
    pool: Any,
    kind: str,
    shape: Shape,
    on_gpu: np.ndarray,
    max_tokens: int,
    layers: int,
) -> list[Any]:
    """Layers quantised from one set of random bf16 weights; each keeps its own packed copy.

    `on_gpu` [E] bool, all false, is read at every call and must outlive the layers.
    """
    rng = np.random.default_rng(5)
    e, d, h = shape.experts, shape.dim, shape.hidden
    gate, up = (to_bf16(random_rows(rng, e, h, d) / np.sqrt(d)) for _ in range(2))
    down = to_bf16(random_rows(rng, e, d, h) / np.sqrt(h))
    mapping = np.arange(e, dtype=np.int64)
    built = []
    for layer in range(layers):
        config = kt.moe.MOEConfig(e, shape.top_k, d, h, on_gpu.ctypes.data)
        config.layer_idx, config.pool, config.max_len = layer, pool.backend_, max_tokens
        config.gate_proj, config.up_proj = gate.ctypes.data, up.ctypes.data
        config.down_proj = down.ctypes.data
        moe = getattr(kt.moe, kind)(config)
        pool.submit(moe.load_weights_task(mapping.ctypes.data))
        pool.sync()
        built.append(moe)
    return built


def build(options: Namespace) -> tuple[Sample, dict[str, Any]]:
    if options.format not in CLASSES:
        raise Missing(f"kt-kernel has no {options.format} layer")
    kt, shape, kind = extension(), SHAPES[options.shape], CLASSES[options.format]
    pool = worker_pool(kt, options.threads)
    on_gpu = np.zeros(shape.experts, np.bool_)
    max_tokens = max(options.max_tokens, 32)
    layers = random_moe(kt, pool, kind, shape, on_gpu, max_tokens, options.layers)
    rng = np.random.default_rng(3)
    calls_made = 0

    def one(tokens: int) -> float:
        nonlocal calls_made
        layer, calls_made = calls_made % len(layers), calls_made + 1
        ids = route(shape, options.routing, tokens, layer, calls_made).astype(np.int64)
        x = to_bf16(random_rows(rng, tokens, shape.dim))
        scores = np.full((tokens, shape.top_k), 1 / shape.top_k, np.float32)
        out, count = np.zeros_like(x), np.array([tokens], np.int32)
        start = time.perf_counter()
        pool.submit(
            layers[layer].forward_task(
                count.ctypes.data,
                shape.top_k,
                ids.ctypes.data,
                scores.ctypes.data,
                x.ctypes.data,
                out.ctypes.data,
                False,
            )
        )
        pool.sync()
        seconds = time.perf_counter() - start
        if not out.any():
            raise RuntimeError("kt-kernel returned zeros")
        return seconds

    def sample(tokens: int, calls: int) -> list[float]:
        assert not on_gpu.any()
        one(tokens)
        return [one(tokens) for _ in range(calls)]

    return sample, {"kind": kind, "threads": options.threads, "layers": len(layers)}


if __name__ == "__main__":
    serve(build)
