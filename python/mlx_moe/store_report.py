"""What a store did."""

import weakref
from typing import Any


class StoreReport:
    """The figures of a store while it is there, and then the last ones."""

    def __init__(self, store: Any, facts: dict[str, Any]):
        self._store, self._facts = weakref.ref(store), facts
        self.final: dict[str, Any] = {}

    def check_files(self) -> None:
        """As `ExpertStore.check_files`."""
        if (store := self._store()) is not None:
            store.check_files()

    def stats(self) -> dict[str, Any]:
        """As `ExpertStore.stats`."""
        store = self._store()
        return self.final if store is None or self.final else store.stats()

    def figures(self, found: dict[str, Any], prefetch: bool | None) -> dict[str, Any]:
        asked = found["hits"] + found["misses"] + found["prefetch_useful"]
        rate = found["hits"] / asked if asked else None
        return found | {"hit_rate": rate} | self._facts | {"prefetch": prefetch}
