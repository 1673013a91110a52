"""Help of every command line: it says what it means, and typer takes none of it for markup."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module

import click
import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from repository.code import PROJECT

NOT_OURS = {"model_repository", "tests"}


def list_modules() -> Iterator[str]:
    """Yield the modules with a command line."""
    for path in sorted(PROJECT.glob("*/*.py")):
        if path.parent.name not in NOT_OURS and "typer.Typer(" in path.read_text():
            yield f"{path.parent.name}.{path.stem}"


def list_commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield a command line and all commands below it. (Typer's groups are no click.Group: it has a click of its own.)"""
    yield name, command
    if isinstance(command, TyperGroup):
        for verb, own in command.commands.items():
            yield from list_commands(own, f"{name} {verb}")


@pytest.mark.parametrize("module", list(list_modules()))
def test_help_has_no_brackets_that_would_be_taken_for_markup(module):
    app = import_module(module).app
    assert isinstance(app, typer.Typer)
    lost = {}
    for name, command in list_commands(get_command(app), module):
        helps = [command.help, *(getattr(parameter, "help", None) for parameter in command.params)]
        lost[name] = [text for text in helps if text and re.search(r"\[[a-z]", text)]
    assert {name: texts for name, texts in lost.items() if texts} == {}
