"""An updater at work beside a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

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
