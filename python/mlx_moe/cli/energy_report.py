"""What the sides of a benchmark took in energy and processor time, for each token."""

from functools import reduce
from operator import add
from typing import Any

from ..energy import Use
from ..tables import table
from .measure import SIDES, Measurement, Workload

PHASES = ("prefill", "decode")


def report(measurement: Measurement, workload: Workload, missing: str | None) -> dict[str, Any]:
    """By phase and side, means over the trials; None for a side without trials.

    Args:
        missing: why there are no rails, None if there are.
    """
    tokens = {
        "prefill": workload.batch_size * workload.prompt_tokens,
        "decode": workload.batch_size * workload.generation_tokens,
    }
    found: dict[str, Any] = {"missing": missing}
    for phase in PHASES:
        found[phase] = {}
        for side in SIDES:
            trials = [trial.use[phase] for trial in measurement.trials[side]]
            of_all = len(trials) * tokens[phase]
            found[phase][side] = _per_token(reduce(add, trials), of_all) if trials else None
    return found


def _per_token(use: Use, tokens: int) -> dict[str, Any]:
    return {
        "joules_per_token": {rail: j / tokens for rail, j in sorted(use.joules.items())} or None,
        "cpu_seconds_per_token": use.cpu_seconds / tokens,
        "cycles_per_token": None if use.cycles is None else use.cycles / tokens,
    }


def as_text(energy: dict[str, Any]) -> str:
    sides = [(phase, side, energy[phase][side]) for phase in PHASES for side in SIDES]
    rails = sorted({rail for _, _, use in sides if use for rail in use["joules_per_token"] or {}})
    rows = []
    for phase, side, use in sides:
        if use is None:
            continue
        joules = use["joules_per_token"] or {}
        cycles = use["cycles_per_token"]
        rows.append(
            [
                f"{phase} {side}",
                *(f"{joules[rail]:.3g}" if rail in joules else None for rail in rails),
                f"{1e3 * use['cpu_seconds_per_token']:.3g}",
                "not available" if cycles is None else f"{cycles / 1e6:.3g}",
            ]
        )
    header = ["a token", *(f"J {rail}" for rail in rails), "CPU ms", "Mcycles"]
    whole = "joules are the whole machine's, also what other programs took"
    note = whole if rails else f"rail not available: {energy['missing']}"
    return f"{table(header, rows)}\n{note}"
