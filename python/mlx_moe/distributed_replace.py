"""Share a model's experts over ranks: who has what, loading it, and letting go of the rest."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn

from .distributed import Ranks, ranks_of
from .distributed_counts import Histograms
from .distributed_layer import Part, RankedExperts
from .distributed_placement import Placement, place_layer
from .distributed_weights import InMemory, OnDisk, Source, arrays_of, local_module
from .durable import digest
from .errors import InvalidArgument, UnsupportedLayer
from .find import find_modules, named_modules, switch_kind
from .identity import identity_of_files, identity_of_model
from .layers import LINEARS, PROJECTIONS, Layer
from .placeholders import mark, placeholder
from .replacement import ReplacedLayer
from .store_files import PARTS, Checkpoint, stored_experts
from .store_names import loaded, tensor_names
from .weights import quantisation

log = logging.getLogger("mlx_moe")

PATIENCE = 20.0  # timeouts that loading may take one rank longer than another


@dataclass
class Shared:
    """What `share` prepared, to put on the modules; nothing of that fails.

    Attributes:
        note: what this rank holds, in words.
    """

    layers: list[tuple[Any, RankedExperts]]
    note: str

    def attach(self) -> None:
        for module, ranked in self.layers:
            keep = ranked.originals is not None
            found = {}
            for child in PROJECTIONS[ranked.kind]:
                mark(module[child], f"{ranked.name}.{child}")
                for part in PARTS:
                    if (array := module[child].get(part)) is not None:
                        found[child, part] = array
                        ranked.held[child, part] = placeholder(array.shape, array.dtype)
                        module[child][part] = ranked.held[child, part]
            if keep:
                ranked.originals = found
            state = module.__dict__["_moe_layer"]
            state.ranked, state.counters.ranks = ranked, ranked.counters


def is_shared(module: Any) -> bool:
    """Whether the module's experts are shared over ranks."""
    layer = module.__dict__.get("_moe_layer")
    return layer is not None and layer.ranked is not None


def unshare(module: Any, state: Any) -> None:
    """Put the arrays back that the module had."""
    ranked = state.ranked if isinstance(state, Layer) else None
    if ranked is not None and ranked.originals is not None:
        for (child, part), array in ranked.originals.items():
            mark(module[child], None)
            module[child][part] = array


def check_restorable(modules: Sequence[Any]) -> None:
    """Raise InvalidArgument where the weights of other ranks were let go."""
    for module in filter(is_shared, modules):
        layer = module.__dict__["_moe_layer"]
        if layer.ranked.originals is None:
            raise InvalidArgument(
                f"{layer.name}: the experts of other ranks were let go and cannot be put back; "
                "load the model again (with checkpoint=..., files are there to read them from)"
            )


def check_alone(**others: Any) -> None:
    """Raise InvalidArgument for arguments that several ranks cannot have."""
    for name, value in others.items():
        if value is not None:
            raise InvalidArgument(
                f"{name} and group do not go together: {name} is of one machine; leave one away"
            )


def share(
    model: nn.Module,
    found: Sequence[tuple[Any, ReplacedLayer]],
    group: Any,
    checkpoint: str | Path | None,
    target: str,
) -> Shared:
    """Agree with the other ranks and load this one's experts; changes nothing.

    Args:
        found: the layers to share, with their rows.
        group: of `mx.distributed`, or `Ranks`.
        checkpoint: the model's directory, of which only this rank's experts are read; None: they
            are cut out of the arrays in memory.
        target: "cpu" or "stock".

    Raises:
        RankMismatch: another version, model or option elsewhere.
        RankLost: a rank ended.
        UnsupportedLayer: adapters, or a layer that was shared already.
    """
    ranks = ranks_of(group)
    sharded = {
        id(module)
        for _, module, parent in find_modules(model, lambda m: switch_kind(m) is not None)
        if _is_sharded(parent)
    }
    mine = [(m, row) for m, row in found if id(m) not in sharded and row._layer is not None]
    for module, row in mine:
        _check(module, row)
    for module, row in found:
        if row._layer is not None:  # otherwise left to stock: strict=False
            row.backend = target
        if id(module) in sharded and target == "stock":
            row._layer = None
        if row._layer is not None:  # replaced earlier: the state that counts goes on
            row._layer = module.__dict__.get("_moe_layer", row._layer)
    histograms = Histograms(ranks.counts)
    placements = [_placement(module, row, ranks, target, histograms) for module, row in mine]
    _agree(model, ranks, checkpoint, mine, placements, target)
    whole = _uncut(ranks, target, mine, placements)
    eager = target == "cpu"
    loaded = []
    with ExitStack() as stack:
        disk = None
        if checkpoint is not None:
            files = Checkpoint.open(checkpoint)
            disk = stack.enter_context(OnDisk(files, tensor_names(model, files)))
        load = partial(_load, ranks=ranks, disk=disk, eager=eager, model=model)
        for number, ((module, row), placement) in enumerate(zip(mine, placements, strict=True)):
            ranked = load(module, row, number, placement)
            if checkpoint is not None:
                ranked.originals = {}
            loaded.append((module, ranked))
    held = ranks.gather(sum(ranked.nbytes for _, ranked in loaded), PATIENCE)  # all have loaded
    ranks.share_random_state()
    total = sum(ranked.total_bytes for _, ranked in loaded)
    note = f"{ranks}: of {total / 1e6:,.1f} MB of expert weights, "
    note += ", ".join(f"{h / max(total, 1):.1%} on rank {rank}" for rank, h in enumerate(held))
    note += f"; {whole}" if whole else ""
    if sharded:
        note += f"; {len(sharded)} layers are summed by their own blocks (shard())"
    return Shared(loaded, note)


def _is_sharded(block: Any) -> bool:
    """Whether a block sums over ranks itself."""
    return getattr(block, "sharding_group", None) is not None


def _check(module: Any, row: ReplacedLayer) -> None:
    layer = row._layer
    if is_shared(module):
        raise UnsupportedLayer(
            f"{row.name}: its experts are shared over ranks already; restore_moe_layers(model) "
            "first"
        )
    for child in PROJECTIONS[layer.kind]:
        if type(module[child]) not in layer.linears | LINEARS:
            raise UnsupportedLayer(
                f"{row.name}.{child} is {type(module[child]).__name__}: experts with adapters are "
                "not shared over ranks; fuse them into the model first (mlx_lm.fuse)"
            )


def _placement(
    module: Any, row: ReplacedLayer, ranks: Ranks, target: str, histograms: Histograms
) -> Placement:
    first, last = (module[PROJECTIONS[row._layer.kind][i]] for i in (0, -1))
    experts, inner = (int(n) for n in first["weight"].shape[:2])
    group_size = quantisation(last).group_size if "scales" in last else 0
    # A graph computes other ranks' assignments too, and leaves them out: slices have none.
    split = "all" if target == "stock" and ranks.split == "auto" else ranks.split
    return place_layer(histograms.of(row.name, experts), ranks.size, inner, group_size, split)


def _uncut(
    ranks: Ranks,
    target: str,
    mine: Sequence[tuple[Any, ReplacedLayer]],
    placements: Sequence[Placement],
) -> str:
    """What to say of layers whose experts were to be cut and cannot be, also to the log."""
    if ranks.split == "none" or (ranks.split == "auto" and target != "stock"):
        return ""
    whole = [
        (row.name, p) for (_, row), p in zip(mine, placements, strict=True) if p.shards < ranks.size
    ]
    if not whole:
        return ""
    name, first = whole[0]
    text = (
        f"experts of {len(whole)} layers stay whole: the {first.inner} inner features of {name} "
        f"are cut at multiples of {first.unit}, which gives no slice for each of {ranks.size} ranks"
    )
    log.warning("%s", text)
    return text


def _agree(
    model: nn.Module,
    ranks: Ranks,
    checkpoint: str | Path | None,
    mine: Sequence[tuple[Any, ReplacedLayer]],
    placements: Sequence[Placement],
    target: str,
) -> None:
    if checkpoint is not None:
        identity: Any = {**asdict(identity_of_files(checkpoint)), "name": None}
    elif any(map(_is_sharded, named_modules(model).values())):
        identity = None  # the ranks' weights differ, and are not ours to share
    else:
        identity = asdict(identity_of_model(model))
    layers = [
        [row.name, row._layer.kind, [list(a.shape) for a in arrays_of([module], row._layer.kind)]]
        for module, row in mine
    ]
    parts = [[p.parts.tolist(), p.shards, p.unit] for p in placements]
    ranks.agree(
        {
            "the backend": target,
            "the model": digest(identity)[:12],
            "the list of layers": digest(layers)[:12],
            "the placement of experts": digest(parts)[:12],
            "whether a checkpoint is given": checkpoint is not None,
        },
        PATIENCE,
    )


def _load(
    module: Any,
    row: ReplacedLayer,
    number: int,
    placement: Placement,
    *,
    model: nn.Module,
    ranks: Ranks,
    disk: OnDisk | None,
    eager: bool,
) -> RankedExperts:
    layer = row._layer
    by_width: dict[int, list[Any]] = {}
    for piece in placement.slices(ranks.rank):
        by_width.setdefault(piece.end - piece.begin, []).append(piece)
    source = _source(model, module, row, disk)
    experts = len(placement.parts)
    modules = [local_module(module, layer.kind, p, source) for p in by_width.values()]
    return RankedExperts(
        ranks,
        number,
        layer,
        placement,
        [Part.of(m, layer, p, experts) for m, p in zip(modules, by_width.values(), strict=True)],
        eager=eager,
        nbytes=sum(a.nbytes for a in arrays_of(modules, layer.kind)),
        total_bytes=sum(a.nbytes for a in arrays_of([module], layer.kind)),
    )


def _source(model: nn.Module, module: Any, row: ReplacedLayer, disk: OnDisk | None) -> Source:
    if disk is None:
        return InMemory(module)
    kind = PROJECTIONS[row._layer.kind]
    try:
        for child in kind:
            for part in PARTS:
                parameter = f"{row.name}.{child}.{part}"
                if module[child].get(part) is not None and parameter not in disk.names:
                    raise UnsupportedLayer(f"{parameter} is computed while the model is loaded")
        return disk.layer(stored_experts(disk.checkpoint, row.name, module, kind, disk.names))
    except UnsupportedLayer as error:
        why = str(error)  # a log that keeps the error itself keeps these arrays
    log.warning("%s; its experts are read whole, and what is not this rank's let go", why)
    weights = loaded(model, disk.checkpoint)  # the module's own would stay, once evaluated
    names = [(child, part) for child in kind for part in PARTS]
    found = {(c, p): weights.get(f"{row.name}.{c}.{p}") for c, p in names}
    return InMemory(module, {key: a for key, a in found.items() if a is not None})
