"""Interrupt code of this thread at one place: at its Nth line, or when a function returns."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, FunctionType, ModuleType
from typing import Any, cast

from serving.tables.store.memory import FileLock


class Killed(BaseException):
    """Stands for SIGKILL at one exact line: whatever follows in the process does not happen."""


def kill() -> None:
    raise Killed


def free(lock: threading.Lock | FileLock) -> None:
    """Release a lock, if it is held: what the kernel does when its process is killed."""
    lock.acquire(blocking=False)
    with suppress(RuntimeError):  # only another process holds it
        lock.release()


@contextmanager
def interrupted_at(actions: dict[int, Callable[[], None]], *modules: ModuleType) -> Iterator[list[int]]:
    """Call each action before the line with its number, counted over the lines of `modules` that run inside of the block.

    Yields a list of one number: how many lines ran.
    """
    files, count = {module.__file__ for module in modules}, [0]

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            count[0] += 1
            actions.get(count[0], _do_nothing)()
        return look

    with _traced(look):
        yield count


@contextmanager
def called_on_return(action: Callable[[], object], function: Callable[..., object]) -> Iterator[None]:
    """Call `action` whenever `function` returns inside of the block."""

    code = cast(FunctionType, function).__code__

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event == "return":
            action()
        return look

    with _traced(look):
        yield


@contextmanager
def _traced(look: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    before = sys.gettrace()  # of a measurement of coverage
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


def _do_nothing() -> None:
    pass
