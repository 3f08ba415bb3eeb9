"""Give replaced layers the static half that an opened plan has for them."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from . import cold_ops, core
from .errors import InvalidArgument, UnsupportedLayer
from .layers import PROJECTIONS, PackedCopies, weight_arrays
from .replacement import ReplacedLayer
from .static import StaticLayer
from .static_load import Opened
from .static_path import StaticPath
from .static_shared import LINEARS as SHARED_LINEARS
from .static_shared import PROJECTIONS as SHARED_PROJECTIONS
from .static_shared import SharedLayer
from .stats import Counters, StaticCounters
from .weights import PLAIN_KEYS, Linear, UnknownFormat, describe, own_class

Found = list[tuple[Any, ReplacedLayer]]  # modules and their rows


@dataclass
class Prepared:
    """What is put on the layers once nothing can fail any more.

    Attributes:
        shared: modules of shared experts that are to be swapped, and their rows.
    """

    opened: Opened
    paths: dict[str, StaticPath] = field(default_factory=dict)
    packed: dict[str, PackedCopies] = field(default_factory=dict)
    shared: Found = field(default_factory=list)

    def attach(self, rows: list[ReplacedLayer]) -> None:
        """Give the swapped layers their static paths and packed experts."""
        for row in rows:
            if row._layer is None:
                continue
            if row.kind == "experts":
                row._layer.packed = self.packed.get(row.name)
                row.residency = self._residency(row)
            if (path := self.paths.get(row.name)) is not None:
                row._layer.static, row._layer.counters.static = path, path.counters
                row.backend = self._backend(row, path)

    def _backend(self, row: ReplacedLayer, path: StaticPath) -> str:
        """What computes the layer: its programs, or where none came up, the cold path."""
        if path.layer is not None and path.layer.groups:
            return str(self.opened.backend)
        return "cpu" if row.kind == "experts" and not path.ops else "stock"

    def _residency(self, row: ReplacedLayer) -> str:
        if self.opened.plan.executor == "static":
            return self.opened.residency(row.name)
        count, copies = len(self.opened.plan.layer(row.name).packed), self.packed.get(row.name)
        if not count:
            return "all in place"
        if copies is None or not copies.nbytes:
            return f"all in place ({core.isa()} has no packed layout for the plan's {count})"
        return f"{count} of {row.experts} experts packed, {copies.nbytes / 2**20:.0f} MiB"


def detach(rows: list[ReplacedLayer]) -> None:
    """Take from swapped layers what an earlier plan gave them."""
    for row in rows:
        if row._layer is not None:
            row._layer.static = row._layer.packed = row._layer.counters.static = None
            row._layer.follower = row._layer.counters.schedule = None


def prepare(
    opened: Opened, found: Found, modules: dict[str, Any], logged: set[str], stored: bool
) -> Prepared:
    """Everything that the plan's layers need; changes nothing.

    Args:
        found: the expert layers.
        modules: all modules of the model, by path.
        stored: the experts stay on disk, where they cannot change.

    Raises:
        UnsupportedLayer: a layer has adapters, or its scores are needed and do not reach us.
    """
    if stored and opened.plan.executor == "cpu":
        raise InvalidArgument(
            "this plan is for copies of experts in memory, beside them; with expert_memory leave "
            "it out"
        )
    prepared = Prepared(opened)
    ops = opened.backend is not None and cold_ops.on_gpu() and not stored
    for module, row in found:
        if ops and row.name not in opened.static:
            row.backend, row._layer = "stock", None  # the CPU kernels have no part here
        if row._layer is not None and (copies := pack(opened, module, row)) is not None:
            prepared.packed[row.name] = copies
        static = opened.static.get(row.name)
        if static is None or row._layer is None:
            continue
        check_scores(static, row)
        plain = row._layer.linears
        linears = read_linears(module, row.name, PROJECTIONS[row._layer.kind], plain)
        linears = [] if stored else linears
        prepared.paths[row.name] = path_of(static, linears, logged, ops)
    for planned in opened.plan.layers:
        shared = planned.shared
        if shared is None or (static := opened.static.get(shared.name)) is None:
            continue
        module = modules[shared.name]
        linears = read_linears(module, shared.name, SHARED_PROJECTIONS, SHARED_LINEARS)
        path = prepared.paths[shared.name] = path_of(static, linears, logged, ops)
        layer = SharedLayer(shared.name, Counters(shared.name, logged), path)
        dtype, bits = describe(module[SHARED_PROJECTIONS[0]])
        family = planned.facts.family
        backend = str(opened.backend)
        row = ReplacedLayer(shared.name, "shared", family, None, dtype, bits, backend, layer, 1)
        prepared.shared.append((module, row))
    return prepared


def pack(opened: Opened, module: Any, row: ReplacedLayer) -> PackedCopies | None:
    """Copies of the experts that a plan for the CPU wants packed."""
    planned = opened.plan.layer(row.name)
    if not planned.packed or planned.static_from is None:
        return None
    linears = read_linears(module, row.name, PROJECTIONS[row._layer.kind], row._layer.linears)
    mx.eval(weight_arrays(linears))
    try:
        matrices = [linear.matrix(linear.arrays) for linear in linears]
    except UnknownFormat:
        return None  # the layer runs stock code, and says so
    copies = tuple(core.Packed(matrix, planned.packed) for matrix in matrices)
    return PackedCopies(copies, planned.static_from, planned.packed)


def path_of(static: StaticLayer, linears: list[Linear], logged: set[str], ops: bool) -> StaticPath:
    counters = StaticCounters(static.name, logged, static.cold_groups)
    return StaticPath(static, counters, weight_arrays(linears), ops)


def check_scores(static: StaticLayer, row: ReplacedLayer) -> None:
    wanted = static.overflow == "prune" and static.importance == "router"
    if wanted and not row._layer.deferred:
        raise UnsupportedLayer(
            f"{row.name}: overflow='prune' with importance='router' needs the router's scores, "
            f"and the family {row.family!r} does not hand them to its experts' output; use "
            "importance='norm', or overflow='spill'"
        )


def read_linears(
    module: Any, name: str, projections: tuple[str, ...], plain: frozenset[type]
) -> list[Linear]:
    """The projections' weights; UnsupportedLayer for any that is no plain linear layer."""
    for projection in projections:
        child = module[projection]
        if own_class(child) not in plain or not child.keys() <= PLAIN_KEYS:
            raise UnsupportedLayer(
                f"{name}.{projection} is a {type(child).__name__}, and a plan's programs hold the "
                "weights of plain linear layers: replace with the plan before adapters are added, "
                "or without one"
            )
    return [Linear(module[p], f"{name}.{p}") for p in projections]
