"""Run mlx_moe and stock mlx-lm commands as a user does: in processes of their own."""

import subprocess
import sys
from pathlib import Path

import mlx_lm

TIMEOUT = 120  # seconds; a command on the example model takes a few

# A background shell, as CI may be, has its children ignore Ctrl-C.
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
# A Mac's MLX computes on the GPU unless told otherwise; the kernels serve a CPU-only MLX.
ON_CPU = "import mlx.core as mx, runpy, sys; mx.set_default_device(mx.cpu); del sys.argv[0]; "
# The example model's calls are small in f32: as in conftest.py, on the kernels all the same.
KERNELS = "from mlx_moe import layers; layers.SMALLEST = layers.SMALLEST_QUANTISED = 0; "
MODULE = (
    INTERRUPTIBLE
    + ON_CPU
    + KERNELS
    + "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def command(module: str, *arguments: object) -> list[str]:
    """The command line of `python -m module arguments` with MLX on the CPU."""
    return [sys.executable, "-c", MODULE, module, *map(str, arguments)]


def call(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(module, *arguments), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def generated_text(stdout: str) -> str:
    """What mlx_lm.generate prints between its two rulers."""
    return stdout.split("=" * 10)[1]


def write_float32(source: Path, target: Path) -> Path:
    """The model of `source` in f32, where stock and replaced layers agree on every token."""
    mlx_lm.convert(str(source), str(target), dequantize=True, dtype="float32")
    return target
