"""The commands of `python -m perf live`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from perf.bench import SEED
from perf.command import BROKEN, console, parse_counts, refuse_options_before
from perf.figures import RESULTS, Figure, ResultsFolder, finish
from perf.live import after, items, memory, reads, throughput, visible
from perf.live.shop import open_shop
from perf.live.visible import Events
from perf.report.results import read_machine
from server.start.environment import MEASURED_DIR

app = typer.Typer(help="The live loop: how fast, how current, how large. Without a command: all of it, in some minutes.")

Repo = Annotated[Path, typer.Option(help="the model repository; what is served is a copy of it with a live store of its own")]
DEFAULT = Path("model_repository")
EVENT_RATE, EVENTS_PER_REQUEST, LOAD_S, THROUGHPUT_S, ROUNDS = 1_000.0, 16, 20.0, 10.0, 3
CHAINS, CALLS, NEW_ITEMS, ANSWERS = 5_000, 100_000, 100, 3_000
EVENTS, REQUESTS = 200_000, 500  # of the store, and asked before memory is read


@app.callback(invoke_without_command=True)
def main_live(context: typer.Context, repo: Repo = DEFAULT, results: ResultsFolder = RESULTS) -> None:
    """Measure everything, without a command. Exit code 1 when a bound is missed."""
    if context.invoked_subcommand:
        refuse_options_before(context)
        return
    missed = 0
    for part in (visible_command, after_command, throughput_command, reads_command, items_command, memory_command):
        try:
            context.invoke(part, results=results, **({} if part is reads_command else {"repo": repo}))
        except typer.Exit as ended:
            missed += ended.exit_code
    if missed:
        raise typer.Exit(BROKEN)


@app.command("visible")
def visible_command(
    repo: Repo = DEFAULT,
    event_rate: Annotated[float, typer.Option(help="events/s", min=1)] = EVENT_RATE,
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure events beside `recommend` at half of its peak: event to changed answer, and what events cost `recommend`."""

    def measure(step: Callable[[str], None]) -> list[Figure]:
        with tempfile.TemporaryDirectory() as folder, open_shop(repo) as shop:
            events = Events(event_rate, EVENTS_PER_REQUEST)
            return visible.measure(shop, Path(folder), events, LOAD_S, ROUNDS, new_rng(), step)

    events = f"{event_rate:g} events/s, {EVENTS_PER_REQUEST} a request"
    load = f"recommend at half of its peak, {visible.PROBE_SHARE:.0%} of it by probes"
    conditions = f"{events}, beside {load}, {ROUNDS} rounds of {LOAD_S:g} s"
    run_part("visible", "An event shows in the next answer", conditions, results, measure, repo, f"--event-rate {event_rate:g}")


@app.command("after")
def after_command(
    repo: Repo = DEFAULT,
    count: Annotated[int, typer.Option("--after", help="answers, each after an event of its own", min=1)] = CHAINS,
    results: ResultsFolder = RESULTS,
) -> None:
    """Check that every answer that names an event by `after` reflects it."""

    def measure(step: Callable[[str], None]) -> list[Figure]:
        step(f"{count:,} purchases")
        with open_shop(repo) as shop:
            return after.measure(shop, count, new_rng())

    run_part("after", "Answers that name an event", f"{count:,} purchases", results, measure, repo, f"--after {count}")


@app.command("throughput")
def throughput_command(repo: Repo = DEFAULT, results: ResultsFolder = RESULTS) -> None:
    """Measure durable events/s of 32 clients that send 16 events a request, and one client beside the disk's own fsync."""

    def measure(step: Callable[[str], None]) -> list[Figure]:
        with open_shop(repo) as shop:
            return throughput.measure(shop, THROUGHPUT_S, ROUNDS, new_rng(), step)

    run_part("throughput", "Durable events", f"{ROUNDS} rounds of {THROUGHPUT_S:g} s", results, measure, repo)


@app.command("reads")
def reads_command(
    users: Annotated[str, typer.Option(help="comma list of users in the store")] = ",".join(map(str, reads.SIZES)),
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure the store read of `preprocess`, in process over stores of random records."""

    def measure(step: Callable[[str], None]) -> list[Figure]:
        sizes = tuple(parse_counts(users))
        MEASURED_DIR.mkdir(parents=True, exist_ok=True)
        return reads.measure(CALLS, sizes, MEASURED_DIR, new_rng(), step)

    conditions = f"{CALLS:,} reads of one user each, in process"
    run_part("reads", "Store reads of preprocess", conditions, results, measure, options=f"--users {users}")


@app.command("items")
def items_command(
    repo: Repo = DEFAULT,
    answers: Annotated[int, typer.Option(help="answers after an item became unavailable", min=1)] = ANSWERS,
    results: ResultsFolder = RESULTS,
) -> None:
    """Check that new items are served within a second of their upsert, and unavailable ones in no later answer."""

    def measure(step: Callable[[str], None]) -> list[Figure]:
        with open_shop(repo) as shop:
            return items.measure(shop, NEW_ITEMS, answers, new_rng(), step)

    conditions = f"{NEW_ITEMS} new items, {answers:,} answers"
    run_part("items", "New and unavailable items", conditions, results, measure, repo, f"--answers {answers}")


@app.command("memory")
def memory_command(repo: Repo = DEFAULT, results: ResultsFolder = RESULTS) -> None:
    """Measure the server's memory (PSS of all its processes) with live state against without."""

    def measure(step: Callable[[str], None]) -> list[Figure]:
        return memory.measure(repo, EVENTS, REQUESTS, new_rng(), step)

    run_part("memory", "Memory of live state", f"{EVENTS:,} events, {REQUESTS} requests, PSS", results, measure, repo)


def run_part(
    name: str,
    title: str,
    conditions: str,
    results: Path,
    measure: Callable[[Callable[[str], None]], list[Figure]],
    repo: Path | None = None,
    options: str = "",
) -> None:
    """Measure one part and write `live-<name>`. Raises typer.Exit where a bound is missed.

    repo: what is served, None for a part without a server; options: those that repeat the measurement, but for `--repo`
    """
    machine = read_machine()
    figures = measure(lambda text: console.print(text, markup=False, highlight=False))
    copy_text = f"; a copy of {repo.resolve().name}" if repo else ""
    command = " ".join(filter(None, ("python -m perf live", name, options, f"--repo {repo}" if repo else "")))
    finish(f"live-{name}", title, command, conditions + copy_text, figures, results, machine)


def new_rng() -> np.random.Generator:
    return np.random.default_rng(SEED)
