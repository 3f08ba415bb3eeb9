"""Put the experts of a model into a store, and back into the model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .bank_store import BankStore
from .errors import InvalidArgument, UnsupportedLayer
from .expert_memory import ExpertMemory
from .find import named_modules
from .identity import identity_of_files
from .layers import PROJECTIONS
from .machine import as_size
from .placeholders import is_made_of_one, mark, placeholder
from .replacement import ReplacedLayer
from .store import ExpertStore, StoredLayer
from .store_bank import Shapes
from .store_bank_ops import BankLayer, bank_layers
from .store_counts import counts_path
from .store_files import (
    PARTS,
    Checkpoint,
    StoredExperts,
    expert_bytes,
    slot_bytes,
    stored_experts,
)
from .store_names import convert_command, tensor_names
from .store_report import StoreReport
from .stored_layer import Stored
from .stored_linear import stored_linear
from .weights import PLAIN_KEYS, own_class

Found = list[tuple[Any, ReplacedLayer]]  # modules and their rows


@dataclass
class PreparedStore:
    """A store that is open for a model which is not changed yet."""

    store: ExpertStore | BankStore
    stored: dict[str, Stored]
    note: str

    def attach(self, found: Found) -> None:
        """Put the placeholders into the modules, whose rows have their state by now."""
        for module, row in found:
            if row._layer is None:  # left to stock
                continue
            stored = self.stored[row.name]
            row._layer.stored = stored
            for (child, key), array in stored.placeholders.items():
                linear = module[child]
                linear[key] = array
                mark(linear, f"{row.name}.{child}")
                linear.__class__ = stored_linear(own_class(linear), "scales" in linear)


def open_store(
    model: nn.Module,
    found: Found,
    memory: ExpertMemory,
    checkpoint: str | Path | None,
    ops: bool,
) -> PreparedStore:
    """Find the experts of `found` in a checkpoint and open a store of them; changes nothing.

    Args:
        ops: for MLX's own operations, else for the CPU kernels.

    Raises:
        InvalidArgument: no limit, or no checkpoint.
        UnsupportedLayer: the family's loader, or the format's, computes the experts from what is
            in the files, or a layer has adapters.
        MemoryLimit, ModelNotFound, CorruptFile, ReadFailed: see `ExpertStore`.
    """
    memory.check()
    found = [(module, row) for module, row in found if row._layer is not None]
    if checkpoint is None:
        raise InvalidArgument(
            "expert_memory needs the directory that the model was loaded from: give checkpoint=PATH"
        )
    directory = Path(checkpoint)
    files = Checkpoint.open(directory)
    names = tensor_names(model, files)
    experts = [_experts(files, names, directory, module, row) for module, row in found]
    shapes = {row.name: _shapes(module, row) for module, row in found}
    size = {e.name: _expert_bytes(shapes[e.name]) if ops else slot_bytes(files, e) for e in experts}
    total = sum(e.experts * size[e.name] for e in experts)
    others = sum(facts.nbytes for facts in files.tensors.values()) - expert_bytes(files, experts)
    limit = memory.bytes(total, others)
    identity = identity_of_files(directory)
    how: dict[str, Any] = {
        "top_k": {row.name: row.top_k for _, row in found if row.top_k},
        "policy": memory.policy,
        "counts": counts_path(identity) if memory.counts else None,
        "identity": identity,
    }
    store: ExpertStore | BankStore
    layers: Mapping[str, StoredLayer | BankLayer]
    if ops:
        store = BankStore(files, experts, shapes, limit, **how)
        layers = bank_layers(store)
    else:
        how |= {"prefetch": memory.prefetch, "direct": memory.direct}
        store = ExpertStore(files, experts, limit, **how)
        layers = store.layers
    stored = {
        row.name: Stored(layers[row.name], _placeholders(module, row)) for module, row in found
    }
    return PreparedStore(store, stored, _note(limit, total, directory))


def _shapes(module: Any, row: ReplacedLayer) -> Shapes:
    """Of one expert's arrays, by projection and part."""
    return {
        (child, key): (tuple(array.shape[1:]), array.dtype)
        for child in PROJECTIONS[row._layer.kind]
        for key, array in module[child].items()
        if key in PARTS and array is not None
    }


def _expert_bytes(shapes: Shapes) -> int:
    return sum(math.prod(shape) * dtype.size for shape, dtype in shapes.values())


def _note(limit: int, total: int, directory: Path) -> str:
    if limit >= total:
        return f"experts: all {as_size(total)} fit, read from {directory} as they are needed"
    share = f"{as_size(limit)} of {as_size(total)}"
    return f"experts: at most {share} in memory, the others stay in {directory}"


def _experts(
    files: Checkpoint,
    names: Mapping[str, Sequence[str]],
    directory: Path,
    module: Any,
    row: ReplacedLayer,
) -> StoredExperts:
    layer = module.__dict__.get("_moe_layer", row._layer)  # knows foreign classes from before
    projections = PROJECTIONS[layer.kind]
    for child in projections:
        linear = module[child]
        if own_class(linear) not in layer.linears or not linear.keys() <= PLAIN_KEYS:
            raise UnsupportedLayer(
                f"{row.name}.{child} is a {type(linear).__name__}, and experts that stay on disk "
                "are plain linear layers: adapters on them need the experts in memory"
            )
        for key in PARTS:
            parameter = f"{row.name}.{child}.{key}"
            if linear.get(key) is not None and parameter not in names:
                raise UnsupportedLayer(
                    f"{parameter} is computed while the model is loaded and is in the files in "
                    "another form, so its experts cannot be read one by one. A copy that can: "
                    f"{convert_command(directory)}"
                )
    return stored_experts(files, row.name, module, projections, names)


def _placeholders(module: Any, row: ReplacedLayer) -> dict[tuple[str, str], mx.array]:
    return {
        (child, key): placeholder(array.shape, array.dtype)
        for child in PROJECTIONS[row._layer.kind]
        for key, array in module[child].items()
        if key in PARTS and array is not None
    }


def is_stored(module: Any) -> bool:
    layer = module.__dict__.get("_moe_layer")
    return getattr(layer, "stored", None) is not None


def report_of(found: Found) -> StoreReport | None:
    """The figures of the store that the modules' experts are in."""
    for module, _ in found:
        if is_stored(module):
            return module.__dict__["_moe_layer"].stored.layer.store.report
    return None


def _given_back(array: mx.array, placeholder: mx.array, parts: list[mx.array]) -> mx.array:
    """The weights where a module has the placeholder, or what was made of it (in the dtype that
    it was cast to); an array of the user's stays."""
    if array is not placeholder and not is_made_of_one(array):
        return array
    weights = parts[0] if len(parts) == 1 else mx.stack(parts)
    return weights if array.dtype == weights.dtype else weights.astype(array.dtype)


def restore_experts(model: nn.Module) -> None:
    """Give stored layers their weights back, as lazily loaded arrays of the same files.

    Raises FileChanged, with nothing changed, if a file is no longer what it was.
    """
    modules = [module for module in named_modules(model).values() if is_stored(module)]
    if not modules:
        return
    by_store: dict[int, dict[str, mx.array]] = {}
    for module in modules:
        store = module._moe_layer.stored.layer.store
        if id(store) not in by_store:
            store.check_files()
            by_store[id(store)] = store.checkpoint.load()
    for module in modules:
        stored = module.__dict__["_moe_layer"].stored
        arrays = by_store[id(stored.layer.store)]
        for child, projection in stored.layer.experts.projections.items():
            linear = module[child]
            linear = linear.get("linear", linear)  # adapters wrap their base layer
            for key, names in zip(PARTS, projection.names, strict=True):
                if names and (array := linear.get(key)) is not None:
                    parts = [arrays[name] for name in names]
                    linear[key] = _given_back(array, stored.placeholders[child, key], parts)
            linear.__class__ = own_class(linear)
            mark(linear, None)
        module.__dict__["_moe_layer"].stored = None
