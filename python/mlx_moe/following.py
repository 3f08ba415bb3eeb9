"""Live re-planning on one machine: a replaced model's experts change places as routing shifts."""

from collections.abc import Mapping
from typing import Any

from . import core
from .calibration import Calibration
from .errors import InvalidArgument
from .find import named_modules
from .follower import OPTIONS, Follower
from .following_groups import groups_follower
from .following_packed import packed_follower
from .layers import Layer
from .plan import read_plan
from .replacement import Replacement
from .schedule import Replan, Scheduler


def follow(
    replacement: Replacement,
    plan: Any,
    *,
    calibration: Calibration | None = None,
    **options: float,
) -> "Following":
    """Keep a plan up with routing while the model runs.

    A `Scheduler` for each layer counts what forwards route, of those that are large enough for
    the plan to matter, and when routing has shifted and it pays:

    - on a static executor switches groups of experts off, whose assignments then run on the cold
      path, and on again. Programs exist only for the experts that were planned; one group of a
      layer stays on. No weights move.
    - with packed copies on CPU kernels (AMX) drops the copies of experts that went cold and packs
      as many others, which takes the time that packing was measured to take.

    A change that cannot be made (no memory, adapters on the experts) is logged and counted, and
    the forward runs with what is there. Following again ends an earlier following.

    Costs are those of the plan's device. What ran where is in `replacement.stats()`.

    Args:
        replacement: of a model that was replaced with `plan`. Experts that stay on disk
            (expert_memory) are not followed.
        plan: that plan, or its path.
        calibration: that the plan was made from; without it the plan is first looked at again
            once enough was routed.
        options: of `Scheduler`: shift, noise, hysteresis, horizon, minimum.

    Returns:
        The `Following`: logs, statistics and `stop()`.

    Raises:
        InvalidArgument: no layer has groups or packed copies that can change places, the plan is
            not the one that is running, or an option is not one of the above.
        UnsupportedLayer: packed experts have adapters.
    """
    loaded = read_plan(plan)
    unknown = options.keys() - OPTIONS
    if unknown:
        raise InvalidArgument(f"follow has no option {min(unknown)!r}")
    modules = named_modules(replacement._model)
    planned = {layer.name: (number, layer) for number, layer in enumerate(loaded.layers)}
    followers: dict[str, Follower] = {}
    for row in replacement.layers:  # from what the plan says, not from where another left it
        if row.kind == "experts" and row._layer is not None:
            stop(row._layer)
    for row in replacement.layers:
        layer = row._layer
        if row.kind != "experts" or layer is None or layer.stored or row.name not in planned:
            continue
        number, own = planned[row.name]
        loads = None if calibration is None else calibration.loads(number).mean(axis=0)
        whole = None if layer.static is None else layer.static.layer
        if whole is not None and whole.groups:
            followers[row.name] = groups_follower(row, own, loaded, loads, options)
        elif layer.packed is not None and layer.packed.nbytes:
            module = modules[row.name]
            followers[row.name] = packed_follower(row, own, loaded, loads, options, module)
    if not followers:
        raise InvalidArgument(
            "nothing here can change places: follow needs a model that was replaced with a plan "
            "whose static path is in use, or whose packed copies the CPU kernels have a layout for "
            f"({core.isa()} is in use)"
        )
    for row in replacement.layers:
        if row.name in followers:
            row._layer.follower = followers[row.name]
            row._layer.counters.schedule = followers[row.name].stats
    return Following(replacement, followers)


class Following:
    """A model whose plan is kept up with routing; `follow` makes it.

    Attributes:
        layers: the `Scheduler` of each layer, by name.
    """

    def __init__(self, replacement: Replacement, followers: Mapping[str, Follower]):
        self._replacement, self._followers = replacement, followers

    @property
    def layers(self) -> dict[str, Scheduler]:
        return {name: f.scheduler for name, f in self._followers.items()}

    @property
    def log(self) -> list[tuple[str, Replan]]:
        """Every re-plan with its layer's name, layer by layer."""
        return [(name, replan) for name, s in self.layers.items() for replan in s.log]

    def stats(self) -> dict[str, dict[str, float]]:
        """`Scheduler.stats()` of each layer, and the changes that `failed`."""
        return {name: follower.stats() for name, follower in self._followers.items()}

    def stop(self) -> None:
        """Back to the plan as it was, for good."""
        for row in self._replacement.layers:
            follower = self._followers.get(row.name)
            if follower is None or row._layer is None or row._layer.follower is not follower:
                continue
            stop(row._layer)


def stop(layer: Layer) -> None:
    """The layer as it was planned, followed no more."""
    follower, layer.follower = layer.follower, None
    if follower is not None:
        follower.restore()
