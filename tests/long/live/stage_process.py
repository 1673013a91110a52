"""A stage in a process of its own, as a server runs it, which tells for which types its loops are compiled."""

from __future__ import annotations

import gc
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from numba.core.dispatcher import Dispatcher

from serving.contract.artifacts import find_stage_folder
from serving.live.reader import Reader
from serving.live.store import find_live_folder
from serving.pipeline import STAGE_TYPES, Arrays

Loops = set[tuple[str, str]]
"""Qualified names of loops, each with the types of one compilation."""


def list_loops() -> Loops:
    """Return the loops of this process that are compiled, or read from the cache of compiled ones."""
    loops = [value for value in gc.get_objects() if issubclass(type(value), Dispatcher)]
    return {(f"{loop.py_func.__module__}.{loop.py_func.__qualname__}", str(key)) for loop in loops for key in loop.overloads}


def serve(name: str, repository: Path, connection: Connection) -> None:
    """Answer (method of the stage, arguments) until the other end is closed."""
    stage = STAGE_TYPES[name].load(find_stage_folder(repository, name, 1))
    if hasattr(stage, "with_live"):
        stage = stage.with_live(Reader(find_live_folder(repository)))
    methods = {"call": stage, "find_faults": stage.find_faults, "list_loops": list_loops}
    while True:
        try:
            method, *arguments = connection.recv()
        except EOFError:
            return
        connection.send(methods[method](*arguments))


class StageProcess:
    """Takes the place of a stage in a Pipeline."""

    def __init__(self, name: str, repository: Path) -> None:
        context = get_context("spawn")  # a fork would know the loops of this process
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(name, repository, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def __call__(self, fields: Arrays) -> Arrays:
        return self._ask("call", fields)

    def find_faults(self, fields: Arrays) -> dict[int, str]:
        return self._ask("find_faults", fields)

    def list_loops(self) -> Loops:
        return self._ask("list_loops")

    def close(self) -> None:
        self._connection.close()
        self._process.join()

    def _ask(self, *question: Any) -> Any:
        self._connection.send(question)
        return self._connection.recv()
