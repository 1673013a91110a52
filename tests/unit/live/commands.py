"""Run commands of `python -m live` in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from live.__main__ import app


def call(*arguments: object, code: int = 0) -> str:
    """Return the output of a command, whose exit code must be `code`."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def call_in_one_line(*arguments: object, code: int = 0) -> str:
    """Return the same with single spaces in place of line ends and columns."""
    return " ".join(call(*arguments, code=code).split())
