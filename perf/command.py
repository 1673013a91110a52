"""Shared by the commands: options and lists that are refused, progress on stderr, and exit codes."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tritonclient.utils import InferenceServerException

from serving.contract.errors import ConfigError, RecommenderError

BROKEN, ERROR = 1, 2  # exit codes: a bound was missed; an error that users can fix


def make_app(command: Callable[..., None]) -> typer.Typer:
    """Return the command line of a function that is the only command of its program."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    return app


def run(commands: typer.Typer | Callable[..., None], name: str) -> None:
    """Run a command line, or the only command of a program. An error that users can fix is one line on stderr.

    SIGTERM and SIGHUP lead to the same clean-up as an exception. Otherwise suspended servers would stay suspended for
    ever, with their memory.
    """
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signum, leave)
    try:
        app = commands if isinstance(commands, typer.Typer) else make_app(commands)
        app(prog_name=name)
    except (RecommenderError, InferenceServerException) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(ERROR)


def refuse_options_before(context: typer.Context) -> None:
    """Raise ConfigError for options before a command, which would ignore them and run for minutes with its defaults."""
    sources = ((p.opts[-1], context.get_parameter_source(p.name)) for p in context.command.params)
    options = [option for option, source in sources if source and source.name == "COMMANDLINE"]
    if options:
        command = context.invoked_subcommand
        rewritten = f"{context.command_path} {command} {' … '.join(options)} …"
        raise ConfigError(f"{', '.join(options)} must follow {command}, which ignores options before it. Write: {rewritten}")


def parse_numbers(text: str) -> list[float]:
    """Return the positive numbers of a comma list. Raises ConfigError."""
    try:
        numbers = [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a list of numbers: {error}. Example: 1,8,32.") from error
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise ConfigError(f"{text!r} is not a list of positive, finite numbers. Example: 1,8,32.")
    return numbers


def parse_counts(text: str) -> list[int]:
    """Return the whole numbers above 0 of a comma list. Raises ConfigError."""
    numbers = parse_numbers(text)
    if any(number != int(number) for number in numbers):
        raise ConfigError(f"{text!r} is not a list of whole numbers. Example: 1,8,32.")
    return [int(number) for number in numbers]


def leave(signum: int, _frame: object) -> None:
    """Handle a signal: exit through every `finally`, which a second signal does not interrupt."""
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signum)  # not sys.exit: inside Kafka's client that becomes a SystemError


console = Console(stderr=True, width=None if os.isatty(2) else 120)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that names the next step: one bar on a terminal, one line per step elsewhere."""
    columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # drawn at steps only: a drawing thread would take the interpreter from measurements in this process
    with Progress(*columns, console=console, disable=not console.is_terminal, auto_refresh=False) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def begin_step(title: str) -> None:
            nonlocal begun
            begun += 1
            if console.is_terminal:
                bar.update(task, description=title, completed=begun - 1, refresh=True)
            else:
                console.print(f"[{begun}/{total}] {title}", markup=False, highlight=False)

        yield begin_step
        bar.update(task, completed=total, refresh=True)
