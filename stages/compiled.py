"""Loops over requests, items and neighbours as machine code, where numpy would need a pass over memory for every step.

    @compiled
    def gathered(listed, blocked, place): ...

numba compiles a function for the types of its first call and keeps the result. Every published repository carries a copy of
this code, so results are kept by the code's content, not by its place: a new generation finds what an older one compiled.
They lie in NUMBA_CACHE_DIR, or else in the user's cache folder; where neither can be written, each process compiles anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import config
from numba.core.caching import CacheImpl, _CacheLocator
from numba.misc.appdirs import AppDirs

CODE = Path(__file__).resolve().parent  # all of it: a compiled function holds what it calls and every constant it names


def compiled(function: Callable) -> Any:
    """-> `function` as machine code. No bounds are checked and division follows numpy's rules, not Python's."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # "no locator available": no folder that could be written
        return njit(**options)(function)


class ByContent(_CacheLocator):
    """Where numba keeps the machine code of a function in this folder."""

    def __init__(self, line: int) -> None:
        self._line = line

    def get_cache_path(self) -> str:
        return os.path.join(config.CACHE_DIR or AppDirs("numba", appauthor=False).user_cache_dir, f"stages_{content()}")

    def get_source_stamp(self) -> str:
        return content()

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, py_func: Callable, py_file: str) -> ByContent | None:
        """None for other people's functions, and where the folder cannot be written."""
        if CODE not in Path(py_file).resolve().parents:
            return None
        locator = cls(py_func.__code__.co_firstlineno)
        try:
            locator.ensure_cache_path()
        except OSError:
            return None
        return locator


@cache
def content() -> str:
    """The digest of all code beside this file."""
    digest = hashlib.sha256()
    for path in sorted(CODE.rglob("*.py")):
        digest.update(path.relative_to(CODE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


CacheImpl._locator_classes = [ByContent, *CacheImpl._locator_classes]
