"""Compile loops over requests, items and neighbours to machine code, where numpy would pass over memory once per step.

    @compiled
    def gather(listed, blocked, place): ...

numba compiles a function for the types of its first call and keeps the result. Every published repository carries a copy of
this code, so machine code is cached by content, not by path: a new generation finds what an older one compiled. The key of a
function covers its own module, the modules with loops that it imports, and the constants that these import from elsewhere;
editing any other file recompiles nothing. Of processes that start together, one compiles a function and the others wait for it.

Results are in NUMBA_CACHE_DIR, or else in the user's cache folder, in one folder per module and key. For each module, the
KEPT_FOLDERS that were used last are kept. Where the folder cannot be written or read, or another user may have filled it, or
its files are damaged or removed, a process compiles for itself, which costs seconds at its start.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import re
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from numba import njit, typeof
from numba.core import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.misc.appdirs import AppDirs

from serving.contract.locks import hold_lock, try_lock

PACKAGE = Path(__file__).resolve().parents[1]  # `serving`, in the checkout or in a version folder
THIS_MODULE = f"{PACKAGE.name}.loops.compiled"
NAME = "recommender-loops"  # prefix of every entry in the cache root: one folder per module and key, and a lock per user
OURS = re.compile(rf"{NAME}_(?P<module>[\w.]+)_[0-9a-f]{{16}}(_checked)?")
KEPT_FOLDERS = 8  # per module
FOLDER_MODE = 0o755  # whatever the umask
WAIT_S = 60.0  # for a function that another process compiles: the longest takes 15 s on an idle core
LOCK_FLAGS = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def compiled(function: Callable, nogil: bool = True) -> Any:
    """Return `function` as machine code. No bounds are checked and division follows numpy's rules, not Python's.

    nogil: release the GIL during the call. Releasing and taking it again costs as much as 15 rows of a table.
    """
    loop = njit(nogil=nogil, error_model="numpy")(function)
    with contextlib.suppress(RuntimeError):  # "no locator available": there is no such folder, and none can be made
        loop._cache = SharedCache(function)  # as `cache=True` does, in our own folder
    return loop


def find_entry_point(function: Any, *arguments: Any) -> Callable:
    """Return the entry point that a `compiled` function uses for arguments of these types, after one call with them.

    It skips numba's dispatch by type, half the cost of a short call: the caller guarantees the types.
    """
    function(*arguments)
    return function.overloads[tuple(typeof(argument) for argument in arguments)].entry_point


class ContentLocator(_CacheLocator):
    """Locates the machine code of a function of this package, or of another one of the same checkout."""

    def __init__(self, source: Path, line: int) -> None:
        self._module = source.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".")
        self._line = line

    def get_cache_path(self) -> str:
        checked = "_checked" if config.BOUNDSCHECK else ""
        return os.path.join(find_cache_root(), f"{NAME}_{self._module}_{hash_module(self._module)}{checked}")

    def get_source_stamp(self) -> str:
        return hash_module(self._module)

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, py_func: Callable, py_file: str) -> ContentLocator | None:
        locator = cls(Path(py_file).resolve(), py_func.__code__.co_firstlineno)
        return locator if prepare_folder(locator.get_cache_path()) else None


class CacheFolder(CompileResultCacheImpl):
    """Writes machine code as numba does, into the folders of ContentLocator."""

    _locator_classes = (ContentLocator,)


class SharedCache(FunctionCache):
    """The machine code of one function, shared by processes that may all compile, die or run out of space at any moment."""

    _impl_class = CacheFolder

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        self._lock: int | None = None  # open while this process compiles the function, and others wait for the result

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what some process compiled. None: this one has to, and those that start meanwhile wait for it."""
        loaded = self._load(sig, target_context)
        if loaded is None and self._lock is None and self._wait_for_others():
            loaded = self._load(sig, target_context)
            if loaded is not None:
                self._release()
        return loaded

    def save_overload(self, sig: Any, data: Any) -> None:
        self._write(partial(super().save_overload, sig, data))
        self._release()

    def _load(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except OSError as error:
            reason = error.strerror or error
            warnings.warn(f"Compiled code in {self.cache_path} cannot be read ({reason}): compiled again.", stacklevel=2)
        except Exception as error:  # a truncated file makes unpickling raise any error
            self._write(self.flush)
            warnings.warn(f"Compiled code in {self.cache_path} is damaged ({error!r}): compiled again.", stacklevel=2)
        return None

    def _wait_for_others(self) -> bool:
        """Take the lock of this function, and wait while another process of this user has it. Return False if there is none.

        The kernel releases the lock of a process that dies. One that stands still delays the others by WAIT_S.
        """
        try:
            lock = os.open(os.path.join(self.cache_path, f"{self._impl.filename_base}-{os.getuid()}.lock"), LOCK_FLAGS, 0o600)
        except OSError:  # nothing can be kept there, so there is nothing to wait for
            return False
        deadline_s, taken = time.monotonic() + WAIT_S, False
        with contextlib.suppress(OSError):  # of a file system without locks
            while not (taken := try_lock(lock)) and time.monotonic() < deadline_s:
                time.sleep(0.02)
        if taken:
            self._lock = lock
        else:
            os.close(lock)
        return True

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write(self, write: Callable[[], None]) -> None:
        """Write under a lock, because numba numbers its files without one. A failure is only a warning."""
        try:
            with cache_lock():
                # another process may have removed it since this one started
                os.makedirs(self.cache_path, FOLDER_MODE, exist_ok=True)
                write()
        except OSError as error:
            reason = error.strerror or error
            warnings.warn(f"Compiled code is not kept in {self.cache_path} ({reason}): every start compiles it.", stacklevel=2)


def find_cache_root() -> str:
    """Return the folder that holds the folders of all modules."""
    return config.CACHE_DIR or AppDirs("numba", appauthor=False).user_cache_dir


@contextlib.contextmanager
def cache_lock() -> Iterator[None]:
    """Hold the lock that keeps other processes of this user from writing or removing machine code.

    There is one lock per user, because users of one root cannot open each other's; it is beside the folders that it guards.
    """
    os.makedirs(find_cache_root(), exist_ok=True)
    with hold_lock(Path(find_cache_root(), f"{NAME}-{os.getuid()}.lock")):
        yield


@cache
def prepare_folder(folder: str) -> bool:
    """Make the folder if it does not exist, and mark it as used. Return False where that is impossible.

    Also where another user may have put files into it: code in them would run here. Root may, as for an image.
    After a new folder is made, the oldest ones are removed.
    """
    known = os.path.isdir(folder)
    try:
        os.makedirs(folder, FOLDER_MODE, exist_ok=True)
        facts = os.lstat(folder)
    except OSError:
        return False
    if stat.S_ISLNK(facts.st_mode) or facts.st_uid not in (0, os.getuid()) or facts.st_mode & stat.S_IWOTH:
        warnings.warn(
            f"Compiled code in {folder} is not used, because another user may have put it there: every start compiles it. "
            "Choose another NUMBA_CACHE_DIR.",
            stacklevel=2,
        )
        return False
    with contextlib.suppress(OSError):  # another user's folder can neither be marked as used nor removed
        os.utime(folder)
        if not known:
            remove_oldest()
    return True


def remove_oldest() -> None:
    """Remove all but the last used folders of each module. A process that was about to use one of them compiles for itself."""
    with cache_lock():
        by_module: dict[str, list[Path]] = {}
        for path in Path(find_cache_root()).iterdir():
            if match := OURS.fullmatch(path.name):
                by_module.setdefault(match["module"], []).append(path)
        for folders in by_module.values():
            for folder in sorted(folders, key=lambda path: path.stat().st_mtime_ns)[:-KEPT_FOLDERS]:
                shutil.rmtree(folder, ignore_errors=True)


@cache
def hash_module(module: str) -> str:
    """Return the digest of all code that a compiled function of `module` may call, and of the constants that it may use."""
    digest = hashlib.sha256()
    for name in sorted(find_loop_modules(module)):
        digest.update(name.encode() + b"\0" + find_source(name).read_bytes())
        for constant in sorted(read_imports(name).constants):
            digest.update(constant.encode() + b"\0")
    return digest.hexdigest()[:16]


def find_loop_modules(module: str) -> set[str]:
    """Return `module` and the modules with compiled loops that it imports, directly or through one another."""
    reached, pending = set(), [module]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += read_imports(name).loop_modules
    return reached


class Imports(NamedTuple):
    """The imports of a module from this package: modules with compiled loops, and definitions of constants of other modules."""

    loop_modules: tuple[str, ...]
    constants: tuple[str, ...]


@cache
def read_imports(module: str) -> Imports:
    """Return what a module imports from this package at its top level."""
    loop_modules, constants = [], []
    for node in parse_module(module).body:
        if not (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name):
            continue
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            source = submodule if find_source(submodule).is_file() else str(node.module)
            if holds_loops(source):
                loop_modules.append(source)
            elif source != THIS_MODULE and (definition := find_assignment(source, alias.name)):
                constants.append(definition)
    return Imports(tuple(loop_modules), tuple(constants))


def holds_loops(module: str) -> bool:
    """Return whether a module imports this one, and so may have compiled loops."""
    names = (node.module for node in parse_module(module).body if isinstance(node, ast.ImportFrom))
    return THIS_MODULE in names


def find_assignment(module: str, name: str) -> str:
    """Return the source of the top-level assignments to `name`; "" when it is a class, a function or imported."""
    assignments = []
    for node in parse_module(module).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(part, ast.Name) and part.id == name for target in targets for part in ast.walk(target)):
            assignments.append(ast.unparse(node))
    return "\n".join(assignments)


@cache
def parse_module(module: str) -> ast.Module:
    """Return the syntax tree of a module; an empty one where it has no file."""
    path = find_source(module)
    return ast.parse(path.read_bytes() if path.is_file() else b"")


def find_source(module: str) -> Path:
    """Return the file of a module of this package; a package's own file is its `__init__.py`."""
    path = PACKAGE.parent / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
