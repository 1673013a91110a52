"""Run a simulated shop against the real server: does it learn by itself, and are better generations found out?

    python -m experiments.simulated_shop

Users have tastes that change (experiments/shop_world.py). The models know of them only what users take. Lists come from a
tritonserver, events go to it with simulated times. `export follow` trains a generation every week, and two simulated hours
after the tastes of half of the users have changed. How many requests A/B and interleaving need is drawn from served lists and
the chances of clicks. At last, in another shop with an empty live store, users meet a weak generation and the latest one as its
challenger, through the gateway and under the guard (experiments/broken_challengers.py has broken ones).

Beside the best lists, served ones get worse from day to day, because nobody is shown again what they took: what was ranked high
rightly is taken and gone, and what was ranked high wrongly stays. The best lists, which know the tastes, stay as good.

For the same reason, lists of a generation that did not serve for weeks can be clicked as often as those of one that did, though
it ranks no better: what it ranks high rightly is still there to be taken. So generations of a part of the log are compared with
that of the whole log on the first day, before anything was taken.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np

from experiments.broken_challengers import (
    DAYS,
    EVENTS_PER_USER,
    GATEWAY_SETTINGS,
    ITEMS,
    LENGTH,
    LOG_DAYS,
    PLANNED,
    SETTINGS,
    USERS,
    VISITS_PER_DAY,
    Storefront,
    console,
    describe,
    publish,
    say,
)
from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from experiments.served import Served, serve_with_gateway
from experiments.shop_decisions import LEAST_SAVED, RUNS, compare_ways, compute_clicked, count_false_alarms
from experiments.shop_world import DAY_S, TASTE_DAYS, World
from export.build import build_repository
from export.continuous.follow import STARTED, Round, follow_once
from export.relayout import relayout
from export.settings import Settings
from perf.command import run
from server import control
from server.start.environment import RUN_DIR
from serving.live.experiment import Experiment
from training.dataset import Dataset
from triton_recommender import Event, Query, Recommender

BATCH = 64  # visits that are asked at once
VISITS_IN_SALE = 20.0  # of each user; a sale lasts the two hours after the change of taste
FOUND = 0.3  # visits in which a user finds an item without the list, and takes it
TRAINED_EVERY_DAYS, CHANGED, SALE_HOURS = 7, 0.5, 2  # days between two generations; share of the users whose taste changes
FAULTY_SHARE = 0.05  # of the users, who have the lists of a weak generation where a fault concerns some of them
WEAK = "weak"  # the generation of a tenth of the log, and its repository


@dataclass
class Shop:
    """The world and the server that recommends in it. had: bool [U, I], items that each user has taken"""

    world: World
    served: Served
    recommender: Recommender
    had: np.ndarray
    now_s: float

    def ask(self, users: np.ndarray) -> tuple[np.ndarray, str]:
        """Return what users are recommended now, int64 [N, K], and the id of the request."""
        answers = self.recommender.recommend_many([Query(int(user)) for user in users], k=LENGTH)
        return np.array([answer.item_ids for answer in answers]), answers[0].request_id

    def rank_lists(self) -> np.ndarray:
        """Return the lists of all users, int64 [U, K]."""
        return self.ask(self.world.user_ids)[0]

    def measure_quality(self) -> float:
        return self.world.measure_quality(self.rank_lists(), self.had)

    def trade(self, hours: float, visits: float, rng: np.random.Generator) -> None:
        """Let users come, be shown a list, and take what they like. visits: of each user, on average"""
        count = int(visits * len(self.world.user_ids))
        times_s = self.now_s + np.sort(rng.uniform(0, hours * 3_600, count))
        for first in range(0, count, BATCH):
            users, now_s = rng.choice(self.world.user_ids, min(BATCH, count - first)), times_s[first : first + BATCH]
            events, found_items = [], np.where(rng.random(len(users)) < FOUND, self.world.pick(users), 0)
            lists, request_id = self.ask(users)
            for user, items, found_item, at_s in zip(users, lists, found_items, now_s, strict=True):
                origins: dict[int, str | None] = dict.fromkeys(items[self.world.react(user, items)].tolist(), request_id)
                for item, shown_by in (origins | ({int(found_item): None} if found_item else {})).items():
                    events.append(Event(int(user), item, timestamp_ms=int(1_000 * at_s), request_id=shown_by))
                    self.had[user - 1, item - 1] = True
            if events:
                self.recommender.observe_many(events)
        self.now_s += hours * 3_600
        self.world.pass_days(hours / 24)

    def learn(self, dataset: Dataset) -> Round:
        """Train and judge a generation, and serve it if it passes."""
        round_ = follow_once(dataset, self.served.repo, Settings.model_validate(SETTINGS), 1, console)
        say(round_.report)
        return round_


def trade_for_days(shop: Shop, dataset: Dataset, rng: np.random.Generator) -> list[Figure]:
    """Let the days pass, with a change of taste in the middle. Return the figures of learning."""
    changes_on, first = DAYS // 2, shop.measure_quality()
    rounds: list[Round] = []
    for day in range(DAYS):
        if day == changes_on:
            before = shop.measure_quality()
            shop.world.change_tastes(CHANGED)
            changed = shop.measure_quality()
            shop.trade(SALE_HOURS, VISITS_IN_SALE, rng)
            live = shop.measure_quality()
            rounds.append(shop.learn(dataset))
            renewed, after = bool(rounds[-1].generation), shop.measure_quality()
            shop.trade(24 - SALE_HOURS, VISITS_PER_DAY, rng)
        else:
            shop.trade(24, VISITS_PER_DAY, rng)
        if day % TRAINED_EVERY_DAYS == TRAINED_EVERY_DAYS - 1:
            rounds.append(shop.learn(dataset))
        say(f"day {day + 1}: users take {shop.measure_quality():.1%} of what they would of the best lists")
    return [
        Figure(name="lists over the best ones, first day", values=[first]),
        Figure(name="before the change of taste", values=[before]),
        Figure(name="just after it", values=[changed]),
        Figure(name="two hours later, by live events alone", values=[live]),
        Figure(name="and with the generation trained then", values=[after]),
        Figure(name="that generation was published", values=[renewed], at_least=1),
        Figure(name="regained by live events alone", values=[(live - changed) / (before - changed)]),
        Figure(name="regained of what was lost", values=[(after - changed) / (before - changed)], at_least=0.95),
        Figure(name="on the last day", values=[shop.measure_quality()]),
        Figure(name="generations trained and published", values=[sum(bool(done.generation) for done in rounds)], at_least=1),
        Figure(name="rounds that started from weights", values=[sum(STARTED in done.report for done in rounds)], at_least=1),
    ]


def compare_with_parts(shop: Shop, dataset: Dataset, scratch: Path, rng: np.random.Generator) -> list[Figure]:
    """Compare the lists of the generation that serves with those of two generations of a part of the log.

    The one of a tenth of the log stays in `scratch / WEAK`, a repository of its own.
    """
    served, whole, good = shop.served, shop.served.state.generation, shop.rank_lists()
    lists = {}
    for name, part in ((WEAK, 10), ("half", 2)):
        say(f"a generation of one event in {part}")
        thinned = replace(dataset, interactions=dataset.interactions.iloc[::part].reset_index(drop=True))
        control.activate(served.state, publish(thinned, scratch, served.repo, name), served.run_dir)
        lists[name] = shop.rank_lists()
        control.activate(served.state, whole, served.run_dir)
    some = np.where(rng.random(len(good))[:, None] < FAULTY_SHARE, lists[WEAK], good)
    return [
        *compare_ways(shop.world, "a fault of some users", some, good, rng, LEAST_SAVED),
        *compare_ways(shop.world, "half of the log is missing", lists["half"], good, rng, LEAST_SAVED),
    ]


def try_better(world: World, repo: Path, weak: Path, rng: np.random.Generator) -> list[Figure]:
    """Let the pinned generation of `repo` challenge the weak one of another repository."""
    good = relayout(repo, weak, "ensemble")
    with (
        serve_with_gateway(weak, GATEWAY_SETTINGS, run_dir=RUN_DIR) as served,
        httpx.Client(base_url=f"http://127.0.0.1:{served.port}", timeout=60) as http,
    ):
        control.activate(served.state, 1, served.run_dir)
        front = Storefront(world, served, http)
        ended, answers = front.try_out(Experiment("better", 0, good, 0.5, promotes=True), PLANNED, rng)
    say(f"better challenger {describe(ended)} after {answers} answers")
    return [
        Figure(name="the guard promotes a better challenger", values=[bool(ended and ended.state == "promoted")], at_least=1),
        Figure(name="answers of the better challenger until then", values=[answers]),
    ]


def measure() -> list[Figure]:
    rng = np.random.default_rng(0)
    world = World(USERS, ITEMS, rng)
    begins_s = time.time() - (DAYS + 1) * DAY_S
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        dataset = world.write_log(scratch / "data", EVENTS_PER_USER * USERS, LOG_DAYS, int(begins_s))
        repo = scratch / "repository"
        say("the first generation")
        build_repository(dataset, repo, Settings.model_validate(SETTINGS), console)
        with (
            serve_with_gateway(repo, GATEWAY_SETTINGS, run_dir=RUN_DIR) as served,
            Recommender(served.grpc_url, timeouts=60.0) as recommender,
        ):
            had = np.zeros((USERS, ITEMS), bool)
            log = dataset.interactions
            had[log["user_id"].to_numpy() - 1, log["item_id"].to_numpy() - 1] = True
            shop = Shop(world, served, recommender, had, begins_s)
            figures = compare_with_parts(shop, dataset, scratch, rng)
            figures += trade_for_days(shop, dataset, rng)
            figures.append(count_false_alarms(compute_clicked(world, shop.rank_lists()), RUNS, rng))
        figures += try_better(world, repo, scratch / WEAK, rng)
    return figures


def main(results: ResultsFolder = RESULTS) -> None:
    """Run the simulated shop. Exit code 1 when a bound is missed. Takes less than an hour."""
    machine, figures = read_machine(), measure()
    conditions = (
        f"{USERS:,} users, {ITEMS:,} items, {DAYS} days of {VISITS_PER_DAY:g} visit a user, {VISITS_IN_SALE:g} in the "
        f"{SALE_HOURS} hours after {CHANGED:.0%} of the users changed their taste, kept for "
        f"{TASTE_DAYS:g} days otherwise; requests of A/A, A/B and interleaved tests are drawn from the chances of clicks, "
        "without server, gateway, log or guard"
    )
    command = "python -m experiments.simulated_shop"
    finish("simulated-shop", "A simulated shop", command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.simulated_shop")
