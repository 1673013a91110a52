"""The rooms keep to themselves: what serves imports nothing of what trains, and the README names what exists."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
OFFLINE_ROOMS = {"export", "clients", "perf", "server", "hps_config", "tests"}
OFFLINE_LIBRARIES = {
    "torch",
    "pandas",
    "nvtabular",
    "merlin",
    "dask",
    "sklearn",
    "matplotlib",
    "rich",
    "typer",
    "pydantic",
}


def imported(path: Path) -> set[str]:
    """Top-level names of everything a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", sorted((PROJECT / "stages").rglob("*.py")), ids=lambda p: str(p.relative_to(PROJECT)))
def test_what_serves_imports_no_other_room_and_no_training_library(path):
    assert not imported(path) & (OFFLINE_ROOMS | OFFLINE_LIBRARIES)


def test_loading_the_pipeline_loads_no_training_library():
    code = "import sys, stages.pipeline; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert "numpy" in loaded
    assert not set(loaded) & OFFLINE_LIBRARIES


def test_every_make_target_the_readme_names_exists():
    targets = set(re.findall(r"^([a-z]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b(?=[\s`]|$)", (PROJECT / "README.md").read_text()))
    assert {"run", "test", "export", "serve", "check", "stop", "eval"} <= named
    assert named <= targets


def test_every_file_the_readme_links_to_exists():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (PROJECT / "README.md").read_text())
    assert links
    assert [link for link in links if not (PROJECT / link).exists()] == []


def test_every_command_the_readme_names_has_help():
    commands = set(re.findall(r"\.venv/bin/python -m (\w+ \w+)", (PROJECT / "README.md").read_text()))
    assert commands
    for command in sorted(commands):
        module, verb = command.split()
        run = subprocess.run([sys.executable, "-m", module, verb, "--help"], cwd=PROJECT, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr


def test_the_readme_has_no_blanks_left():
    assert re.findall(r"@[A-Z_]+@", (PROJECT / "README.md").read_text()) == []
