"""What a plan has to compile, one task for each group, and where the weights come from."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils

from .activations import Activation, recognise
from .coreml import Weights, check_capacities, check_size, expert_bytes
from .durable import digest
from .errors import InvalidArgument, UnsupportedLayer
from .experts_weights import ExpertWeights, expert_weights, release
from .identity import ModelIdentity, check_same, identity_of_files, identity_of_model
from .loading import missing_model_is_an_error, trust_option
from .plan import Plan

FORM = 1  # of the programs that we write; another makes every package of before out of date
SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
PROGRAM_BYTES = 4000  # of text for an expert in one function, about


@dataclass(frozen=True)
class Task:
    """One package to write.

    Attributes:
        id: the group's name in the plan.
        layer: dotted path of the module that has the weights.
        kind: "glu" or "mlp".
        split: range of the `width` inner features.
        capacities: ascending; one function for each.
        macos: 15, or 14 for a package for each capacity.
        biases: whether the projections have them.
    """

    id: str
    layer: str
    kind: str
    experts: tuple[int, ...]
    split: tuple[int, int]
    hidden: int
    width: int
    capacities: tuple[int, ...]
    biases: bool
    weights: Weights
    identity: ModelIdentity
    macos: int

    @property
    def inner(self) -> int:
        return self.split[1] - self.split[0]

    @property
    def bytes(self) -> int:
        """What the group takes on the disk, about: the blobs and the programs."""
        copies = 1 if self.macos == 15 else len(self.capacities)
        text = PROGRAM_BYTES * len(self.experts) * len(self.capacities)
        return copies * self.blob_bytes + text

    @property
    def package_bytes(self) -> int:
        """What one of its packages takes."""
        return self.bytes if self.macos == 15 else self.bytes // len(self.capacities)

    @property
    def blob_bytes(self) -> int:
        return len(self.experts) * expert_bytes(self.shapes(), self.weights)

    @property
    def raw_bytes(self) -> int:
        """The experts' weights in float16."""
        return len(self.experts) * expert_bytes(self.shapes(), "fp16")

    def recipe(self, activation: Activation) -> str:
        """Digest of all that the package depends on: the model by what it is, not by its name."""
        return digest(
            {
                **asdict(replace(self, identity=replace(self.identity, name=""))),
                "form": FORM,
                "activation": asdict(activation),
            }
        )

    def check(self) -> None:
        """Raise InvalidArgument for a group that cannot become a package."""
        what = f"group {self.id!r} of {self.layer}"
        if not SAFE_ID.fullmatch(self.id):
            raise InvalidArgument(f"{what}: its id must be a file name of letters, digits, . _ -")
        begin, end = self.split
        if not self.experts or not 0 <= begin < end <= self.width:
            raise InvalidArgument(f"{what}: experts {self.experts}, split {self.split}")
        check_capacities(self.capacities, what)
        check_size(self.blob_bytes, what)

    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """An expert's, as `ExpertWeights.shapes`."""
        gate, first = self.kind == "glu", self.split[0] == 0
        matrix = (self.inner, self.hidden)
        return {
            "gate": matrix if gate else None,
            "up": matrix,
            "down": matrix[::-1],
            "gate_bias": (self.inner,) if gate and self.biases else None,
            "up_bias": (self.inner,) if self.biases else None,
            "down_bias": (self.hidden,) if self.biases and first else None,
        }


def tasks_of(plan: Plan, weights: Weights, macos: int) -> list[Task]:
    """The packages that a plan asks for, in its order.

    Raises:
        InvalidArgument: the plan has no groups, or one that cannot be compiled.
    """
    tasks = []
    for layer, group in plan.groups():
        facts, shared = layer.facts, None if group in layer.groups else layer.shared
        task = Task(
            id=group.id,
            layer=shared.name if shared else layer.name,
            kind="glu" if shared else facts.kind,
            experts=group.experts,
            split=group.split,
            hidden=facts.hidden,
            width=shared.inner if shared else facts.inner,
            capacities=layer.capacities(group),
            biases=facts.biases and not shared,
            weights=weights,
            identity=plan.identity,
            macos=macos,
        )
        task.check()
        tasks.append(task)
    if not tasks:
        raise InvalidArgument(
            "the plan has no group to compile: no expert is hot, and run without it the model is "
            f"as fast{_why(plan)}. `mlx_moe plan --device m2-max --force-hot 0.6`, for one, makes "
            "experts hot all the same"
        )
    if len({task.id for task in tasks}) < len(tasks):
        raise InvalidArgument("two groups of the plan have the same id")
    return tasks


def _why(plan: Plan) -> str:
    reason = next((layer.reason for layer in plan.layers if layer.reason), None)
    return f" ({reason})" if reason else ""


class WeightSource:
    """The model whose weights are compiled, read layer by layer.

    Attributes:
        owned: it was loaded here, lazily, and each layer is let go of after its last group.
    """

    def __init__(self, model: nn.Module | str | Path, trust_remote_code: bool = False):
        """Raises ModelNotFound for a path or repository that cannot be loaded."""
        self.owned = not isinstance(model, nn.Module)
        self.model: nn.Module
        if isinstance(model, nn.Module):
            self.model, self.path = model, None
        else:
            load = mlx_lm.utils.load_model
            with missing_model_is_an_error(model):
                self.path = Path(mlx_lm.utils._download(str(model)))
                self.model = load(self.path, lazy=True, **trust_option(load, trust_remote_code))[0]
        self.modules = dict(self.model.named_modules())

    def check_identity(self, expected: ModelIdentity) -> None:
        """Raise IdentityMismatch unless this is the plan's model."""
        here = identity_of_files(self.path) if self.path else identity_of_model(self.model)
        check_same(expected, here, "the plan")

    def activation(self, task: Task) -> Activation:
        return recognise(self._module(task), task.kind, task.layer)

    def experts(self, task: Task) -> Iterator[ExpertWeights]:
        """The task's experts, one after the other.

        Raises:
            InvalidArgument: the plan's facts of the layer are not the model's.
            UnsupportedLayer: the layer's weights are in no form that can be compiled.
        """
        module = self._module(task)
        for expert in task.experts:
            found = expert_weights(module, task.kind, expert, task.split, task.layer)
            for key, shape in found.shapes().items():
                if shape != task.shapes()[key]:
                    raise InvalidArgument(
                        f"{task.layer}: {key} of expert {expert} is {shape or 'not there'}, and "
                        f"the plan has it {task.shapes()[key] or 'not there'}: plan this model "
                        "again, without this layer if the plan's facts stay the same"
                    )
            yield found

    def done_with(self, layer: str) -> None:
        """Let go of a layer's weights, if nobody else has the model."""
        if self.owned and layer in self.modules:
            release(self.modules[layer])
            mx.clear_cache()

    def _module(self, task: Task) -> Any:
        module = self.modules.get(task.layer)
        if module is None:
            raise InvalidArgument(
                f"the plan's layer {task.layer!r} is not in the model; plan this model again"
            )
        wanted = ("gate_proj", "up_proj", "down_proj") if task.kind == "glu" else ("fc1", "fc2")
        if missing := [key for key in wanted if key not in module]:
            raise UnsupportedLayer(
                f"{task.layer}: {type(module).__name__} has no {', '.join(missing)}"
            )
        return module
