"""Programs of made-up experts for Core ML, to be timed."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from . import core
from .activations import Activation
from .compile_worker import WRITTEN, Worker, stage_weights
from .coreml_load import demotion
from .coreml_trial import Trials, compiled_functions, trial_request
from .experts_weights import ExpertWeights
from .mil_program import INPUT, OUTPUT
from .package_form import container, functions, system_macos
from .tune_static import SCALE

logger = logging.getLogger("mlx_moe")


class MadeUpPrograms:
    """As `HostPrograms`, for core.CoreMLExecutor: written, compiled, and loaded first by a process
    of its own, as the programs of a plan are.

    Args:
        system, trials: stand-ins for tests.
    """

    def __init__(self, directory: Path, *, system: Any = core, trials: Any = None):
        self.executor = system.CoreMLExecutor()
        self._directory = directory
        self._worker, self._trials = Worker(), trials or Trials()
        self._count = 0
        self._macos = 14 if system_macos() == 14 else 15

    def load(self, hidden: int, inner: int, experts: int, capacities: Sequence[int]) -> int:
        self._count += 1
        stage = self._directory / str(self._count)
        stage.mkdir()
        compiled = stage / "compiled.mlmodelc"
        random = np.random.default_rng(0)
        gate, up, down = (
            (SCALE * random.standard_normal(shape, np.float32)).astype(np.float16)
            for shape in ((inner, hidden), (inner, hidden), (hidden, inner))
        )
        ordered = sorted(capacities)
        # Not one object many times: equal weights could be stored once, and be read once.
        own = [ExpertWeights(gate + np.float16(e), up, down) for e in range(experts)]
        stage_weights(stage, own)
        self._worker.request(
            {
                "id": f"of {experts} experts",
                "directory": str(stage),
                "experts": list(range(experts)),
                "activation": asdict(Activation("swiglu")),
                "capacities": ordered,
                "weights": "fp16",
                "macos": self._macos,
            }
        )
        places, package = functions(ordered, self._macos), container(WRITTEN, self._macos)
        reply = self._trials.request(
            trial_request(stage / package, compiled, places, experts, hidden, INPUT, OUTPUT)
        )
        placement = {
            int(c): {unit: (int(a), int(b)) for unit, (a, b) in units.items()}
            for c, units in reply["placement"].items()
        }
        if elsewhere := demotion(placement):
            logger.warning("%d experts of %d x %d: %s", experts, hidden, inner, elsewhere)
        loaded = compiled_functions(compiled, places)
        return int(self.executor.load(loaded, experts, hidden, INPUT, OUTPUT))

    def close(self) -> None:
        self._worker.close()
        self._trials.close()
