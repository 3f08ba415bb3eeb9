"""Error of the kernels against float64 on the same (dequantised) weights, beside stock's own.

    python benchmarks/precision.py [--isa amx vnni avx512 avx2 scalar] [--json F]

Relative Frobenius error of the weighted sum of a layer's experts. Limits: f32 1e-5; bf16 and f16
no more than 1.5 times stock's error on the same input, or 4.5e-3 where stock cannot run. Exits 1
on a miss. Each instruction set runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from common import print_machine, write_json
from mlx_lm.models.switch_layers import SwitchGLU
from workload import Shape, random_rows, route

from mlx_moe import core
from mlx_moe.tables import table

SHAPE = Shape(experts=8, top_k=2, dim=512, hidden=256)
TOKENS = (1, 7, 96)
LIMIT_F32, LIMIT_WITHOUT_STOCK, TIMES_STOCK = 1e-5, 4.5e-3, 1.5
DTYPES = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}
FORMATS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    **{f"affine {bits}-bit g64": {"bits": bits, "group_size": 64} for bits in (2, 3, 4, 5, 6, 8)},
    "mxfp4": {"mode": "mxfp4", "bits": 4, "group_size": 32},
    "mxfp8": {"mode": "mxfp8", "bits": 8, "group_size": 32},
    "nvfp4": {"mode": "nvfp4", "bits": 4, "group_size": 16},
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def layer(quantisation: dict[str, Any] | None, dtype: mx.Dtype) -> nn.Module:
    """A SwitchGLU of random weights in the format."""
    mx.random.seed(5)
    glu = SwitchGLU(SHAPE.dim, SHAPE.hidden, SHAPE.experts)
    glu.set_dtype(dtype)
    if quantisation:
        nn.quantize(glu, **quantisation)
    mx.eval(glu.parameters())
    return glu.eval()


def float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def weights(projection: nn.Module) -> np.ndarray:
    """[E, N, K] f64, dequantised in f32 from the stored scales (exact to 1e-7)."""
    if "scales" not in projection:
        return float64(projection.weight)
    scales, biases = projection.scales, projection.get("biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return float64(
        mx.dequantize(
            projection.weight,
            scales,
            biases,
            group_size=projection.group_size,
            bits=projection.bits,
            mode=projection.mode,
            dtype=mx.float32,
        )
    )


def exact(glu: nn.Module, x: mx.array, ids: np.ndarray, scores: mx.array) -> np.ndarray:
    """[T, D] f64."""
    gate, up, down = (weights(glu[name]) for name in PROJECTIONS)
    rows, share = float64(x), float64(scores)
    out = np.zeros_like(rows)
    for t, experts in enumerate(ids):
        for j, e in enumerate(experts):
            g = gate[e] @ rows[t]
            out[t] += share[t, j] * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ rows[t])))
    return out


def matrix(projection: nn.Module) -> Any:
    if "scales" not in projection:
        return core.Matrix(projection.weight)
    return core.Matrix(
        projection.weight,
        projection.scales,
        projection.get("biases"),
        mode=projection.mode,
        bits=projection.bits,
        group_size=projection.group_size,
    )


def error(got: mx.array, want: np.ndarray) -> float:
    return float(np.linalg.norm(float64(got) - want) / np.linalg.norm(want))


@dataclass(frozen=True)
class Case:
    """One format, dtype and number of tokens; the same random numbers in every process."""

    fmt: str
    dtype: str
    tokens: int

    def build(self) -> tuple[nn.Module, mx.array, np.ndarray, mx.array]:
        dtype, rng = DTYPES[self.dtype], np.random.default_rng(self.tokens)
        glu = layer(FORMATS[self.fmt], dtype)
        x = mx.array(random_rows(rng, self.tokens, SHAPE.dim)).astype(dtype)
        ids = route(SHAPE, "zipf", self.tokens, 0, 0)
        scores = mx.array(rng.random((self.tokens, SHAPE.top_k), np.float32)).astype(dtype)
        mx.eval(x, scores)
        return glu, x, ids, scores

    def ours(self) -> float:
        glu, x, ids, scores = self.build()
        out = mx.zeros(x.shape, x.dtype)
        mx.eval(out)
        matrices = [matrix(glu[name]) for name in PROJECTIONS]
        core.swiglu_combine(x, mx.array(ids), scores, *matrices, out)
        return error(out, exact(glu, x, ids, scores))

    def stock(self) -> float | None:
        """None where stock refuses the format."""
        glu, x, ids, scores = self.build()
        try:
            y = (glu(x, mx.array(ids.astype(np.uint32))) * scores[..., None]).sum(-2)
            mx.eval(y)
        except (RuntimeError, ValueError):
            return None
        return error(y, exact(glu, x, ids, scores))

    def limit(self, stock: float | None) -> float:
        if self.dtype == "f32":
            return LIMIT_F32
        return LIMIT_WITHOUT_STOCK if stock is None else TIMES_STOCK * stock


CASES = [
    Case(fmt, dtype, tokens)
    for fmt, quantisation in FORMATS.items()
    for dtype in DTYPES
    for tokens in TOKENS
    if not (quantisation and "mode" in quantisation and dtype == "f16")
]


def ours_with(isa: str) -> list[float]:
    """Errors of all cases with one instruction set, from a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--only-ours"],
        env={**os.environ, "MLX_MOE_ISA": isa},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{isa}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", nargs="+", default=core.isas())
    parser.add_argument("--only-ours", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.only_ours:
        print(json.dumps([case.ours() for case in CASES]))
        return 0
    print_machine()
    ours = {isa: ours_with(isa) for isa in options.isa}
    stock = [case.stock() for case in CASES]
    rows, missed = [], 0
    for i, (case, theirs) in enumerate(zip(CASES, stock, strict=True)):
        limit = case.limit(theirs)
        mine = [ours[isa][i] for isa in options.isa]
        ok = all(value <= limit for value in mine)  # a NaN is a miss
        missed += not ok
        cells = [f"{value:.2g}" for value in mine]
        shown = "refuses" if theirs is None else f"{theirs:.2g}"
        name = f"{case.fmt}, {case.dtype}, {case.tokens} tokens"
        rows.append([name, *cells, shown, f"{limit:.2g}", "ok" if ok else "MISS"])
    header = ["error against float64", *options.isa, "stock", "limit", ""]
    print(table(header, rows))
    print(f"{len(CASES) - missed} of {len(CASES)} within the limits")
    write_json(options.json, [dict(zip(header, row, strict=True)) for row in rows])
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
