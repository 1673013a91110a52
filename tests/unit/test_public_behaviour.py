"""Tests speak to public behaviour: no test uses a private name of another module or object, or replaces a function of ours."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OWN = ("self", "cls")  # what a test double keeps to itself
REPLACED_BY_NAME = ("getattr", "setattr", "hasattr", "delattr")
# Public parts of other libraries whose names begin with an underscore
PUBLIC = {"_replace", "_asdict", "_fields", "_make"}  # of every NamedTuple

# Tests may replace the edges of a process. All other faults happen for real, or by tests/interrupting.py.
EDGES = {*sys.stdlib_module_names, "psutil", "faiss"}  # clock, files, sockets, environment; processes; GPUs
OUR_EDGES = {"time", "Producer"}  # in our modules: the clock, and the client of Kafka, whose class is immutable


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in PUBLIC


@pytest.fixture(scope="module")
def findings() -> list[tuple[str, list[str], list[str]]]:
    """Return the path of each file below tests/, with its private names and its replaced functions.

    No syntax tree is kept: its objects would slow each garbage collection of the tests that follow.
    """
    trees = ((str(path.relative_to(TESTS)), ast.parse(path.read_text())) for path in TESTS.rglob("*.py"))
    return [(path, list(find_private(tree)), list(find_replaced(tree))) for path, tree in trees]


def find_private(tree: ast.Module) -> Iterator[str]:
    """Yield each access to a private name in a file, as "line: code"."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt | ast.expr):
            continue
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                private = is_private(attribute) and name not in OWN
            case ast.Attribute(attr=attribute):
                private = is_private(attribute)
            case ast.ImportFrom(module=module, names=names):
                parts = [*(module or "").split("."), *(alias.name for alias in names)]
                private = module != "__future__" and any(map(is_private, parts))
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=arguments) if called in REPLACED_BY_NAME:
                texts = [each.value for each in arguments if isinstance(each, ast.Constant) and isinstance(each.value, str)]
                private = any(is_private(part) for text in texts for part in text.split("."))
            case _:
                private = False
        if private:
            yield f"{node.lineno}: {ast.unparse(node)}"


def find_replaced(tree: ast.Module) -> Iterator[str]:
    """Yield each replacement of what is neither an edge nor a constant (a limit or a folder), as "line: code"."""
    origins = dict(list_imports(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                own = [getattr(node, "module", None) or "", *(alias.name for alias in names)]
                if any(part == "mock" for name in own for part in name.split(".")):
                    yield f"{node.lineno}: {ast.unparse(node)}"
                continue
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Constant(value=str(path)), _]):
                root, name = path.split(".")[0], path.split(".")[-1]
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[target, ast.Constant(value=str(name)), _]):
                root = origins.get(ast.unparse(target).split(".")[0], "")
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=module), attr=name)]) if module in origins:
                root = origins[module]
            case _:
                continue
        if root not in EDGES and name not in OUR_EDGES and not name.isupper():
            yield f"{node.lineno}: {ast.unparse(node)}"


def list_imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each name that is imported, with the top-level package that it comes from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                package = alias.name if isinstance(node, ast.Import) else node.module or ""
                yield (alias.asname or alias.name).split(".")[0], package.split(".")[0]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("store._rows", True),
        ("open_store()._rows[0]", True),
        ("from serving.tables import _rows", True),
        ("from serving._tables import rows", True),
        ("monkeypatch.setattr(store, '_rows', 3)", True),
        ("monkeypatch.setattr('serving.tables._rows', 3)", True),
        ("getattr(store, '_rows')", True),
        ("self._rows", False),
        ("type(store).__name__", False),
        ("from __future__ import annotations", False),
        ("rows._replace(degraded=True)", False),
        ("monkeypatch.setattr(os, 'link', refuse)", False),
    ],
)
def test_private_names_are_found(code, found):
    assert bool(list(find_private(ast.parse(code)))) == found


def test_no_test_uses_a_private_name(findings):
    assert [(path, uses) for path, uses, _ in findings if uses] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from live import archive; monkeypatch.setattr(archive, 'list_segments', fail)", True),
        ("monkeypatch.setattr('live.archive.list_segments', fail)", True),
        ("from serving.tables import Table; patch.setattr(Table, 'read', fail)", True),
        ("monkeypatch.setattr(store.level, 'catch_up', fail)", True),
        ("from live import archive; archive.list_segments = fail", True),
        ("from unittest import mock", True),
        ("from unittest.mock import patch", True),
        ("import os; monkeypatch.setattr(os, 'link', refuse)", False),
        ("import socket; monkeypatch.setattr(socket.socket, 'bind', refuse)", False),
        ("from pathlib import Path; monkeypatch.setattr(Path, 'rename', refuse)", False),
        ("monkeypatch.setattr('sys.argv', [])", False),
        ("monkeypatch.setattr('repository.lock.time', PatientClock())", False),
        ("from live import consumer; monkeypatch.setattr(consumer, 'FIRST_EVERY_S', 0.05)", False),
    ],
)
def test_replaced_functions_are_found(code, found):
    assert bool(list(find_replaced(ast.parse(code)))) == found


def test_no_test_replaces_a_function_of_ours(findings):
    assert [(path, replaced) for path, _, replaced in findings if replaced] == []
