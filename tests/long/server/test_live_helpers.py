"""The helpers of a live store: those that the settings ask for, with the server's tag, until it ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from server import processes
from server.helpers.generation_helpers import find_helpers, follow
from server.helpers.revive import HelperWatch
from server.start.ports import Ports
from server.state import ServerState
from serving.contract.artifacts import find_stage_folder, read_stage
from serving.contract.tensors import OBSERVE
from serving.live.reader import Reader
from serving.live.store import find_live_folder
from serving.stages.live.models import Observe
from tests.repositories import copy_to_change
from tests.tags import draw_tag
from tests.unit.live.shops import repository_with_kinds
from tests.unit.tables.kafka_broker import MockBroker
from tests.waiting import until

TOPIC = "shop-events"


@pytest.fixture
def state(tmp_path) -> Iterator[ServerState]:
    repo = copy_to_change(repository_with_kinds(), tmp_path / "repo")
    Observe.load(find_stage_folder(repo, OBSERVE, 1)).close()  # makes the store, as the server does
    state = ServerState(1, draw_tag(), repo, tmp_path / "log", Ports(1, 2, 3), generation=1)
    yield state
    processes.terminate(find_helpers(state.tag))
    # what a supervisor started at that moment was told to end by its supervisor alone
    until(lambda: not find_helpers(state.tag), lambda: f"{find_helpers(state.tag)} still run")


def set_live(repo: Path, **settings: object) -> None:
    """Change what the export said of `observe`."""
    path = find_stage_folder(repo, OBSERVE, 1) / "stage.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"settings": facts["settings"] | settings}))


def test_maintenance_and_a_consumer_run_while_the_settings_ask_for_them(state, tmp_path, monkeypatch):
    monkeypatch.setattr("server.helpers.generation_helpers.MAINTAIN_EVERY_S", 1.0)  # the first round begins no later
    broker = MockBroker()
    set_live(state.repo, brokers=broker.address, topic=TOPIC)
    follow(state, tmp_path)
    broker.send(TOPIC, b'{"user_id": 3, "item_id": 5}')
    log = tmp_path / "logs" / "live-consume-1.log"
    with closing(Reader(find_live_folder(state.repo), read_stage(find_stage_folder(state.repo, OBSERVE, 1)).shop)) as reader:

        def n_events() -> int:
            with reader.snapshot() as snapshot:
                return snapshot.read_progress().last_sequence

        until(lambda: n_events() == 1, log.read_text)
    rounds = tmp_path / "logs" / "live-maintain-1.log"
    until(lambda: "0 idle users forgotten" in rounds.read_text(), rounds.read_text)
    assert {json.loads(line)["logger"] for line in rounds.read_text().splitlines()} == {"live.maintenance"}
    commands = [process.cmdline() for process in find_helpers(state.tag) if "maintain" in process.cmdline()]
    assert {command[command.index("maintain") + 1] for command in commands} == {"1"}  # the generation that answers
    consumer = [process for process in find_helpers(state.tag) if "consume" in process.cmdline()]
    assert len(consumer) == 2  # with its supervisor
    follow(state, tmp_path)
    assert [process for process in find_helpers(state.tag) if "consume" in process.cmdline()] == consumer
    assert json.loads(log.read_text().splitlines()[0])["message"] == f"consumes topic {TOPIC} of {broker.address}"
    set_live(state.repo, brokers="")
    follow(state, tmp_path)
    assert not [process for process in find_helpers(state.tag) if "consume" in process.cmdline()]
    earlier = log.read_text()
    set_live(state.repo, brokers=broker.address)
    follow(state, tmp_path)
    assert log.with_name(f"{log.name}.1").read_text() == earlier
    broker.stop()


def test_a_repository_without_live_models_has_no_helpers(state, tmp_path):
    shutil.rmtree(state.repo / OBSERVE)
    follow(state, tmp_path)
    assert find_helpers(state.tag) == []


def test_helpers_that_are_killed_with_their_supervisors_are_started_again(state, tmp_path, monkeypatch):
    follow(state, tmp_path)
    state.save(tmp_path)
    watch = HelperWatch(state, tmp_path)
    assert [watch.look(), watch.look()] == ["", ""]
    for process in find_helpers(state.tag):
        process.kill()
    until(lambda: not find_helpers(state.tag))
    assert [watch.look(), watch.look()] == ["", ""]  # the server may be moving to another generation
    assert find_helpers(state.tag) == []
    monkeypatch.setattr("server.helpers.revive.MOVE_S", 0.0)
    state.change(tmp_path, generation=2)
    assert watch.look() == ""  # whoever moved it keeps its helpers
    state.change(tmp_path, generation=1)
    assert watch.look() == "helpers that were missing are started: maintain"
    until(lambda: len(find_helpers(state.tag)) == 2)
    assert [watch.look(), watch.look()] == ["", ""]
