"""Tests speak to public behaviour: no test reads, replaces or imports a private name of another module or object."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OWN = ("self", "cls")  # what a test double keeps to itself
REPLACED_BY_NAME = ("getattr", "setattr", "hasattr", "delattr")
# Public parts of other libraries whose names begin with an underscore
PUBLIC = {"_replace", "_asdict", "_fields", "_make"}  # of every NamedTuple


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in PUBLIC


def find_private(source: str) -> Iterator[str]:
    """Yield each access to a private name in a file's text, as "line: code"."""
    for node in ast.walk(ast.parse(source)):
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
    assert bool(list(find_private(code))) == found


@pytest.mark.parametrize("folder", sorted(path.name for path in TESTS.iterdir() if path.is_dir() and any(path.rglob("*.py"))))
def test_no_test_uses_a_private_name(folder):
    found = {str(path.relative_to(TESTS)): list(find_private(path.read_text())) for path in (TESTS / folder).rglob("*.py")}
    assert {path: uses for path, uses in found.items() if uses} == {}


def test_no_helper_of_tests_uses_a_private_name():
    assert {path.name: uses for path in TESTS.glob("*.py") if (uses := list(find_private(path.read_text())))} == {}
