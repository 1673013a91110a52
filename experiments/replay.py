"""Replay the last weeks of a log as live events against a real server: frozen and live quality side by side (`make live`).

    python -m experiments.replay export --data online-retail --repo .run/live/online-retail
    python -m experiments.replay run    --data online-retail --repo .run/live/online-retail --minutes 3

    log ──split by time──▶ the part before the last weeks ─▶ export ─▶ real server
                           the last weeks                 ─▶ observe, in time order; now and then a question

Questions and figures are those of experiments/prequential.py, which measures in process: a question is a purchase of an item
that is new to the user, asked before it is observed. The frozen answers are those of the repository as it was exported.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from experiments.prequential import TITLES
from export.build import build_repository
from export.continuous.prequential import Quality, answer_frozen, choose_questions, make_event_inputs
from export.settings import Settings
from export.steps.recording import make_context_tensors
from perf.command import run
from perf.live.shop import Shop, open_shop
from perf.load.workload import ask
from perf.report.results import to_json_line
from server.status.health import open_local_client
from serving.contract.artifacts import find_stage_folder
from serving.contract.errors import ConfigError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, OBSERVE, STAGES, make_live_specs
from serving.stages.features.user_store import UserStore
from training.dataset import Dataset, load_dataset

EVENTS_PER_CALL = 32
REPORTED_EVERY_S = 5.0
SECONDS_PER_WEEK = 7 * 86_400

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Data = Annotated[str, typer.Option(help="a folder with a dataset.toml, or a bundled name")]
Repo = Annotated[Path, typer.Option(help="repository of the part before the last weeks")]


@app.command("export")
def export_command(
    data: Data = "online-retail",
    repo: Repo = Path(".run/live/online-retail"),
    weeks: Annotated[float, typer.Option(help="held back, from the end of the log", min=0.1)] = 4.0,
) -> None:
    """Train and publish the part of a log before its last weeks."""
    dataset = load_dataset(data)
    times_s = dataset.interactions["timestamp"].to_numpy()
    first = int(np.searchsorted(times_s, times_s[-1] - weeks * SECONDS_PER_WEEK))
    if not first:
        raise ConfigError(f"The log of {data} is not longer than {weeks:g} weeks. Hold back less with --weeks.")
    part = replace(dataset, interactions=dataset.interactions.iloc[:first].reset_index(drop=True))
    build_repository(part, repo, Settings(), Console(stderr=True))


@app.command("run")
def run_command(
    data: Data = "online-retail",
    repo: Repo = Path(".run/live/online-retail"),
    minutes: Annotated[float, typer.Option(help="the replay ends by then: the more, the more questions", min=0.05)] = 3.0,
    most: Annotated[int, typer.Option(help="questions at most", min=1)] = 2_000,
) -> None:
    """Serve a copy of the repository, post what it has not seen, and show how good its answers are meanwhile."""
    dataset = load_dataset(data)
    first = find_first_unseen_row(dataset, repo)
    rows = choose_questions(dataset.interactions, first, len(dataset.interactions), most)
    console = Console()
    console.print(f"{len(dataset.interactions) - first:,} events to replay, {len(rows):,} questions; frozen answers first")
    replay = Replay(dataset, rows, answer_frozen(repo, dataset, rows).items)
    with open_shop(repo) as shop:
        show(replay, replay.take_steps(shop, first, 60 * minutes), console)
    console.print(replay.make_table())
    print(to_json_line(replay.make_document()))


def find_first_unseen_row(dataset: Dataset, repo: Path) -> int:
    """Return the first row of the log that a repository has not seen. Raises ConfigError when it has seen all of them."""
    as_of_s = UserStore(find_stage_folder(repo, STAGES[0], read_pinned_generation(repo)) / "store").as_of_s
    first = int(np.searchsorted(dataset.interactions["timestamp"].to_numpy(), as_of_s, side="right"))
    if first == len(dataset.interactions):
        raise ConfigError(
            f"{repo} was exported from the whole log. Export its first part: python -m experiments.replay export."
        )
    return first


@dataclass
class Replay:
    """A replay and its progress. rows: int64 [Q] of the log, the questions; frozen: int64 [Q, 20], their frozen answers"""

    dataset: Dataset
    rows: np.ndarray
    frozen: np.ndarray
    events: int = 0
    clock_s: int = 0
    asked: list[int] = field(default_factory=list)  # places in `rows`
    live: list[np.ndarray] = field(default_factory=list)  # int64 [20] each
    acknowledged_s: list[float] = field(default_factory=list)  # of each call of observe
    answered_s: list[float] = field(default_factory=list)
    late: int = 0  # answers that do not reflect the events before them
    started_s: float = field(default_factory=time.monotonic)

    def take_steps(self, shop: Shop, first: int, seconds: float) -> Iterator[None]:
        """Post events up to each question, and ask it; yield after each. Questions that are late are left out."""
        events, end, sequence = self.dataset.interactions, len(self.dataset.interactions), 0
        context = tuple(column.tensor for column in self.dataset.context_columns)
        observe = make_live_specs(context)[OBSERVE]
        times_s = events["timestamp"].to_numpy()
        self.started_s, start = time.monotonic(), first
        with open_local_client(shop.site.grpc_url) as client:
            for place, stop in enumerate([*self.rows.tolist(), end]):
                for row in range(start, stop, EVENTS_PER_CALL):
                    part = np.arange(row, min(row + EVENTS_PER_CALL, stop))
                    sent_s = time.perf_counter()
                    sequence = int(ask(client, observe, "", make_event_inputs(self.dataset, part))["sequence"][-1, 0])
                    self.acknowledged_s.append(time.perf_counter() - sent_s)
                    self.events += len(part)
                    self.clock_s = int(times_s[part[-1]])
                start = stop
                due_s = seconds * (stop - first) / (end - first)
                if stop < end and time.monotonic() - self.started_s <= max(due_s, 1.0):
                    self._ask(shop, client, place, sequence)
                yield

    def _ask(self, shop: Shop, client, place: int, sequence: int) -> None:
        event = self.dataset.interactions.iloc[self.rows[place : place + 1]]
        recommend = shop.specs[ENSEMBLE]
        inputs = recommend.fill_optional(1) | {"user_id": event["user_id"].to_numpy(np.int64)[:, None]}
        inputs |= make_context_tensors(event, self.dataset.context_columns)
        inputs |= {"after": np.array([[sequence]])} if sequence else {}
        sent_s = time.perf_counter()
        answer = ask(client, recommend, "", inputs)
        self.answered_s.append(time.perf_counter() - sent_s)
        self.asked.append(place)
        self.live.append(answer["item_ids"][0, : self.frozen.shape[1]])
        self.late += int(answer["degraded"][0, 0]) != 0

    def measure_qualities(self) -> tuple[Quality, Quality] | None:
        """Return frozen and live quality of the questions so far, None before the first."""
        if not self.asked:
            return None
        targets = self.dataset.interactions["item_id"].to_numpy()[self.rows[self.asked]]
        return Quality.of(self.frozen[self.asked], targets), Quality.of(np.stack(self.live), targets)

    def describe(self) -> dict[str, str]:
        elapsed_s = time.monotonic() - self.started_s
        times = (("events of a call durable, p50", self.acknowledged_s), ("answer, p50", self.answered_s))
        return {
            "events": f"{self.events:,}, {self.events / max(elapsed_s, 1e-9):,.0f}/s",
            "clock of the log": time.strftime("%Y-%m-%d %H:%M", time.gmtime(self.clock_s)) if self.clock_s else "-",
            "questions": f"{len(self.asked):,}",
            **{name: f"{1e3 * float(np.median(durations_s)):.1f} ms" for name, durations_s in times if durations_s},
            "answers degraded": str(self.late),
        }

    def make_table(self) -> Table:
        """Return the progress of the replay, and frozen and live quality so far."""
        table = Table(
            "", "frozen", "live", "live over frozen", title="The last weeks of the log, replayed", title_justify="left"
        )
        if qualities := self.measure_qualities():
            for quality in fields(Quality):
                frozen, live = (getattr(side, quality.name) for side in qualities)
                ratio = f"{live / frozen:.2f}x" if frozen else "-"
                table.add_row(TITLES[quality.name], f"{frozen:.4f}", f"{live:.4f}", ratio)
        table.add_section()
        for name, text in self.describe().items():
            table.add_row(name, "", text, "")
        return table

    def make_line(self) -> str:
        """Return the same as one line."""
        qualities = self.measure_qualities()
        sides = zip(("frozen", "live"), qualities, strict=True) if qualities else ()
        shown = (f"{name} Recall@20 {side.recall_at_20:.4f}, NDCG@10 {side.ndcg_at_10:.4f}" for name, side in sides)
        return "; ".join([*(f"{name} {text}" for name, text in self.describe().items()), *shown])

    def make_document(self) -> dict[str, Any]:
        names, qualities = ("frozen", "live"), self.measure_qualities()
        sides = {name: vars(side) for name, side in zip(names, qualities, strict=True)} if qualities else {}
        return {"replay": self.dataset.description.name, "events": self.events, "questions": len(self.asked), **sides}


def show(replay: Replay, steps: Iterator[None], console: Console) -> None:
    """Run a replay to its end: a table that changes on a terminal, a line every few seconds elsewhere."""
    if console.is_terminal:
        with Live(replay.make_table(), console=console, auto_refresh=False) as screen:
            for _ in yield_at_intervals(steps, 0.5):
                screen.update(replay.make_table(), refresh=True)
        return
    for _ in yield_at_intervals(steps, REPORTED_EVERY_S):
        console.print(replay.make_line(), markup=False, highlight=False, soft_wrap=True)


def yield_at_intervals(steps: Iterator[None], seconds: float) -> Iterator[None]:
    """Run the steps, and yield every few seconds in between."""
    shown_s = time.monotonic()
    for _ in steps:
        if time.monotonic() - shown_s >= seconds:
            shown_s = time.monotonic()
            yield


if __name__ == "__main__":
    run(app, "python -m experiments.replay")
