"""`python -m live`: the archive keeps every event, a replay finds every difference."""

from __future__ import annotations

import os
import re
import resource
import stat
import time
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from live.__main__ import open_writer
from live.archive import compact, drop_segments, find_start, from_table, list_segments, read_log, to_table, write_segment
from live.backup import back_up, restore
from live.replay import count_differences, replay
from serving.contract.errors import ArtifactError, ConfigError, RecommenderError
from serving.contract.tensors import OBSERVE
from serving.live.events import EventBatch, pack
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.sequences import mark_sequences
from serving.live.store import find_live_folder
from serving.live.writer import Writer
from tests.interrupting import Killed, called_on_return, kill
from tests.unit.live.answers import change_stage
from tests.unit.live.batches import KINDS, START_MS, events, purchase
from tests.unit.live.commands import call, call_in_one_line
from tests.unit.live.conftest import Clock
from tests.unit.live.writing import list_stored_sequences, list_stored_users
from tests.unit.trials.logs import observe as observe_at

DAY_MS = 86_400_000


def fill(writer: Writer, clock: Clock, days: int, each: int = 50) -> EventBatch:
    """Append events, a batch a day, and return all of them."""
    rng, batches = np.random.default_rng(0), []
    for _ in range(days):
        batches.append(events(rng, each, ids=True))
        writer.append(batches[-1])
        clock.ms += DAY_MS
    return EventBatch.join(batches)


def whole_log(folder) -> tuple[list[int], list[bytes]]:
    parts = list(read_log(folder))
    return np.concatenate([sequences for sequences, _ in parts]).tolist(), pack(EventBatch.join([part for _, part in parts]))


def test_events_survive_a_segment():
    batch = events(np.random.default_rng(0), 100, ids=True)
    batch = EventBatch(batch.headers, batch.event_ids, [b"\xff"] * 100, [b'{"a": 1}'] * 100)
    sequences, again = from_table(to_table(np.arange(5, 105), batch, KINDS.names), KINDS.names)
    assert sequences.tolist() == list(range(5, 105))
    assert set(again.headers["request_id_bytes"]) == {1}  # by which continuous training finds events that a list led to
    assert pack(again) == pack(batch)


def test_the_log_is_whole_before_and_after_compaction(writer, folder, clock):
    expected = pack(fill(writer, clock, days=6))
    assert whole_log(folder) == (list(range(1, 301)), expected)
    moved, written = compact(writer, older_than_ms=START_MS + 4 * DAY_MS)
    assert (moved, [(segment.first, segment.last) for segment in written]) == (200, [(1, 200)])
    assert whole_log(folder) == (list(range(1, 301)), expected)
    assert list_stored_sequences(folder) == list(range(201, 301))
    assert compact(writer, older_than_ms=START_MS + 4 * DAY_MS) == (0, [])


def test_whoever_reads_on_in_a_segment_does_not_read_its_beginning_again(writer, folder, clock, monkeypatch):
    """`live share` reads 500 events at a time: a segment of a million would be read two thousand times."""
    monkeypatch.setattr("live.archive.EVENTS_PER_READ", 100)
    fill(writer, clock, days=6)
    compact(writer, older_than_ms=clock.ms)
    (segment,) = list_segments(folder)
    first = pq.ParquetFile(segment.path).metadata.row_group(0).column(0)
    with segment.path.open("r+b") as file:
        file.seek(first.dictionary_page_offset or first.data_page_offset)
        file.write(bytes(first.total_compressed_size))
    sequences = [sequence for part, _ in read_log(folder, after=150, most=40) for sequence in part.tolist()]
    assert sequences == list(range(151, 301))


def test_a_log_that_is_compacted_while_it_is_read_is_read_whole(writer, folder, clock):
    fill(writer, clock, days=6)
    sequences = []
    for part, _ in read_log(folder, most=40):
        sequences += part.tolist()
        compact(writer, older_than_ms=START_MS + 4 * DAY_MS)
    assert sequences == list(range(1, 301))


def test_a_log_that_is_compacted_before_it_is_first_read_is_read_whole(writer, folder, clock):
    fill(writer, clock, days=6)
    with called_on_return(lambda: compact(writer, older_than_ms=START_MS + 4 * DAY_MS), list_segments):
        sequences, _ = whole_log(folder)
    assert list_segments(folder)
    assert sequences == list(range(1, 301))


def test_a_segment_that_retention_removes_before_it_is_read_is_left_out(writer, folder, clock):
    fill(writer, clock, days=4)
    for day in (1, 2, 3):
        compact(writer, older_than_ms=START_MS + day * DAY_MS)
    with called_on_return(lambda: drop_segments(folder, START_MS + DAY_MS, None), list_segments):
        sequences, _ = whole_log(folder)
    assert sequences == list(range(51, 201))


@pytest.mark.parametrize("command", [("erase", "7"), ("export", "log.parquet"), ("compact", "--archive-days", "1")])
def test_a_damaged_segment_is_named_with_a_remedy(writer, folder, clock, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    fill(writer, clock, days=2)
    compact(writer, older_than_ms=START_MS + DAY_MS)
    [segment] = list_segments(folder)
    os.truncate(segment.path, segment.bytes // 2)
    with pytest.raises(ArtifactError, match=rf"{segment.path} is damaged .*Put the file back from a backup"):
        call(*command, "--repo", tmp_path / "model_repository")


def test_a_file_that_is_no_segment_is_named_with_a_remedy(writer, folder, clock):
    fill(writer, clock, days=2)
    compact(writer, older_than_ms=START_MS + DAY_MS)
    [segment] = list_segments(folder)
    copy = segment.path.with_name(f"{segment.path.stem} (copy).parquet")
    copy.write_bytes(segment.path.read_bytes())
    with pytest.raises(ArtifactError, match=rf"{re.escape(str(copy))} is no segment .*Move it out of the folder"):
        whole_log(folder)


@pytest.mark.parametrize("column", ["label", "event"])
def test_a_segment_of_another_store_is_named_with_a_remedy(writer, folder, clock, column):
    fill(writer, clock, days=2)
    compact(writer, older_than_ms=START_MS + DAY_MS)
    [segment] = list_segments(folder)
    table = pq.read_table(segment.path)
    others = table.drop_columns([column])
    if column == "event":
        others = others.append_column(column, pa.array(["unknown here"] * len(table)))
    pq.write_table(others, segment.path)
    with pytest.raises(ArtifactError, match=rf"{segment.path} is damaged .*Put the file back from a backup"):
        whole_log(folder)


def test_a_segment_that_the_system_refuses_to_read_is_not_called_damaged(writer, folder, clock):
    fill(writer, clock, days=2)
    compact(writer, older_than_ms=START_MS + DAY_MS)
    [segment] = list_segments(folder)
    segment.path.rename(folder / "intact")
    segment.path.symlink_to(segment.path.name)  # to itself: ELOOP
    with pytest.raises(ArtifactError, match=rf"{segment.path} cannot be read: .*Correct that, and try again"):
        whole_log(folder)


def test_a_segment_whose_file_cannot_be_found_is_an_error_and_not_left_out(writer, folder, clock):
    fill(writer, clock, days=2)
    compact(writer, older_than_ms=START_MS + DAY_MS)
    [segment] = list_segments(folder)
    segment.path.unlink()
    segment.path.symlink_to(folder / "another disk")
    with pytest.raises(FileNotFoundError):
        whole_log(folder)


def test_what_a_crash_left_in_both_archive_and_store_is_read_once(writer, folder, clock):
    expected = pack(fill(writer, clock, days=3))
    with called_on_return(kill, write_segment), pytest.raises(Killed):
        compact(writer, older_than_ms=START_MS + 2 * DAY_MS)
    assert list_stored_sequences(folder) == list(range(1, 151))
    assert whole_log(folder) == (list(range(1, 151)), expected)
    compact(writer, older_than_ms=START_MS + 2 * DAY_MS)
    assert whole_log(folder) == (list(range(1, 151)), expected)
    assert list_stored_sequences(folder) == list(range(101, 151))


def arrive(writer: Writer, clock: Clock, days: list[float]) -> list[int]:
    """Append an event at each time of a clock, in days after the first. Return their places in the log."""
    first = writer.store.read_progress().last_sequence + 1
    for item, day in enumerate(days):
        clock.ms = START_MS + round(day * DAY_MS)
        writer.append(purchase(1, item))
    return list(range(first, first + len(days)))


@pytest.mark.parametrize(
    ("days", "now", "moved"),
    [
        ([0, 1, 2, 3, 4], 5, 3),
        ([0, 1, 0.5, 1.5, 2.5, 2.8, 4], 5, 6),  # set back a little, among old events
        ([0, 2.9, 3.1, 2.95, 4], 5, 2),  # the second old one waits for the one before it
        ([0, 4, 1, 4.5], 5, 1),  # the clock was far behind once
        ([0, 900, 1, 2, 4], 5, 4),  # … and far ahead once, between old events
        ([0, 900, 4], 5, 1),  # … before a recent one
        ([900, 901, 902], 5, 0),
        ([900, 901, 1, 4], 5, 3),
    ],
)
def test_no_event_is_archived_too_soon_or_stays_for_ever_whatever_the_clock_did(writer, folder, clock, days, now, moved):
    places = arrive(writer, clock, days)
    clock.ms = START_MS + now * DAY_MS
    assert compact(writer, older_than_ms=START_MS + 3 * DAY_MS)[0] == moved
    assert list_stored_sequences(folder) == places[moved:]
    assert whole_log(folder)[0] == places
    clock.ms = START_MS + 1_000 * DAY_MS  # everything is old, also what the clock stamped ahead
    compact(writer, older_than_ms=START_MS + 999 * DAY_MS)
    assert list_stored_sequences(folder) == []
    assert whole_log(folder)[0] == places


@pytest.mark.parametrize("archived", [0, 2, 5, 9])
def test_what_arrived_since_a_time_is_found_in_store_and_archive(writer, folder, clock, archived):
    """Also where the clock was set back by hours meanwhile. A day of earlier events may come with it."""
    places = arrive(writer, clock, [0, 1, 2, 3, 4, 3.5, 5, 6, 7])
    clock.ms = START_MS + 10 * DAY_MS
    for day in range(archived):
        compact(writer, older_than_ms=START_MS + day * DAY_MS)
    starts = [find_start(folder, START_MS + day * DAY_MS) for day in range(12)]
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert all(start <= places[day] - 1 for day, start in enumerate(starts[:5]))
    assert starts[6] == places[5]  # the next one arrived a day earlier, on day 5
    assert starts[11] == places[-1]
    assert [sequence for part, _ in read_log(folder, starts[6]) for sequence in part.tolist()] == places[6:]


def test_a_replay_finds_the_store_as_it_is_and_mends_what_differs(writer, folder, clock):
    fill(writer, clock, days=3)
    compact(writer, older_than_ms=START_MS + DAY_MS)
    replayed = replay(folder)
    assert (replayed.events, replayed.is_equal) == (150, True)
    with writer.transaction() as txn:
        key = next(txn.cursor(writer.store.users).iternext(values=False))
        txn.put(key, bytes(Layout().user.itemsize), db=writer.store.users)
    assert replay(folder).differing["users"] == 2
    assert not replay(folder, repair=True).is_equal
    assert replay(folder).is_equal


def test_archived_events_leave_the_store_in_short_transactions_and_after_a_crash_later(writer, folder, clock, monkeypatch):
    expected = [fill(writer, clock, days=1, each=2_500)]
    monkeypatch.setattr(time, "sleep", lambda _: kill())
    with pytest.raises(Killed):
        compact(writer, older_than_ms=START_MS + DAY_MS)
    assert list_stored_sequences(folder) == list(range(1_001, 2_501))
    assert whole_log(folder) == (list(range(1, 2_501)), pack(expected[0]))

    def buy(_: float) -> None:
        expected.append(purchase(1, 2))
        writer.append(expected[-1])

    monkeypatch.setattr(time, "sleep", buy)
    assert compact(writer, older_than_ms=START_MS + DAY_MS) == (0, [])
    assert len(expected) == 2  # events can be written between two transactions
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        assert [sequence for sequence, _ in snapshot.read_events()] == [2_501]
        assert snapshot.find_sequences_with_event_id().tolist() == []
    assert replay(folder).is_equal


def test_the_commands_say_what_they_did(writer, folder, clock, tmp_path):
    fill(writer, clock, days=3)
    repo = ("--repo", tmp_path / "model_repository")
    shown = call_in_one_line("inspect", *repo)
    assert "events ever 150" in shown
    assert "view, purchase, hide" in shown
    assert "150 events replayed" in call("replay", *repo)
    assert "150 events moved into 1 segments" in call("compact", "--keep-days", 0, *repo)
    assert "150 events written" in call("export", tmp_path / "log.parquet", *repo)
    assert pq.read_table(tmp_path / "log.parquet")["sequence"].to_pylist() == list(range(1, 151))
    assert stat.S_IMODE((tmp_path / "log.parquet").stat().st_mode) == 0o600
    user = int(pq.read_table(tmp_path / "log.parquet")["user_id"][0].as_py())
    assert f"User {user}: " in call("inspect", "--user", user, *repo)
    assert "removed: record 1, seen items 4, archived events 7\nleft: none" in call("erase", *repo, "--", user)
    assert f"User {user} has no live events" in call("inspect", "--user", user, *repo)


def test_a_repository_without_a_store_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="There is no live store"):
        call("inspect", "--repo", tmp_path / "none")


def test_a_replay_refuses_a_log_without_its_beginning(writer, folder, clock):
    """Archived events expire after archive_days. What is left of the log does not give the state, so it must not replace it."""
    fill(writer, clock, days=3)
    compact(writer, older_than_ms=START_MS + DAY_MS)
    drop_segments(folder, None, most_bytes=0)
    before = list_stored_users(folder)
    with pytest.raises(RecommenderError, match="lacks events 1 to 50"):
        replay(folder, repair=True)
    assert list_stored_users(folder) == before


def test_a_repair_refuses_a_store_in_which_events_arrived_meanwhile(writer, folder, clock):
    fill(writer, clock, days=1)
    arrival = called_on_return(lambda: writer.append(purchase(7_000, 3)), count_differences)
    with arrival, pytest.raises(RecommenderError, match="arrived during the replay"):
        replay(folder, repair=True)
    assert 7_000 in list_stored_users(folder)


def test_an_export_takes_the_sequence_that_a_caller_was_given_also_after_a_restore(writer, folder, clock, tmp_path):
    fill(writer, clock, days=1, each=10)
    machine = writer.name_machine()
    first, lost = mark_sequences(np.array([6, 12]), machine, False).tolist()
    elsewhere = int(mark_sequences(np.array([6]), f"not {machine}", False)[0])
    target, repo = tmp_path / "log.parquet", ("--repo", tmp_path / "model_repository")

    def list_exported(after: int) -> list[int]:
        call("export", target, "--after", after, *repo)
        return pq.read_table(target)["sequence"].to_pylist()

    assert list_exported(first) == list_exported(6) == [7, 8, 9, 10]
    with pytest.raises(ConfigError, match=f"{elsewhere} is no sequence of the log"):
        list_exported(elsewhere)
    back_up(folder, tmp_path / "backup")
    writer.close()
    restore(tmp_path / "backup", folder, "", replace=True)
    assert list_exported(first) == [7, 8, 9, 10]
    with pytest.raises(ConfigError, match=f"{lost} is no sequence of the log"):
        list_exported(lost)


def test_an_export_that_fails_leaves_the_earlier_file_as_it_was(writer, folder, clock, tmp_path):
    fill(writer, clock, days=1)
    target, repo = tmp_path / "log.parquet", ("--repo", tmp_path / "model_repository")
    call("export", target, *repo)
    before = target.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))  # which stands for a full disk
    try:
        with pytest.raises(ConfigError, match=r"log\.parquet cannot be written"):
            call("export", target, *repo)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (target.read_bytes(), list(tmp_path.glob(".log*"))) == (before, [])


def test_an_export_of_a_log_that_cannot_be_read_does_not_blame_its_target(writer, folder, clock, tmp_path):
    fill(writer, clock, days=2)
    for days in (1, 2):
        compact(writer, older_than_ms=START_MS + days * DAY_MS)
    _, latest = list_segments(folder)
    latest.path.unlink()
    latest.path.symlink_to(folder / "another disk")  # which is not mounted
    with pytest.raises(ArtifactError, match=rf"The log in {folder} cannot be read: .*{latest.path.name}"):
        call("export", tmp_path / "log.parquet", "--repo", tmp_path / "model_repository")


def test_commands_write_with_the_settings_of_the_export(repository, observe):
    """Otherwise a round of maintenance forgets event ids that the export promised to recognise."""
    change_stage(repository, OBSERVE, {"key_days": 30.0, "lateness_s": 3_600.0})
    with closing(open_writer(find_live_folder(repository), repository)) as writer:
        assert (writer.settings.key_days, writer.settings.lateness_s) == (30.0, 3_600.0)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_compaction_by_hand_keeps_what_the_generation_does_not_know_and_warns_where_it_must_not(repository, is_known):
    """A stage that starts counts live events from the store alone."""
    now_ms = time.time_ns() // 1_000_000
    change_stage(repository, "retrieve", {"as_of_s": (now_ms - (2 if is_known else 20) * DAY_MS) // 1_000})
    observe_at(repository, {"user_id": [1, 2], "item_id": [1, 1]}, now_ms - 10 * DAY_MS)
    repo = ("--repo", repository)
    assert f"{2 if is_known else 0} events moved" in call("compact", *repo)
    observe_at(repository, {"user_id": [1, 2], "item_id": [2, 2]}, now_ms - 9 * DAY_MS)
    said = call("compact", "--keep-days", 5, *repo)
    assert f"{2 if is_known else 4} events moved" in said
    assert ("the pinned generation knows events until" in said) == (not is_known)


@pytest.mark.parametrize(
    "words",
    [("compact", "--archive-days", "inf"), ("compact", "--keep-days", "inf"), ("export", "log.parquet", "--after", "-1")],
)
def test_numbers_out_of_range_are_refused(words, tmp_path):
    assert f"Invalid value for '{words[-2]}'" in call(*words, "--repo", tmp_path, code=2)
