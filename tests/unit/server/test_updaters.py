"""The updater that runs is that of the generation that answers, with the server's tag, by the code published with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from repository.challenger import remove_challenger, write_challenger
from repository.tables import find_tables_settings, has_update_source
from repository.triton.models import write_config
from server import processes, supervisor
from server.helpers import revive
from server.helpers.generation_helpers import find_helpers, follow
from server.helpers.revive import HelperWatch
from server.start.ports import Ports
from server.state import ServerState
from serving.contract.errors import ArtifactError, ServerError
from serving.contract.tensors import ENSEMBLE
from tests.tags import draw_tag
from tests.waiting import until

FOLLOWS = "import sys, time; print('follows', *sys.argv[1:], flush=True); time.sleep(60)"
UPDATES = {"brokers": "localhost:9092"}


def publish(repo: Path, generation: int = 1, updates: dict | None = UPDATES, code: str = FOLLOWS) -> None:
    """Write a rank stage with settings of its tables, and an updater that only says that it runs."""
    stage = repo / "rank" / str(generation)
    (stage / "tables").mkdir(parents=True)
    (stage / "tables" / "levels.json").write_text(json.dumps({"updates": updates}))
    (stage / "serving" / "tables").mkdir(parents=True)
    for package in (stage / "serving", stage / "serving" / "tables"):
        (package / "__init__.py").touch()
    (stage / "serving" / "tables" / "__main__.py").write_text(code)


@pytest.fixture
def state(tmp_path) -> Iterator[ServerState]:
    state = ServerState(1, draw_tag(), tmp_path / "repo", tmp_path / "log", Ports(1, 2, 3), generation=1)
    yield state
    processes.terminate(find_helpers(state.tag))
    assert find_helpers(state.tag) == []


def working(state: ServerState) -> list[psutil.Process]:
    """The updaters, without their supervisors."""
    return [each for each in find_helpers(state.tag) if supervisor.__name__ not in processes.read_command(each)]


def generations_followed(state: ServerState) -> list[str]:
    return sorted(Path(process.cwd()).name for process in working(state))


def test_the_updater_follows_the_generation_that_answers(state, tmp_path):
    for generation in (1, 2):
        publish(state.repo, generation)
    publish(state.repo, 3, updates=None)
    for generation, followed in ((1, ["1"]), (2, ["2"]), (2, ["2"]), (3, []), (1, ["1"])):
        follow(replace(state, generation=generation), tmp_path)
        assert generations_followed(state) == followed
    running = find_helpers(state.tag)
    assert len(running) == 2
    follow(state, tmp_path)
    assert find_helpers(state.tag) == running  # left alone
    assert "follows" in (tmp_path / "logs" / "updater-1-1.log").read_text()


def test_the_logs_of_generations_that_are_gone_go_too(state, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("updater-1-1.log", "updater-1-1.log.2", "updater-1-2.log", "updater-11-1.log", "live-share-1.log"):
        (logs / name).touch()
    publish(state.repo, 2)
    follow(replace(state, generation=2), tmp_path)
    assert {path.name for path in logs.iterdir()} == {
        "live-share-1.log",
        "updater-1-2.log",
        "updater-1-2.log.1",
        "updater-11-1.log",
    }


def test_a_challenger_has_an_updater_of_its_own_while_it_is_served(state, tmp_path, monkeypatch):
    """Otherwise its rows would grow old beside those of the champion, with which it is compared."""
    monkeypatch.setattr(revive, "MOVE_S", 0.0)
    for generation in (1, 2):
        publish(state.repo, generation)
    follow(state, tmp_path)
    state.save(tmp_path)
    watch = HelperWatch(state, tmp_path)
    assert watch.look() == ""
    champion = working(state)
    (state.repo / ENSEMBLE).mkdir()
    write_config(state.repo / ENSEMBLE / "config.pbtxt", ModelConfig(name=ENSEMBLE, platform="ensemble"))
    write_challenger(state.repo, 2)
    assert watch.look() == "helpers that were missing are started: updater-2"
    until(lambda: generations_followed(state) == ["1", "2"])
    until(lambda: "follows" in (tmp_path / "logs" / "updater-1-2.log").read_text())
    assert watch.look() == ""
    remove_challenger(state.repo)
    assert watch.look() == "a helper is ended: one that is no longer needed"
    assert working(state) == champion
    assert watch.look() == ""


def test_the_code_of_the_fused_layout_lies_once_above_its_stages(state, tmp_path):
    publish(state.repo)
    fused = state.repo / ENSEMBLE / "1"
    fused.mkdir(parents=True)
    (state.repo / "rank" / "1").rename(fused / "rank")
    (fused / "rank" / "serving").rename(fused / "serving")
    follow(state, tmp_path)
    (process,) = working(state)
    assert Path(process.cwd()) == fused


def test_an_updater_that_ends_at_once_is_an_error_and_is_tried_again(state, tmp_path):
    mended = tmp_path / "mended"
    code = (
        f"import pathlib\nif not pathlib.Path('{mended}').exists(): raise SystemExit('confluent_kafka is missing')\n{FOLLOWS}"
    )
    publish(state.repo, code=code)
    with pytest.raises(ServerError, match=r"generation 1 did not start: confluent_kafka is missing.*updater-1-1\.log"):
        follow(state, tmp_path)
    mended.touch()
    until(lambda: "follows" in (tmp_path / "logs" / "updater-1-1.log").read_text())


def test_repositories_that_are_not_ours_have_no_updater(state, tmp_path):
    follow(state, tmp_path)
    state.repo.mkdir()
    follow(state, tmp_path)
    assert find_helpers(state.tag) == []


def test_an_updater_that_does_not_listen_is_killed(state, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.2)
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {FOLLOWS}"
    publish(state.repo, code=deaf)
    follow(state, tmp_path)
    running = find_helpers(state.tag)
    assert len(running) == 2
    processes.terminate(running)
    psutil.wait_procs(running, 10)
    assert not any(psutil.pid_exists(process.pid) for process in running)


def test_an_updater_that_nobody_would_start_again_is_replaced(state, tmp_path):
    publish(state.repo)
    follow(state, tmp_path)
    (updater,) = working(state)
    (keeper,) = set(find_helpers(state.tag)) - {updater}
    keeper.kill()
    keeper.wait(10)
    follow(state, tmp_path)
    assert not {updater, keeper} & set(find_helpers(state.tag))
    assert len(find_helpers(state.tag)) == 2


def test_settings_of_tables_that_cannot_be_read_are_named(tmp_path):
    publish(tmp_path)
    assert has_update_source(tmp_path, 1)
    assert not has_update_source(tmp_path, 2)
    path = find_tables_settings(tmp_path, 1)
    path.write_text("{")
    with pytest.raises(ArtifactError, match=str(path)):
        has_update_source(tmp_path, 1)
