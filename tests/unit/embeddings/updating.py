"""An updater at work beside a test, and batches as it makes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from stages.embeddings.batch import Batch
from stages.embeddings.config import TiersConfig
from stages.embeddings.updater import Updater


@contextmanager
def updating(config: TiersConfig) -> Iterator[Updater]:
    stop, updater = threading.Event(), Updater(config)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(updater.run, stop)
        try:
            yield updater
        finally:
            stop.set()
            running.result()  # whatever it raised
            updater.close()


class Log:
    """One partition of a log: every batch is its next message."""

    def __init__(self, partition: int = 0) -> None:
        self.partition, self.length = partition, 0

    def batch(self, keys: np.ndarray, vectors: np.ndarray) -> Batch:
        self.length += 1
        n = len(keys)
        return Batch(keys, vectors, np.full(n, self.partition), np.full(n, self.length - 1))
