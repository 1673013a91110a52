"""How every command of this room ends."""

from __future__ import annotations

import sys

import typer
from tritonclient.utils import InferenceServerException

from stages.errors import RecommenderError

ERROR = 2  # exit code; 1 is a bound that was missed


def run(app: typer.Typer, name: str) -> None:
    """Run a command line; what people can mend is one line on stderr, without a traceback."""
    try:
        app(prog_name=name)
    except (RecommenderError, InferenceServerException) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(ERROR)
