"""llama.cpp on the CPU: (t(3 layers) - t(1 layer)) / 2 of a synthetic model.

llama.cpp computes its last layer only for the tokens whose logits are asked for (the last one
here), and a model has an embedding, a head and overheads: the difference leaves two whole layers.
What remains beside the experts is tiny attention (one 32-wide head) and the router.
"""

from __future__ import annotations

import ctypes
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from worker import Missing, Sample, serve
from workload import SHAPES

try:
    import gguf_model
    import llama_cpp as ll
except ImportError as reason:
    MISSING: str | None = f"llama-cpp-python or gguf is not installed ({reason})"
else:
    MISSING = None


class Model:
    """One loaded GGUF file with a context of `max_tokens` in one batch."""

    def __init__(self, path: Path, dim: int, max_tokens: int, threads: int):
        self._model = ll.llama_model_load_from_file(
            str(path).encode(), ll.llama_model_default_params()
        )
        params = ll.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = max(max_tokens, 256)
        params.n_threads = params.n_threads_batch = threads
        self._context = ll.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self._batch = ll.llama_batch_init(params.n_batch, dim, 1)

    def run(self, x: np.ndarray) -> float:
        """Seconds of one forward of hidden states [T, d], from an empty cache."""
        batch, tokens = self._batch, len(x)
        batch.n_tokens = tokens
        ctypes.memmove(batch.embd, np.ascontiguousarray(x, np.float32).ctypes.data, x.nbytes)
        for i in range(tokens):
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = i, 1, 0
            batch.logits[i] = i == tokens - 1
        ll.llama_memory_clear(ll.llama_get_memory(self._context), False)
        start = time.perf_counter()
        if ll.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        ll.llama_synchronize(self._context)
        return time.perf_counter() - start


def build(options: Namespace) -> tuple[Sample, dict[str, Any]]:
    if MISSING:
        raise Missing(MISSING)
    shape, folder = SHAPES[options.shape], Path(options.cache)
    ll.llama_backend_init()
    one, three = (
        Model(
            gguf_model.model_file(folder, shape, options.format, layers),
            shape.dim,
            options.max_tokens,
            options.threads,
        )
        for layers in (1, 3)
    )
    rng = np.random.default_rng(3)
    calls_made = 0

    def both(tokens: int) -> tuple[float, float]:
        nonlocal calls_made
        calls_made += 1
        x = gguf_model.rows(rng, shape, options.routing, tokens, 3, calls_made)
        return three.run(x), one.run(x)

    def sample(tokens: int, calls: int) -> list[float]:
        both(tokens)
        seconds = np.array([both(tokens) for _ in range(calls)])
        long, short = np.median(seconds, axis=0)
        return [(long - short) / 2]  # of medians: a difference of single calls is mostly noise

    both(options.max_tokens)
    about = {"version": ll.__version__, "threads": options.threads, "layers": 3}
    return sample, {**about, "system": ll.llama_print_system_info().decode().strip()}


if __name__ == "__main__":
    serve(build)
