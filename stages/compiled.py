"""Loops over requests, items and neighbours as machine code, where numpy would need a pass over memory for every step.

    @compiled
    def gathered(listed, blocked, place): ...

numba compiles a function for the types of its first call and keeps the result. Every published repository carries a copy of
this code, so results are kept by the code's content, not by its place: a new generation finds what an older one compiled.
They lie in NUMBA_CACHE_DIR, or else in the user's cache folder. Where neither can be written or read, or what lies there is
damaged, a process compiles for itself: that costs seconds at its start, and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.misc.appdirs import AppDirs

CODE = Path(__file__).resolve().parent  # all of it: a compiled function holds what it calls and every constant it names


def compiled(function: Callable) -> Any:
    """-> `function` as machine code. No bounds are checked and division follows numpy's rules, not Python's."""
    loop = njit(nogil=True, error_model="numpy")(function)
    with contextlib.suppress(RuntimeError):  # "no locator available": there is no such folder, and none can be made
        loop._cache = Kept(function)  # what `cache=True` does, with a place of our own
    return loop


class ByContent(_CacheLocator):
    """Where the machine code of a function in this folder lies."""

    def __init__(self, source: Path, line: int) -> None:
        self._function = f"{source.relative_to(CODE).with_suffix('').as_posix().replace('/', '.')}-{line}"

    def get_cache_path(self) -> str:
        folder = config.CACHE_DIR or AppDirs("numba", appauthor=False).user_cache_dir
        return os.path.join(folder, f"stages_{content()}{'_checked' if config.BOUNDSCHECK else ''}")

    def get_source_stamp(self) -> str:
        return content()

    def get_disambiguator(self) -> str:
        return self._function

    @classmethod
    def from_function(cls, py_func: Callable, py_file: str) -> ByContent | None:
        locator = cls(Path(py_file).resolve(), py_func.__code__.co_firstlineno)
        try:
            os.makedirs(locator.get_cache_path(), exist_ok=True)
        except OSError:
            return None
        return locator


class Place(CompileResultCacheImpl):
    """How numba writes machine code; where is ours to say."""

    _locator_classes = (ByContent,)


class Kept(FunctionCache):
    """The machine code of one function, shared by processes that may all compile, die or run out of space at any moment."""

    _impl_class = Place

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # a file that was cut short raises whatever unpickling met
            with self._alone():
                self.flush()
            warnings.warn(f"Compiled code in {self.cache_path} is damaged ({error!r}): compiled again.", stacklevel=2)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with self._alone():
            super().save_overload(sig, data)

    @contextlib.contextmanager
    def _alone(self) -> Any:
        """Nobody else writes meanwhile: numba numbers its files without a lock. What cannot be written is not kept."""
        try:
            with open(os.path.join(self.cache_path, "lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            reason = error.strerror or error
            warnings.warn(f"Compiled code is not kept in {self.cache_path} ({reason}): every start compiles it.", stacklevel=2)


@cache
def content() -> str:
    """The digest of all code beside this file."""
    digest = hashlib.sha256()
    for path in sorted(CODE.rglob("*.py")):
        digest.update(path.relative_to(CODE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
