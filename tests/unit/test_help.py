"""Command lines: their help says what it means, typer takes none of it for markup, and documents name what it takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from perf.command import make_app
from repository.triton.code import PROJECT

NOT_OURS = {"model_repository", "tests"}
WITHOUT_TYPER = {"pytest", "serving.tables"}
COMMAND_LINE = re.compile(r"^app = typer\.Typer\(|^    run\(main, ", re.MULTILINE)
# what follows a command on its line: a comment, the next command, a redirection
COMMAND = re.compile(r"python -m ([\w.]+)((?:\"[^\"]*\"|[^`\n#;|>)])*)")

Command = Any  # the class of commands is private to typer


def list_modules() -> Iterator[str]:
    """Yield the modules with a command line."""
    for path in sorted(PROJECT.glob("*/*.py")):
        if path.parent.name not in NOT_OURS and COMMAND_LINE.search(path.read_text()):
            yield f"{path.parent.name}.{path.stem}"


def load_app(module: str) -> typer.Typer:
    """Return a module's command line, or that of the only command that it runs."""
    loaded = import_module(module)
    return loaded.app if hasattr(loaded, "app") else make_app(loaded.main)


def list_commands(command: Command, name: str) -> Iterator[tuple[str, Command]]:
    """Yield a command line and all commands below it."""
    yield name, command
    if isinstance(command, TyperGroup):  # no click.Group, because typer has a click of its own
        for verb, own in command.commands.items():
            yield from list_commands(own, f"{name} {verb}")


@pytest.mark.parametrize("module", list(list_modules()))
def test_help_has_no_brackets_that_would_be_taken_for_markup(module):
    lost = {}
    for name, command in list_commands(get_command(load_app(module)), module):
        helps = [command.help, *(getattr(parameter, "help", None) for parameter in command.params)]
        lost[name] = [text for text in helps if text and re.search(r"\[[a-z]", text)]
    assert {name: texts for name, texts in lost.items() if texts} == {}


def list_documents() -> Iterator[str]:
    """Yield the documents that tell readers what to run: all but the history and the published figures."""
    for path in [*PROJECT.glob("*.md"), *PROJECT.glob("[a-z]*/*.md"), *PROJECT.glob("data/*/*.md")]:
        if path.name not in ("CHANGELOG.md", "results.md"):
            yield str(path.relative_to(PROJECT))


def load_command_line(module: str) -> Command:
    """Return the command line that `python -m MODULE` runs."""
    if not Path(PROJECT, *module.split(".")).is_dir() and module != "triton_recommender":
        return get_command(load_app(module))
    place = "cli" if find_spec(f"{module}.cli") else "__main__"
    return get_command(load_app(f"{module}.{place}"))


def parse(command: Command, words: list[str]) -> list[str]:
    """Return the words that a command line does not understand. Raises typer's errors for unknown options."""
    _, rest, _ = command.make_parser(command.context_class(command)).parse_args(words)
    if isinstance(command, TyperGroup) and rest:
        verb = command.commands.get(rest[0])
        return rest if verb is None else parse(verb, rest[1:])
    return rest


def test_every_command_of_a_document_is_understood():
    for document in list_documents():
        for module, arguments in COMMAND.findall((PROJECT / document).read_text()):
            if module not in WITHOUT_TYPER:
                faults = parse(load_command_line(module), shlex.split(arguments))
                assert faults == [], f"{document}: python -m {module}{arguments}"


def test_documents_show_commands():
    found = [module for document in list_documents() for module, _ in COMMAND.findall((PROJECT / document).read_text())]
    assert {"server", "export", "live", "perf", "trials", "gateway", "clients", "experiments.soak"} <= set(found)
    assert len(found) > 100
