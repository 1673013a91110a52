"""Let broken challengers meet users of the simulated shop: how soon does the guard roll each back, and why?

    python -m experiments.broken_challengers

The champion is an export of what users took. Each challenger has one fault of experiments/shop_faults.py, in the code of a
stage or in the feeds of the catalogue. Users visit through the gateway, and the guard looks after every LOOK_EVERY answers of
the challenger.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.compute as pc
from rich.console import Console

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from experiments.served import Served, serve_with_gateway
from experiments.shop_faults import CATALOGUE_FAULTS, FAULTS, begin_fault, break_stage
from experiments.shop_world import World
from export.build import build_repository
from export.relayout import relayout
from export.settings import Settings
from live.exposures import read_exposures
from perf.command import run
from repository.experiments import end_experiment, find_experiment_folder
from server.experiment import begin_experiment
from server.generations.challenger import unload_challenger
from server.start.environment import RUN_DIR
from serving.live.experiment import CHALLENGER_ARM, Experiment
from training.dataset import Dataset
from trials.guard import Guard

SETTINGS = {
    "pipeline": {"recorded_requests": 64},
    "ranker": {"compression": "none"},
    "training": {"teachers": "one", "minutes": 1.5},
}
USERS, ITEMS = 1_500, 1_000
DAYS, CHALLENGERS = 30, 20  # days that a challenger would serve if nobody stopped it
LENGTH = 10  # items of a list
EVENTS_PER_USER, LOG_DAYS = 30, 60  # of the log that the first generation learns from
VISITS_PER_DAY = 1.0  # of each user
SHARE = 0.5  # of the users, who meet a challenger
LOOK_EVERY = 25  # answers of the challenger between two looks of the guard
MOST_SEEN = 0.01  # share of its answers that a broken challenger may give; a harmless one is tried for twice as many
PLANNED = int(DAYS * VISITS_PER_DAY * USERS * SHARE)  # answers of a challenger that nobody stops
FLUSHED_S = 30.0  # the gateway writes its exposures every ten
GATEWAY_SETTINGS = "deadline_ms = 2_000\n"
console = Console(stderr=True, width=130, soft_wrap=True)
say = console.print
# The experiment as its guard ended it, None where it did not; and how many answers the challenger gave.
Outcome = tuple[Experiment | None, int]


@dataclass
class Storefront:
    """Visitors of the gateway, whose clicks carry the request they belong to."""

    world: World
    served: Served
    http: httpx.Client

    def visit(self, count: int, rng: np.random.Generator) -> None:
        """Let users come through the gateway, one after the other, and post what they take."""
        clicks = []
        for user in rng.choice(self.world.user_ids, count):
            answer = self.http.get("/v1/recommendations", params={"user": int(user), "k": LENGTH}).raise_for_status().json()
            items = np.array([int(item["id"]) for item in answer["items"]], np.int64)  # a broken challenger may show none
            took = items[self.world.react(int(user), items)]
            clicks += [{"user": int(user), "item": int(item), "request_id": answer["request_id"]} for item in took]
        if clicks:
            self.http.post("/v1/events", json=clicks).raise_for_status()

    def try_out(self, experiment: Experiment, most: int, rng: np.random.Generator) -> Outcome:
        """Run an experiment until its guard ends it, or the challenger has given `most` answers.

        Return the experiment as it was ended, None where it was not, and the answers of the challenger.
        """
        running = begin_experiment([self.served.state], self.served.repo, experiment)
        guard, visited, ended, answers = Guard(self.served.repo), 0, None, 0
        with begin_fault(self.served.repo, experiment.challenger):
            while ended is None and answers < most:
                count = int(LOOK_EVERY / running.share)
                self.visit(count, rng)
                visited += count
                answers = wait_for_answers(self.served, running, visited)
                ended = guard.look()
        if ended is None:
            end_experiment(self.served.repo, "tried long enough")
        unload_challenger(self.served.grpc_url, self.served.repo)
        return ended, answers


def wait_for_answers(served: Served, experiment: Experiment, count: int) -> int:
    """Return how many answers the challenger gave, once all `count` answers of an experiment are logged, or after FLUSHED_S.

    Answers that are not logged by then count as the challenger's, because nobody knows better.
    """
    deadline_s = time.monotonic() + FLUSHED_S
    while True:
        logged = read_exposures(find_experiment_folder(served.repo), experiment.started_ms)
        answers = logged.filter(pc.equal(logged["experiment"], experiment.name))
        if len(answers) >= count or time.monotonic() > deadline_s:
            challengers = int(pc.sum(pc.equal(answers["arm"], CHALLENGER_ARM)).as_py() or 0)
            return challengers + max(count - len(answers), 0)
        time.sleep(0.5)


def try_broken(front: Storefront, dataset: Dataset, scratch: Path, rng: np.random.Generator) -> list[Figure]:
    """Try CHALLENGERS broken challengers, each fault about as often as the others.

    Each is published just before its trial, because a repository keeps few generations.
    """
    outcomes: dict[str, list[Outcome]] = {}
    for name, numbers in zip(FAULTS, np.array_split(np.arange(CHALLENGERS), len(FAULTS)), strict=True):
        say(f"a broken generation: {name}")
        broken, outcomes[name] = publish_broken(dataset, scratch, front.served.repo, name), []
        for number in numbers:
            ended, answers = front.try_out(Experiment(f"broken {number}", 0, broken, SHARE, promotes=True), PLANNED, rng)
            say(f"broken challenger {number + 1} ({name}) {describe(ended)} after {answers} answers")
            outcomes[name].append((ended, answers))
    return make_figures(outcomes, PLANNED)


def make_figures(outcomes: dict[str, list[Outcome]], planned: int) -> list[Figure]:
    """Return the figures of broken challengers. outcomes: fault -> outcome of each; planned: answers of one that goes on"""
    all_outcomes = [outcome for tried in outcomes.values() for outcome in tried]
    shares = [answers / planned if ended and ended.state == "rolled back" else 1.0 for ended, answers in all_outcomes]
    return [
        *(
            Figure(name=f"{name}: answers until rolled back", values=[answers for _, answers in tried])
            for name, tried in outcomes.items()
        ),
        Figure(name="kinds of faults of broken challengers", values=[len(outcomes)]),
        Figure(name="broken challengers: share of their answers until rolled back", values=[max(shares)], at_most=MOST_SEEN),
        Figure(
            name="broken challengers that were rolled back",
            values=[sum(share < 1 for share in shares)],
            at_least=len(all_outcomes),
        ),
    ]


def try_harmless(front: Storefront, same: int, rng: np.random.Generator) -> list[Figure]:
    """Try a challenger with the models of the champion. same: its generation"""
    ended, answers = front.try_out(Experiment("harmless", 0, same, SHARE, promotes=True), int(2 * MOST_SEEN * PLANNED), rng)
    say(f"a harmless challenger {describe(ended)} after {answers} answers")
    return [
        Figure(name="answers of a harmless challenger", values=[answers]),
        Figure(name="harmless challengers that were ended", values=[ended is not None], at_most=0),
    ]


def describe(ended: Experiment | None) -> str:
    return f"is {ended.state}, because {ended.reason}," if ended else "goes on"


def publish(dataset: Dataset, scratch: Path, repo: Path, name: str, rules: dict[str, Any] | None = None) -> int:
    """Export a data set and publish it in a repository that another generation stays pinned in. Return the generation."""
    settings = SETTINGS | {"rules": rules or {}}
    build_repository(dataset, scratch / name, Settings.model_validate(settings), console)
    return relayout(scratch / name, repo, "ensemble")


def publish_broken(dataset: Dataset, scratch: Path, repo: Path, fault: str) -> int:
    """Publish a broken generation in a served repository. Return it. scratch: for exports and a copy of the repository"""
    if fault in CATALOGUE_FAULTS:
        return publish(dataset, scratch, repo, fault.replace(" ", "-"), CATALOGUE_FAULTS[fault](dataset))
    generation = publish_again(scratch, repo)
    break_stage(repo, generation, fault)
    return generation


def publish_again(scratch: Path, repo: Path) -> int:
    """Publish the models of a served repository again. Return the generation."""
    if not (copy := scratch / "whole").exists():
        shutil.copytree(repo, copy, symlinks=True)
    return relayout(copy, repo, "ensemble")


def measure() -> list[Figure]:
    rng = np.random.default_rng(0)
    world = World(USERS, ITEMS, rng)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        dataset = world.write_log(scratch / "data", EVENTS_PER_USER * USERS, LOG_DAYS, int(time.time()))
        repo = scratch / "repository"
        build_repository(dataset, repo, Settings.model_validate(SETTINGS), console)
        with (
            serve_with_gateway(repo, GATEWAY_SETTINGS, run_dir=RUN_DIR) as served,
            httpx.Client(base_url=f"http://127.0.0.1:{served.port}", timeout=60) as http,
        ):
            front = Storefront(world, served, http)
            figures = try_harmless(front, publish_again(scratch, repo), rng)
            return figures + try_broken(front, dataset, scratch, rng)


def main(results: ResultsFolder = RESULTS) -> None:
    """Measure how soon the guard rolls broken challengers back, in half an hour. Exit code 1 when it is too late."""
    machine, figures = read_machine(), measure()
    conditions = (
        f"{USERS:,} users, {ITEMS:,} items; challengers meet {SHARE:.0%} of the users, and would give {DAYS} days' answers of "
        f"{VISITS_PER_DAY:g} visit a user if nobody stopped them; the guard looks after every {LOOK_EVERY} of them"
    )
    command = "python -m experiments.broken_challengers"
    finish("broken-challengers", "Broken challengers", command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.broken_challengers")
