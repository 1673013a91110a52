"""Stop a long-running program by SIGTERM or SIGINT."""

from __future__ import annotations

import queue
import signal
import threading


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set. Call it in the main thread."""
    stop = threading.Event()
    received: queue.SimpleQueue[int] = queue.SimpleQueue()

    def set_stop() -> None:
        received.get()
        stop.set()

    # A handler interrupts the main thread anywhere, for instance inside `stop.wait` while it holds the lock that `stop.set`
    # needs: the handler would wait forever. A SimpleQueue may be interrupted by itself, so another thread can set the event.
    threading.Thread(target=set_stop, daemon=True).start()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _: received.put(number))
    return stop
