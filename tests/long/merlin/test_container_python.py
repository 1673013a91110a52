"""What is published is run by the Python of NVIDIA's container, not by this environment's."""

import ast
from pathlib import Path

import pytest

from export.nvidia import workflow

PROJECT = Path(__file__).parents[3]
PUBLISHED = (*(PROJECT / "serving").rglob("*.py"), workflow.OPERATORS, workflow.MODEL_PY)
# names that Python 3.11 brought, by module
NEWER = {
    "hashlib": {"file_digest"},
    "typing": {"Self", "assert_never", "LiteralString"},
    "enum": {"StrEnum"},
    "datetime": {"UTC"},
}


@pytest.mark.parametrize("path", sorted(PUBLISHED), ids=lambda path: str(path.relative_to(PROJECT)))
def test_what_is_published_runs_on_the_containers_python(path):
    """merlin-hugectr:24.06 has Python 3.10: neither its syntax nor its library may be exceeded."""
    tree = ast.parse(path.read_text(), feature_version=(3, 10))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not {alias.name for alias in node.names} & NEWER.get(node.module or "", set())
            assert node.module != "tomllib"
        elif isinstance(node, ast.Import):
            assert "tomllib" not in {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.attr not in NEWER.get(node.value.id, set())
