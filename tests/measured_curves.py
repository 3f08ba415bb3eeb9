"""Measurements of a made-up device."""

from dataclasses import replace

from mlx_moe.devices import Device
from mlx_moe.measured import Measurements, Sample

D, F = 2048, 768


def sample(path: str, experts: int, rows: int, seconds: float, inner: int = F) -> Sample:
    return Sample(path, D, inner, experts, rows, seconds)


CURVES = Measurements(
    "2026-01-31",
    0.5,
    (
        *(sample("static", g, c, 1e-6 * g * c + 1e-4) for g in (1, 4) for c in (32, 128)),
        *(sample("cold", 16, rows, 16e-5 * rows) for rows in (1, 10, 100)),
        *(sample("cold", 16, rows, 1.0, inner=64 * F) for rows in (1, 10)),
    ),
)


def measured(device: Device, curves: Measurements) -> Device:
    return replace(device, name="mine", measurements=curves)
