"""How every command of this room ends."""

from __future__ import annotations

import signal
import sys

import typer
from tritonclient.utils import InferenceServerException

from serving.contract.errors import RecommenderError

BROKEN, ERROR = 1, 2  # exit codes: a bound was missed; something people can mend


def run(app: typer.Typer, name: str) -> None:
    """Run a command line; what people can mend is one line on stderr, without a traceback.

    Told to stop, or when its terminal goes, it takes the way out that stops what it started: servers that wait for their turn
    would stay suspended for good, with their memory.
    """
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signum, leave)
    try:
        app(prog_name=name)
    except (RecommenderError, InferenceServerException) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(ERROR)


def leave(signum: int, _frame: object) -> None:
    """A signal's handler: the way out through every `finally`, which a second signal does not cut short."""
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signum)  # not sys.exit: inside Kafka's client that becomes a SystemError
