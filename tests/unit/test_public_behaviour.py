"""Tests speak to public behaviour: no test replaces a function of ours. Ruff finds private names in tests (pyproject.toml)."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# Tests may replace the edges of a process. All other faults happen for real, or by tests/interrupting.py.
EDGES = {*sys.stdlib_module_names, "psutil", "faiss"}  # clock, files, sockets, environment; processes; GPUs
OUR_EDGES = {"time", "Producer"}  # in our modules: the clock, and the client of Kafka, whose class is immutable


def find_replaced(tree: ast.Module) -> Iterator[str]:
    """Yield each replacement of what is neither an edge nor a constant (a limit or a folder), as "line: code"."""
    nodes = list(ast.walk(tree))
    origins = dict(list_imports(nodes))
    for node in nodes:
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
        if root not in EDGES and name not in OUR_EDGES and (name.startswith("_") or not name.isupper()):
            yield f"{node.lineno}: {ast.unparse(node)}"


def list_imports(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield each name that is imported, with the top-level package that it comes from."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                package = alias.name if isinstance(node, ast.Import) else node.module or ""
                yield (alias.asname or alias.name).split(".")[0], package.split(".")[0]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from live import archive; monkeypatch.setattr(archive, 'list_segments', fail)", True),
        ("monkeypatch.setattr('live.archive.list_segments', fail)", True),
        ("from serving.tables import Table; patch.setattr(Table, 'read', fail)", True),
        ("monkeypatch.setattr(store.level, 'catch_up', fail)", True),
        ("from live import archive; archive.list_segments = fail", True),
        ("monkeypatch.setattr('live.archive._SEGMENTS', 3)", True),
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


def test_no_test_replaces_a_function_of_ours():
    """No syntax tree is kept: its objects would slow each garbage collection of the tests that follow."""
    found = {str(path.relative_to(TESTS)): list(find_replaced(ast.parse(path.read_text()))) for path in TESTS.rglob("*.py")}
    assert {path: replaced for path, replaced in found.items() if replaced} == {}
