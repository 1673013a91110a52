"""An erased user leaves no trace, and everything else stays."""

from __future__ import annotations

import hashlib
import json
import signal
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from live import maintenance
from live.__main__ import app
from live.archive import compact
from live.erase import erase_user, search_user
from live.exposures import erase_exposures
from live.maintenance import Retention, maintain
from live.replay import count_differences, replay
from server.start.ports import find_free_port
from serving.contract.errors import ConfigError, DependencyError, RecommenderError
from serving.contract.ids import session_id
from serving.contract.rounds import make_scratch_prefix
from serving.contract.tensors import PAD_ID
from serving.live.events import USER_CHANGED, EventBatch
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.shared.redis_state import RedisState
from serving.live.store import LEARNED, make_id_keys
from serving.live.writer import Writer
from tests.interrupting import Killed, called_on_return, kill
from tests.processes import PROCESSES
from tests.unit.live.batches import KINDS, START_MS, change, purchase
from tests.unit.live.commands import call
from tests.unit.live.learned import Generation
from tests.unit.live.store.test_operations import DAY_MS, fill, whole_log
from tests.unit.live.writing import (
    archive_until_killed,
    list_stored_users,
    log_answer_until_killed,
    replay_until_killed,
    restore_until_killed,
)
from tests.waiting import until

FOR_EVER = Retention(key_days=7.0, archive_days=0.0, archive_bytes=0, idle_days=0.0, most_users=0)


def test_an_erased_user_leaves_no_trace_and_everything_else_stays(writer, folder, clock):
    fill(writer, clock, days=3)
    writer.append(change(USER_CHANGED, 7, country="FR"))
    writer.append(purchase(7, 29, event_id=b"order of seven"))
    compact(writer, older_than_ms=START_MS + 2 * DAY_MS)
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        users = snapshot.list_users()
        others = users[users != 7]
        before = snapshot.read_users(others)[1].tobytes(), snapshot.read_all_items()[1].tobytes()
    (folder / LEARNED).mkdir()
    erasure = erase_user(writer, 7)
    assert not (folder / LEARNED).exists()  # the next generation does not go on from what the last one learned of the user
    assert not any(erasure.left.values())
    assert {"events", "record", "columns", "archived events", "event ids"} <= {k for k, n in erasure.removed.items() if n}
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        assert 7 not in snapshot.list_users()
        assert (snapshot.read_users(others)[1].tobytes(), snapshot.read_all_items()[1].tobytes()) == before
    assert whole_log(folder)[0] == list(range(1, 153))
    assert replay(folder).is_equal
    proof = json.loads((folder / "erasures.jsonl").read_text())
    assert proof["user_digest"] == hashlib.sha256(b"7").hexdigest()
    for name, digest in proof["segments"].items():
        assert hashlib.sha256((folder / "archive" / name).read_bytes()).hexdigest() == digest
    assert writer.append(purchase(7, 3, event_id=b"order of seven"))[0] == 153


def test_the_search_after_an_erasure_looks_at_everything_that_is_kept_of_a_user(writer, folder):
    writer.append(change(USER_CHANGED, 7, country="FR"))
    writer.append(purchase(7, 29, event_id=b"order of seven"))
    writer.append(purchase(8, 29, event_id=b"order of eight"))
    found = {
        "record": 1,
        "first record": 0,
        "seen items": 1,
        "columns": 1,
        "changes": 1,
        "answers": 0,
        "events": 2,
        "event ids": 1,
    }
    assert search_user(folder, 7) == found
    with writer.transaction() as txn:  # a remainder that the log alone does not show
        key, value = next(txn.cursor(writer.store.columns).iternext())
    assert not any(erase_user(writer, 7).left.values())
    with writer.transaction() as txn:
        txn.put(key, value, db=writer.store.columns)
    assert search_user(folder, 7)["columns"] == 1


def test_an_erasure_leaves_an_event_id_that_a_later_event_of_another_user_has(writer, folder, clock):
    writer.append(purchase(7, 3, event_id=b"order-1"))
    clock.ms += 8 * DAY_MS
    writer.append(purchase(8, 3))  # by now the id has expired; this forgets it
    later = int(writer.append(purchase(8, 3, event_id=b"order-1"))[0])
    assert later == 3
    assert not any(erase_user(writer, 7).left.values())
    assert writer.append(purchase(8, 3, event_id=b"order-1"))[0] == later


def test_what_a_generation_knew_of_an_erased_user_does_not_come_back_with_the_next_event(folder):
    def read_history(user: int) -> list[int]:
        with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
            _, records = snapshot.read_users(np.array([user]))
        return [item for item in records["history_ids"][0].tolist() if item != PAD_ID]

    with closing(Writer(folder, Layout(), KINDS.names, Generation([(50, START_MS // 1_000 - 1)]))) as writer:
        writer.append(purchase(7, 1))
        assert read_history(7) == [1, 50]
        erase_user(writer, 7)
        writer.append(EventBatch.join([purchase(7, 2), purchase(8, 2)]))
    assert (read_history(7), read_history(8)) == ([2], [2, 50])
    assert search_user(folder, 7)["first record"] == 0
    assert replay(folder).is_equal


def test_an_erasure_leaves_room_for_events_and_covers_those_that_came_meanwhile(writer, folder, monkeypatch):
    for start in range(0, 10_000, 1_000):
        batches = [purchase(7 if number % 100 == 0 else 8, 3) for number in range(start, start + 1_000)]
        writer.append(EventBatch.join(batches))
    appended: list[int] = []
    monkeypatch.setattr(time, "sleep", lambda _: appended.extend(writer.append(purchase(7, 4)).tolist()))
    erasure = erase_user(writer, 7)
    assert len(appended) == 2  # after each 4,096 events of the log
    assert erasure.removed["events"] == 100 + len(appended)
    assert not any(erasure.left.values())
    assert replay(folder).is_equal


def test_an_erasure_that_redis_does_not_answer_says_what_is_erased_and_can_be_run_again(writer, folder):
    writer.append(purchase(7, 3))
    with closing(RedisState(f"127.0.0.1:{find_free_port()}", "shop")) as shared:
        expected = "Store, archive and exposure log are erased, Redis is not: erase user 7 again once it answers"
        with pytest.raises(DependencyError, match=expected):
            erase_user(writer, 7, shared)
    assert not any(search_user(folder, 7).values())
    assert not (folder / "erasures.jsonl").exists()
    assert not any(erase_user(writer, 7).left.values())


def test_an_erasure_that_was_interrupted_can_be_run_again(writer, folder, monkeypatch):
    for _ in range(5):
        writer.append(EventBatch.join([purchase(7, 3)] * 1_000))
    monkeypatch.setattr(time, "sleep", lambda _: kill())
    with pytest.raises(Killed):
        erase_user(writer, 7)
    monkeypatch.undo()
    left = search_user(folder, 7)
    assert (left["record"], left["events"]) == (1, 5_000 - 4_096)
    assert not any(erase_user(writer, 7).left.values())
    assert replay(folder).is_equal


def test_an_event_that_arrives_during_an_erasure_is_reported(writer, folder, clock):
    fill(writer, clock, days=1)
    arrival = called_on_return(lambda: writer.append(purchase(7, 3)), erase_exposures)
    with arrival, pytest.raises(RecommenderError, match=r"'record': 1.*arrived meanwhile"):
        erase_user(writer, 7)


def test_erasing_somebody_who_is_unknown_is_no_success(repository, observe):
    assert "nothing was known of user '4711'" in call("erase", "--repo", repository, "4711", code=1)


def test_erasing_somebody_whom_only_the_generation_knows_says_what_is_left_to_do(repository, observe):
    user = np.load(repository / "preprocess" / "1" / "store" / "user_ids.npy")[0]
    said = call("erase", "--repo", repository, "--", user)
    assert f"learned from events of user '{user}': export again, from a data set that has none." in said


def test_an_erasure_that_does_not_reach_redis_says_so(writer, tmp_path):
    writer.append(purchase(7, 3))
    repo = tmp_path / "model_repository"  # there is none, so nothing names the Redis that the store was shared in
    with writer.transaction() as txn:
        writer.count(txn, {}, redis_seen_ms=START_MS)
    assert "What Redis has of user '7' is still there" in " ".join(call("erase", "7", "--repo", repo).split())


def test_an_erasure_removes_the_events_that_a_killed_round_of_training_left(writer, tmp_path):
    repo = tmp_path / "model_repository"
    scratch = Path(tempfile.mkdtemp(dir=tmp_path, prefix=make_scratch_prefix(repo)))
    writer.append(purchase(7, 3))
    assert "removed: 1 folders that killed exports or rounds of `export follow` left" in call("erase", "7", "--repo", repo)
    assert not scratch.exists()


def test_a_folder_of_a_killed_export_that_cannot_be_removed_stops_no_erasure(writer, folder, tmp_path):
    staging = tmp_path / ".model_repository.staging"
    staging.symlink_to(tmp_path)  # which rmtree refuses, as it does a folder of another user
    with writer.transaction() as txn:
        writer.count(txn, {}, redis_seen_ms=START_MS)
    writer.append(purchase(7, 3))
    result = CliRunner().invoke(app, ["erase", "7", "--repo", str(tmp_path / "model_repository")])
    assert isinstance(result.exception, DependencyError)
    assert ".model_repository.staging, which a killed export or round left, cannot be removed" in str(result.exception)
    assert "What Redis has of user '7' is still there" in " ".join(result.output.split())
    assert not any(search_user(folder, 7).values())


def test_a_copy_that_cannot_be_removed_stops_neither_an_erasure_nor_maintenance(writer, folder, clock, caplog):
    fill(writer, clock, days=1)
    copy = folder / ".replaying-abcd1234"
    copy.symlink_to(folder.parent)  # which rmtree refuses, as it does a folder of another user
    named = f"{copy}, which a killed command or gateway left with events of users, cannot be removed"
    assert maintain(writer, FOR_EVER, clock.ms + 9 * DAY_MS).archived == 50
    assert named in caplog.text
    with pytest.raises(DependencyError, match=named):
        erase_user(writer, 7)
    assert not any(search_user(folder, 7).values())
    assert not (folder / "erasures.jsonl").exists()


@pytest.mark.parametrize("clean", [lambda writer: erase_user(writer, 7), lambda writer: maintain(writer, FOR_EVER, START_MS)])
@pytest.mark.parametrize("command", [archive_until_killed, log_answer_until_killed, replay_until_killed, restore_until_killed])
def test_copies_of_events_and_answers_that_killed_processes_left_are_removed(command, clean, folder):
    with closing(Writer(folder, Layout(), KINDS.names)) as writer:
        writer.append(purchase(7, 3))
    process = PROCESSES.Process(target=command, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL

    def list_hidden() -> list[Path]:
        return [path for path in folder.rglob(".*") if path.suffix != ".lock"]

    assert len(list_hidden()) == 1
    with closing(Writer(folder, Layout(), KINDS.names)) as writer:
        clean(writer)
    assert list_hidden() == []


def test_a_repair_does_not_bring_back_a_user_who_is_erased_meanwhile(writer, folder, monkeypatch, caplog):
    monkeypatch.setattr(maintenance, "NOTED_S", 0.0)
    writer.append(EventBatch.join([purchase(7, 3), purchase(8, 3)]))
    with writer.transaction() as txn:
        txn.put(*make_id_keys(np.array([8])), bytes(Layout().user.itemsize), db=writer.store.users)
    erasing = threading.Thread(target=erase_user, args=(writer, 7))

    def erase_meanwhile() -> None:
        if not erasing.ident:
            erasing.start()
            until(lambda: not erasing.is_alive() or "waiting for it" in caplog.text)  # it waits for the replay

    with called_on_return(erase_meanwhile, count_differences):
        assert replay(folder, repair=True).differing["users"] == 2
    erasing.join()
    assert not any(search_user(folder, 7).values())
    assert replay(folder).is_equal


def test_an_erasure_counts_each_seen_item_that_it_removes(writer, folder, tmp_path):
    writer.append(EventBatch.join([purchase(7, item_id) for item_id in (3, 4, 5, 3)]))
    assert search_user(folder, 7)["seen items"] == 3
    assert "seen items 3" in call("erase", "7", "--repo", tmp_path / "model_repository")
    assert json.loads((folder / "erasures.jsonl").read_text())["removed"]["seen items"] == 3


def test_a_visitor_is_erased_by_the_name_of_the_session(writer, folder, tmp_path):
    repo = ("--repo", tmp_path / "model_repository")
    writer.append(EventBatch.join([purchase(session_id("a3f9"), 3), purchase(session_id("other"), 3)]))
    assert "record 1, seen items 1" in call("erase", "--session", "a3f9", *repo)
    assert list_stored_users(folder) == [session_id("other")]
    for arguments in ((), ("7", "--session", "other")):
        with pytest.raises(ConfigError, match="Expected either a user or --session"):
            call("erase", *arguments, *repo)
