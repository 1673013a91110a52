"""A database below the cache (Redis, RocksDB, the exported tables), opened on first use, skipped while it is down."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from serving.contract.errors import DependencyError
from serving.tables.levels.breaker import Breaker

Found = dict[str, tuple[np.ndarray, np.ndarray | None]]  # table -> (float32 [N, D]; bool [N] found, None: all)


class Closable(Protocol):
    def close(self) -> None: ...


class Store(Closable, Protocol):
    """Methods of every level. One that replaces RocksDB also needs `read_position`, `catch_up` and `check` of RocksStore."""

    def read(self, reads: dict[str, np.ndarray]) -> tuple[Found, bool]: ...


class Level:
    """One store behind a circuit breaker. A store that fails is closed, and opened again when the breaker allows a call.

    The first call waits for the opening. Later ones do not, because reopening may refill a database.
    """

    def __init__(self, name: str, open_store: Callable[[], Closable]) -> None:
        self.name, self._open_store = name, open_store
        self.store: Any = None
        self.breaker = Breaker()
        self._changing = threading.Lock()
        self._tried = self._reopening = False
        self._closings = 0

    def use(self, action: Callable[[Any], tuple[Any, bool]]) -> tuple[Any, bool]:
        """Return the result of `action` and whether it is complete; (None, False) when the level is down or fails."""
        if not self.breaker.closed:
            return None, False
        store = None
        try:
            store = self.store or self._open_or_wait()
            if store is None:
                return None, False
            result = action(store)
        except (DependencyError, OSError) as error:
            self.breaker.record_failure(error)
            self._drop(store)
            return None, False
        self.breaker.record_success()
        return result

    def _open_or_wait(self) -> Any:
        """Return the store, None while it is being reopened."""
        with self._changing:
            if self.store is None and not self._tried:
                self._tried = True
                self.store = self._open_store()
            elif self.store is None and not self._reopening:
                self._reopening = True
                threading.Thread(target=self._reopen, args=(self._closings,), name=f"open-{self.name}", daemon=True).start()
            return self.store

    def _reopen(self, closings: int) -> None:
        """Open the store in a thread. closings: number of calls of `close` before; after another one, drop the store."""
        store = None
        try:
            store = self._open_store()
        except Exception as error:  # nothing else would report it
            self.breaker.record_failure(error)
        finally:
            with self._changing:
                self._reopening = False
                if closings == self._closings:
                    self.store, store = store, None
        if store is not None:  # closed in the meantime
            store.close()

    def _drop(self, store: Closable | None) -> None:
        """Close the store that failed, if no other thread has."""
        with self._changing:
            if store is None or self.store is not store:
                return
            self.store = None
        store.close()

    def close(self) -> None:
        with self._changing:
            self._closings += 1
            store, self.store = self.store, None
        if store is not None:
            store.close()
