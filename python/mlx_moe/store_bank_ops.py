"""The forward of an expert layer in MLX's operations, its experts in slots of MLX's arrays.

Slot numbers are data: a layer is computed by its own class with the slots' arrays in place of its
weights and slot numbers in place of expert ids. Where a limit holds all experts, that is a lazy
graph with one lookup more. Else the ids are read on the host.
"""

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .bank_store import BankStore
from .custom import begin, evaluate, token_rows
from .errors import InvalidArgument
from .store_files import PARTS, StoredExperts
from .weights import shallow_copy

QUEUED = 8  # outputs of a layer that may not have been computed yet


def bank_layers(store: BankStore) -> dict[str, "BankLayer"]:
    """The layers of a store by name."""
    return {x.name: BankLayer(store, i, x) for i, x in enumerate(store.experts)}


class BankLayer:
    """One expert layer of a `BankStore`."""

    def __init__(self, store: BankStore, number: int, experts: StoredExperts):
        self.store, self.number, self.experts = store, number, experts
        self.bank, self.fits = store.banks[number], store.fits(number)
        self.table: mx.array | None = None  # the slot of each expert, once all are there for good

    def __deepcopy__(self, memo: dict[int, Any]) -> "BankLayer":
        return self

    def run(self, module: Any, x: mx.array, indices: mx.array) -> mx.array:
        """Outputs [..., k, D] of `module`'s own class, lazy where nothing has to be read.

        x [..., K] and indices [..., k], not evaluated. Raises CannotEvaluate while MLX traces,
        unless all experts are there for good.
        """
        store = self.store
        store.check_process()
        with store.lock:
            if self.table is None and self.fits and (store.slots(self.number) >= 0).all():
                self.table = mx.array(store.slots(self.number))
            if self.table is not None:
                return self._graph(module, x, self.table[indices])
            evaluate(indices)
            chosen = np.array(indices.astype(mx.int32)).reshape(-1, indices.shape[-1])
            if chosen.size and not 0 <= chosen.min() <= chosen.max() < self.experts.experts:
                raise InvalidArgument(f"{self.experts.name}: an expert of {self.experts.experts}")
            store.counts.add(self.number, chosen)
            wanted = np.unique(chosen).astype(np.int64)
            if len(wanted) > self.bank.slots:
                return self._in_waves(module, x, chosen, wanted).reshape(*indices.shape, -1)
            slots = store.acquire(self.number, wanted)[chosen].reshape(indices.shape)
            y = self._graph(module, x, mx.array(slots))
            begin(y)  # in this thread's stream; then any thread can wait for it
            queued = store.queued[self.number]
            queued.append(y)
            if len(queued) > QUEUED:
                evaluate(queued.pop(0))
            return y

    def _graph(self, module: Any, x: mx.array, slots: mx.array) -> mx.array:
        """The module's own forward over slots in place of experts."""
        base = type(module)._moe_base
        twin = shallow_copy(module, base)
        for child in self.experts.projections:
            linear = module[child]
            other = shallow_copy(linear, type(linear)._moe_base)
            for part in PARTS:
                if other.get(part) is not None:
                    other[part] = self.bank.arrays[child, part]
            twin[child] = other
        y: mx.array = base.__call__(twin, x, slots)
        return y

    def _in_waves(
        self, module: Any, x: mx.array, ids: NDArray[Any], wanted: NDArray[np.int64]
    ) -> mx.array:
        """Some experts at a time; rows are put in the order of the assignments at last."""
        rows, places, flat, k = [], [], ids.reshape(-1), ids.shape[1]
        x = token_rows(x, x.shape[-1])
        for at in range(0, len(wanted), self.bank.slots):
            part = wanted[at : at + self.bank.slots]
            slots = self.store.acquire(self.number, part)
            place = np.flatnonzero(np.isin(flat, part))
            chosen = mx.array(slots[flat[place]][:, None])
            y = self._graph(module, x[mx.array(place // k)], chosen)
            evaluate(y)  # before the next part is read into its slots
            rows.append(y.reshape(len(place), -1))
            places.append(place)
        order = np.empty(len(flat), np.int32)
        order[np.concatenate(places)] = np.arange(len(flat), dtype=np.int32)
        return mx.concatenate(rows)[mx.array(order)]
