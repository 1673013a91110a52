"""Select the files that a version folder carries: the modules that its model.py imports, directly or through one another."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from serving.contract.errors import ExportError

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = "serving"


def stamp_sources() -> dict[Path, tuple[int, int]]:
    """Return the size and the time of change (ns) of each file of the package `serving`."""
    statuses = {path: path.stat() for path in (PROJECT / PACKAGE).rglob("*.py")}
    return {path: (status.st_size, status.st_mtime_ns) for path, status in statuses.items()}


SOURCES = stamp_sources()  # when this process began


def refuse_changed_sources() -> None:
    """Raise ExportError if the code changed since this process began, as by `git pull` beside a long round of training.

    The process makes files by the former code, and a generation would carry the new code to read them.
    """
    if changed := sorted(path for path, _ in stamp_sources().items() ^ SOURCES.items()):
        raise ExportError(
            f"{changed[0]} changed since this process began, so that a generation would have other code than that which made "
            "its files. Expected the same code from beginning to end. Nothing was published: start the command again."
        )


def copy_serving_code(folder: Path, modules: Iterable[str]) -> None:
    """Copy those files of the package `serving` into `folder` that `modules` need.

    modules: dotted names, such as "serving.stages.rank". Raises FileNotFoundError for a module that does not exist, and
    ExportError as `refuse_changed_sources` does.
    """
    refuse_changed_sources()
    for source in sorted(find_imported_files(modules)):
        target = folder / source.relative_to(PROJECT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def find_imported_files(modules: Iterable[str]) -> set[Path]:
    """Return the source files of `modules` and of all modules of `serving` that they import, directly or not."""
    reached: set[Path] = set()
    seen: set[str] = set()
    pending = list(modules)
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        sources = (find_source(module), *list_package_files(module))
        reached.update(sources)
        for source in sources:
            pending += list_imports(source)
    return reached


@cache
def list_imports(source: Path) -> tuple[str, ...]:
    """Return the modules of `serving` that a file imports; `from package import module` names the module."""
    modules = []
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            modules += [node.module, *(name for name in submodules if find_source(name).is_file())]
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE]
    return tuple(modules)


@cache
def find_source(module: str) -> Path:
    """Return the source file of a module or package."""
    path = PROJECT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")


@cache
def list_package_files(module: str) -> tuple[Path, ...]:
    """Return the `__init__.py` of every package above a module."""
    parts = module.split(".")[:-1]
    return tuple(PROJECT.joinpath(*parts[:depth], "__init__.py") for depth in range(1, len(parts) + 1))
