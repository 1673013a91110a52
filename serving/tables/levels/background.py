"""A write-behind thread with a bounded queue: when it is full, work is dropped and counted.

Queued work is done in batches. The rows of 16 requests together take less than a tenth of the time that they take one by
one, and the GIL is held for less time.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

QUEUE_LENGTH = 256
WAKE_AT = 16  # pieces; fewer wait for the next upkeep, because waking a thread costs a request a tenth of an SSD read
MOST_AT_ONCE = 2 * WAKE_AT
LINGER_S = 0.001  # lets the submitting request be answered first: both need the GIL
SWITCH_S = 0.0002  # switch interval of the interpreter; with the default of 5 ms, requests would wait that long at p99

Piece = TypeVar("Piece")


class Background(Generic[Piece]):
    """Passes submitted pieces to `work`, several at once, and calls `upkeep` about every `upkeep_every_s`.

    Failed work is retried piece by piece, so pieces must be idempotent. Both callables are methods of one object: the thread
    ends with `close`, or when that object is collected.
    """

    def __init__(self, work: Callable[[list[Piece]], None], upkeep: Callable[[], None], upkeep_every_s: float) -> None:
        self._pieces: deque[Piece] = deque()
        self._settling: deque[threading.Event] = deque()
        self._woken, self._closing = threading.Event(), False
        self._do, self._upkeep, self._upkeep_every_s = weakref.WeakMethod(work), weakref.WeakMethod(upkeep), upkeep_every_s
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread = threading.Thread(target=self._run, name="embedding-tables", daemon=True)
        self._thread.start()

    def submit(self, piece: Piece, soon: bool = False) -> bool:
        """Queue a piece. Return False when the queue is full and the piece is dropped. soon: do not wait for more pieces."""
        if len(self._pieces) >= QUEUE_LENGTH:
            return False
        self._pieces.append(piece)
        if soon or len(self._pieces) == WAKE_AT:
            self._woken.set()
        return True

    def settle(self) -> None:
        """Wait until everything submitted so far is done."""
        settled = threading.Event()
        self._settling.append(settled)
        self._woken.set()
        settled.wait()

    def close(self) -> None:
        """End the thread after everything submitted so far is done."""
        self._closing = True
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        upkeep_at_s = 0.0
        while upkeep := self._upkeep():
            if time.monotonic() >= upkeep_at_s:
                self._try_call(upkeep)
                upkeep_at_s = time.monotonic() + self._upkeep_every_s
            del upkeep
            if self._woken.wait(self._upkeep_every_s):
                self._woken.clear()
                time.sleep(LINGER_S)
            closing = self._closing  # read before the queue is emptied for the last time
            self._drain_queue()
            if closing:
                return

    def _drain_queue(self) -> None:
        """Do all queued work, and tell those who wait in `settle`."""
        settling = [self._settling.popleft() for _ in range(len(self._settling))]  # their work is in the queue already
        while self._pieces and (work := self._do()):
            count = min(len(self._pieces), MOST_AT_ONCE)
            pieces = [self._pieces.popleft() for _ in range(count)]
            if not self._try_call(work, pieces) and count > 1:  # a failing piece must not cost the others
                for piece in pieces:
                    self._try_call(work, [piece])
        for settled in settling:
            settled.set()

    @staticmethod
    def _try_call(call: Callable[..., None], *arguments: object) -> bool:
        """Call it. Return False, and log the error, when it fails: later requests may miss rows, but the thread goes on."""
        try:
            call(*arguments)
        except Exception:
            logging.getLogger(__name__).exception("background work of the embedding tables failed")
            return False
        return True
