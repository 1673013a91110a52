"""A database below the cache (Redis, RocksDB, the exported tables): opened when needed, left alone while it is down."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from stages.embeddings.breaker import Breaker
from stages.errors import DependencyError

Found = dict[str, tuple[np.ndarray, np.ndarray]]  # table -> (float32 [N, D], bool [N] found)


class Store(Protocol):
    def read(self, wanted: dict[str, np.ndarray]) -> tuple[Found, bool]: ...

    def close(self) -> None: ...


class Level:
    """One store behind a breaker. A store that fails is closed, and opened again when the breaker lets a call through."""

    def __init__(self, name: str, open_store: Callable[[], Store]) -> None:
        self.name, self._open_store = name, open_store
        self.store: Store | None = None
        self.breaker = Breaker()
        self._opening = threading.Lock()

    def use(self, action: Callable[[Any], tuple[Any, bool]]) -> tuple[Any, bool]:
        """-> what `action` gives: a result, and whether it is whole; (None, False) when the level is down or fails now."""
        if not self.breaker.closed:
            return None, False
        try:
            result = action(self._opened())
        except (DependencyError, OSError) as error:
            self.breaker.failed(error)
            self.close()
            return None, False
        self.breaker.succeeded()
        return result

    def _opened(self) -> Store:
        with self._opening:
            if self.store is None:
                self.store = self._open_store()
            return self.store

    def close(self) -> None:
        with self._opening:
            store, self.store = self.store, None
        if store is not None:
            store.close()
