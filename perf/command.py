"""How every command of this room ends."""

from __future__ import annotations

import sys

import typer
from tritonclient.utils import InferenceServerException

from stages.errors import RecommenderError

BROKEN, ERROR = 1, 2  # exit codes: a bound was missed; something people can mend


def run(app: typer.Typer, name: str) -> None:
    """Run a command line; what people can mend is one line on stderr, without a traceback."""
    try:
        app(prog_name=name)
    except (RecommenderError, InferenceServerException) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(ERROR)
