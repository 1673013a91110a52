"""A round of continuous training on a real server: events, a generation, a share of the users, and a decision."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from export.__main__ import app
from repository.experiments import find_running
from repository.registry import read_acts
from server import watch
from server.helpers import gateway
from server.launcher import TritonServer
from server.start.environment import RUN_DIR
from server.start.ports import find_free_port
from server.status.health import find_held_versions
from serving.contract.generations import read_pinned_generation
from tests.repositories import copy_to_change, followed_shop
from tests.server.support.supervised import Supervised, stopped_after
from tests.waiting import until

USERS, ANSWERS = range(1, 151), 2  # each user asks so often


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Supervised]:
    """A served shop whose server the commands of this checkout find."""
    repo = copy_to_change(followed_shop() / "repository", tmp_path / "repository")
    port, config = find_free_port(), tmp_path / "gateway.toml"
    config.write_text("deadline_ms = 5_000\n")
    server = TritonServer(repo, run_dir=RUN_DIR).start()
    state = gateway.follow(server.state, port, str(config), RUN_DIR)
    watch.start_supervisor(state, RUN_DIR)
    with stopped_after(state, repo, RUN_DIR, port) as shop:
        yield shop


def post(shop: Supervised, events: list[dict]) -> None:
    assert shop.http.post("/v1/events", json=events).status_code == 200


def ask(shop: Supervised, user: int) -> dict:
    return shop.http.get("/v1/recommendations", params={"user": user, "k": 5}).raise_for_status().json()


def follow(repo: Path) -> str:
    """Return what one round of the command says."""
    from tests.unit.small_shops import few_resamples  # it imports what trains, which takes seconds

    options = ["--data", str(followed_shop() / "data"), "--repo", str(repo), "--share", "0.5", "--once"]
    with few_resamples():
        return CliRunner().invoke(app, ["follow", *options], catch_exceptions=False).stdout


def test_what_users_do_becomes_a_generation_that_half_of_them_meet_and_then_all(shop):
    with (followed_shop() / "later.csv").open() as file:
        later = [
            {"user": int(row["user_id"]), "item": int(row["item_id"]), "timestamp": 1_000 * int(row["timestamp"])}
            for row in csv.DictReader(file)
        ]
    for first in range(0, len(later), 500):
        post(shop, later[first : first + 500])
    told = follow(shop.repo)
    assert "generation 2 meets 50.0% of the users" in told
    experiment = find_running(shop.repo)
    assert experiment is not None
    assert (experiment.name, experiment.champion, experiment.promotes, experiment.days) == ("generation-2", 1, True, 7)
    assert read_pinned_generation(shop.repo) == 1
    assert find_held_versions(shop.state.grpc_url) == {1, 2}

    answers = [(user, ask(shop, user)) for user in USERS for _ in range(ANSWERS)]
    met = Counter(answer["generation"] for _, answer in answers)
    assert set(met) == {1, 2}
    assert min(met.values()) > len(answers) / 3
    clicked = [(user, answer) for user, answer in answers if answer["generation"] == 2]
    post(shop, [{"user": user, "item": a["items"][0]["id"], "request_id": a["request_id"]} for user, a in clicked])
    until(lambda: shop.state.generation == 2)  # nobody asks meanwhile, whose answers would count
    until(lambda: {ask(shop, user)["generation"] for user in USERS} == {2})
    acts = [(act.action, act.generation) for act in read_acts(shop.repo)]
    expected = [("published", 2), ("experiment started", 2), ("promoted", 2), ("replaced", 1), ("activated", 2)]
    assert acts[-len(expected) :] == expected
    assert "more of the answers are clicked" in read_acts(shop.repo)[-3].reason
    until(lambda: find_held_versions(shop.state.grpc_url) == {2})  # the generation before is unloaded last
