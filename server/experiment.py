"""python -m server experiment start | share | status | stop: serve two generations at once (docs/trials.md)."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from repository.challenger import read_challengers
from repository.experiments import (
    change_share,
    end_experiment,
    find_experiment_folder,
    find_running,
    refuse_other_shop,
    refuse_used_name,
    start_experiment,
)
from repository.generations import drop_challenger, require_published
from server.control import find_running_servers
from server.generations.activation import find_pinned_generation, find_served_generation
from server.generations.challenger import load_challenger, unload_challenger
from server.start.environment import RUN_DIR
from server.state import ServerState
from serving.contract.errors import ConfigError, ServerError
from serving.live.experiment import Experiment, Mode, read_experiment

app = typer.Typer(help="Serve two generations at once, and set which share of the users each answers.", no_args_is_help=True)

Repo = Annotated[Path, typer.Option(help="model repository")]
DEFAULT = Path("model_repository")
Share = Annotated[float, typer.Option(help="share of the users", min=0, max=1)]


@app.command()
def start(
    name: Annotated[str, typer.Argument(help="a new name; it is also the seed by which users are assigned")],
    challenger: Annotated[int, typer.Option(min=1, help="published generation to serve beside the one that answers")],
    share: Share = 0.1,
    mode: Annotated[Mode, typer.Option(help="ab, interleave (both in one answer), shadow (asked, logged, not shown)")] = "ab",
    promote: Annotated[
        bool, typer.Option("--promote", help="let the challenger take over once it is significantly better")
    ] = False,
    repo: Repo = DEFAULT,
) -> None:
    """Load a challenger beside the champion on every running server of a repository, and let a share of the users meet it."""
    if promote and mode == "shadow":
        raise ConfigError("Users do not see a shadow, so it is never found better. Use --promote with --mode ab or interleave.")
    refuse_everybody(share, mode)
    servers, pinned = find_servers(repo), find_pinned_generation(repo)
    try:
        champion = begin_experiment(servers, repo, Experiment(name, 0, challenger, share, mode, promotes=promote)).champion
    finally:  # a challenger that does not load has moved the pin, too
        note_moved_pin(repo, pinned)
    if mode == "shadow":
        text = (
            f"generation {champion} answers everybody; {challenger} is asked as well for {share:.1%} of the users, and logged"
        )
    else:
        text = f"generation {challenger} meets {share:.1%} of the users ({mode}), {champion} the others"
    typer.echo(f"experiment {name}: {text}")
    if not any(state.settings.get("gateway_url") for state in servers):
        typer.echo(
            "note: no gateway was started here with a server of this repository. Only users of a gateway meet the challenger.",
            err=True,
        )


def note_moved_pin(repo: Path, pinned: int) -> None:
    """Say if the pin of a repository is no longer what it was. pinned: 0 where that is not known"""
    if pinned and pinned != (champion := find_pinned_generation(repo)):
        typer.echo(
            f"note: the pin of {repo} moved from generation {pinned} to {champion}, which answers, so that a restart serves "
            "the same. It stays there after the experiment: `python -m export pin` moves it.",
            err=True,
        )


@app.command("share")
def set_share(share: Annotated[float, typer.Argument(min=0, max=1)], repo: Repo = DEFAULT) -> None:
    """Give the running experiment another share of the users, from the next request on. A larger share keeps its users."""
    running = find_running(repo)
    refuse_everybody(share, running.mode if running else "ab")
    if running and running.share == share:  # would throw away all answers until now
        typer.echo(f"experiment {running.name}: generation {running.challenger} meets {share:.1%} of the users already")
        return
    experiment = change_share(repo, share)
    typer.echo(
        f"experiment {experiment.name}: generation {experiment.challenger} meets {share:.1%} of the users; its guard and its "
        "report start again with the answers from now on"
    )


@app.command()
def status(repo: Repo = DEFAULT) -> None:
    """Print the latest experiment of a repository."""
    experiment = read_experiment(find_experiment_folder(repo))
    challengers = read_challengers(repo)
    takes_memory = f"; generation {challengers[0]} still takes memory: python -m server experiment stop" if challengers else ""
    if experiment is None:
        typer.echo(f"no experiment was started on {repo}{takes_memory}")
        return
    began = datetime.fromtimestamp(experiment.started_ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M")
    if experiment.runs:
        note = "" if find_running_servers(RUN_DIR, repo) else "; no server started here serves it"
    elif experiment.state == "promoted":
        note = ""
    else:
        note = takes_memory
    typer.echo(
        f"{experiment.name}: {experiment.state}, {experiment.mode}, generation {experiment.challenger} beside "
        f"{experiment.champion}, share {experiment.share:.1%}, since {began} UTC"
        + (", takes over once it is better" if experiment.runs and experiment.promotes else "")
        + (f", after {experiment.days:g} days also if it is not worse" if experiment.runs and experiment.days else "")
        + (f"; {experiment.reason}" if experiment.reason else "")
        + note
    )


@app.command()
def stop(reason: Annotated[str, typer.Option(help="for the record")] = "", repo: Repo = DEFAULT) -> None:
    """Let the champion answer everybody again, and unload the challenger.

    The challenger of an experiment that was rolled back is unloaded, too, and one whose `start` was interrupted. If no server
    runs, the next one loads the champion alone.
    """
    experiment, loaded = read_experiment(find_experiment_folder(repo)), read_challengers(repo)
    if experiment is None and not loaded:
        raise ConfigError(f"No experiment was started on {repo}, so there is none to stop.")
    over = f"experiment {experiment.name} is over" if experiment else "no experiment began"
    generations = loaded or (experiment.challenger if experiment else 0,)
    if experiment and experiment.runs:
        end_experiment(repo, reason)
    if experiment and experiment.state == "promoted" and generations == (experiment.challenger,):
        typer.echo(f"{over}: generation {experiment.challenger} was promoted")
        return
    typer.echo(f"{over}: generation {generations[0]} is {release_challenger(repo)}")


def refuse_everybody(share: float, mode: Mode) -> None:
    """Raise ConfigError where no user would be left to the champion, with whose answers the guard compares the challenger's."""
    if share == 1 and mode != "shadow":
        raise ConfigError(
            "With a share of 1, no answer of the champion is left to compare latency, coverage and failures with, so the guard "
            "could not protect the users. Use at most 0.99. To move everybody: python -m server activate --generation …"
        )


def begin_experiment(servers: list[ServerState], repo: Path, experiment: Experiment) -> Experiment:
    """Load the challenger on every server, and start the experiment against what they serve. Raises ServerError, ConfigError.

    experiment: its champion is found out here
    """
    require_published(repo, experiment.challenger)
    for state in servers:  # before a challenger is loaded, which takes seconds
        champion = find_served_generation(state.grpc_url)
        refuse_used_name(repo, experiment, champion)
        refuse_other_shop(repo, champion, experiment.challenger)
    for state in servers:
        experiment = replace(experiment, champion=load_challenger(state.grpc_url, state.repo, experiment.challenger))
    return start_experiment(repo, experiment)


def release_challenger(repo: Path) -> str:
    """Unload the challenger from every running server; without any, let the next one load the champion alone. Say which.

    Raises ServerError.
    """
    states = find_running_servers(RUN_DIR, repo)
    if not states:
        drop_challenger(repo)
        return "not loaded, because no server started here runs"
    unloaded = [unload_challenger(state.grpc_url, state.repo) for state in states]
    return "unloaded" if any(unloaded) else "not loaded"


def find_servers(repo: Path) -> list[ServerState]:
    """Return the running servers of a repository. Raises ServerError when there is none."""
    states = find_running_servers(RUN_DIR, repo)
    if not states:
        raise ServerError(f"No server started here serves {repo}. Start one: make serve REPO={repo}")
    return states
