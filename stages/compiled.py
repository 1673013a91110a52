"""Loops over requests, items and neighbours as machine code, where numpy would need a pass over memory for every step.

    @compiled
    def gathered(listed, blocked, place): ...

numba compiles a function for the types of its first call and keeps the result. Every published repository carries a copy of
this code, so results are kept by the code's content, not by its place: a new generation finds what an older one compiled.
They lie in NUMBA_CACHE_DIR, or else in the user's cache folder, in a folder per content, of which the KEPT_FOLDERS used last
are kept, among the `<folder>_<SHA-1>` of numba's other programs. Where neither can be written or read, or what lies there is
damaged or was removed, a process compiles for itself: that costs seconds at its start, and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from numba import njit, typeof
from numba.core import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.misc.appdirs import AppDirs

CODE = Path(__file__).resolve().parent  # all of it: a compiled function holds what it calls and every constant it names
NAME = "recommender-stages"  # begins what lies in the root: folders of machine code, one per content, and a lock per user
OURS = re.compile(rf"{NAME}_[0-9a-f]{{16}}(_checked)?")  # another program's ends in 40 digits
KEPT_FOLDERS = 8  # 2 MB each


def compiled(function: Callable, nogil: bool = True) -> Any:
    """-> `function` as machine code. No bounds are checked and division follows numpy's rules, not Python's.

    nogil: other threads have the interpreter meanwhile. To give it away and take it again costs as much as 15 rows of a table.
    """
    loop = njit(nogil=nogil, error_model="numpy")(function)
    with contextlib.suppress(RuntimeError):  # "no locator available": there is no such folder, and none can be made
        loop._cache = Kept(function)  # what `cache=True` does, with a place of our own
    return loop


def machine_code(function: Any, *arguments: Any) -> Callable:
    """What a `compiled` function runs for arguments of these types, called once with them. It looks at no types any more, which
    takes half of a call that does little: only for callers who see to the types.
    """
    function(*arguments)
    return function.overloads[tuple(typeof(argument) for argument in arguments)].entry_point


class ByContent(_CacheLocator):
    """Where the machine code of a function in this folder lies."""

    def __init__(self, source: Path, line: int) -> None:
        self._function = f"{source.relative_to(CODE).with_suffix('').as_posix().replace('/', '.')}-{line}"

    def get_cache_path(self) -> str:
        return os.path.join(root(), f"{NAME}_{content()}{'_checked' if config.BOUNDSCHECK else ''}")

    def get_source_stamp(self) -> str:
        return content()

    def get_disambiguator(self) -> str:
        return self._function

    @classmethod
    def from_function(cls, py_func: Callable, py_file: str) -> ByContent | None:
        locator = cls(Path(py_file).resolve(), py_func.__code__.co_firstlineno)
        return locator if usable(locator.get_cache_path()) else None


class Place(CompileResultCacheImpl):
    """How numba writes machine code; where is ours to say."""

    _locator_classes = (ByContent,)


class Kept(FunctionCache):
    """The machine code of one function, shared by processes that may all compile, die or run out of space at any moment."""

    _impl_class = Place

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except OSError as error:
            reason = error.strerror or error
            warnings.warn(f"Compiled code in {self.cache_path} cannot be read ({reason}): compiled again.", stacklevel=2)
        except Exception as error:  # a file that was cut short raises whatever unpickling met
            self._write(self.flush)
            warnings.warn(f"Compiled code in {self.cache_path} is damaged ({error!r}): compiled again.", stacklevel=2)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        self._write(partial(super().save_overload, sig, data))

    def _write(self, write: Callable[[], None]) -> None:
        """Nobody else writes meanwhile: numba numbers its files without a lock. What cannot be written is not kept."""
        try:
            with alone():
                os.makedirs(self.cache_path, exist_ok=True)  # another process may have removed it since this one started
                write()
        except OSError as error:
            reason = error.strerror or error
            warnings.warn(f"Compiled code is not kept in {self.cache_path} ({reason}): every start compiles it.", stacklevel=2)


def root() -> str:
    """Where the folders of all contents lie."""
    return config.CACHE_DIR or AppDirs("numba", appauthor=False).user_cache_dir


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """No other process of this user writes or removes machine code meanwhile: users of one root cannot open each other's lock.

    It lies beside the folders, as a lock must outlive what it guards.
    """
    os.makedirs(root(), exist_ok=True)
    with open(os.path.join(root(), f"{NAME}-{os.getuid()}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def usable(folder: str) -> bool:
    """Is there such a folder? It is marked as used, or made, and then room is made for it."""
    known = os.path.isdir(folder)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # what is another's can neither be marked as used nor removed
        os.utime(folder)
        if not known:
            remove_oldest()
    return True


def remove_oldest() -> None:
    """Keeps the folders that were used last. A process that is starting with another one compiles for itself."""
    with alone():
        ours = (path for path in Path(root()).iterdir() if OURS.fullmatch(path.name))
        for folder in sorted(ours, key=lambda path: path.stat().st_mtime_ns)[:-KEPT_FOLDERS]:
            shutil.rmtree(folder, ignore_errors=True)


@cache
def content() -> str:
    """The digest of all code beside this file."""
    digest = hashlib.sha256()
    for path in sorted(CODE.rglob("*.py")):
        digest.update(path.relative_to(CODE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
