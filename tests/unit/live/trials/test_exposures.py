"""The exposure log: sampling, retention, failure to write, and erasure."""

import time
from dataclasses import replace

import pyarrow.compute as pc
import pytest

from live import exposures
from live.exposures import Exposure, ExposureLog, count_exposures, erase_exposures, list_exposure_files, read_exposures
from serving.contract.errors import ArtifactError
from tests.interrupting import called_on_return
from tests.waiting import until

NOW_MS = 10_000
ANSWER = Exposure("r0", 1_000, 7, 3, [10, 11], [0.5, None], ["ranker"])


def answers(count):
    return [replace(ANSWER, request_id=f"r{number}", user_id=number % 5) for number in range(count)]


def open_log(folder, now=1_000.0, share=1.0, keep_bytes=1 << 30):
    """Open a log that keeps answers for a day. now: the time of its clock, in seconds"""
    return ExposureLog(folder, share, 1.0, keep_bytes, lambda: now)


def write(folder, rows, **settings):
    log = open_log(folder, **settings)
    for row in rows:
        log.add(row)
    log.close()


def test_answers_come_back_as_they_were_written(tmp_path):
    write(tmp_path, [ANSWER])
    [row] = read_exposures(tmp_path).to_pylist()
    assert row == {
        "request_id": "r0",
        "time_ms": 1_000,
        "user_id": 7,
        "generation": 3,
        "degraded": ["ranker"],
        "experiment": "",
        "arm": "",
        "item_ids": [10, 11],
        "scores": [0.5, None],
        "teams": None,
        "latency_ms": None,
        "assignment": 1.0,
        "propensities": None,
        "sources": None,
    }


def test_gateways_with_the_same_process_number_write_files_of_their_own(tmp_path):
    """Those of two containers may, in the same millisecond."""
    logs = open_log(tmp_path), open_log(tmp_path)
    for number, log in enumerate(logs):
        log.add(replace(ANSWER, request_id=f"r{number}"))
        log.close()
    assert read_exposures(tmp_path)["request_id"].to_pylist() == ["r0", "r1"]


def test_answers_of_an_experiment_are_kept_whatever_the_share(tmp_path):
    tried = replace(ANSWER, request_id="r1", experiment="spring", arm="challenger", latency_ms=4.5)
    write(tmp_path, [ANSWER, tried], share=0.0)
    [row] = read_exposures(tmp_path).to_pylist()
    assert (row["request_id"], row["arm"], row["latency_ms"]) == ("r1", "challenger", 4.5)


def test_the_folder_that_it_makes_is_closed_to_others(tmp_path):
    write(tmp_path / "shop.live", [ANSWER])
    assert [(tmp_path / "shop.live" / name).stat().st_mode & 0o777 for name in ("", "exposures")] == [0o700, 0o700]


def test_a_share_of_the_requests_is_kept_whole(tmp_path):
    rows = answers(2_000)
    write(tmp_path / "a", rows, share=0.25)
    kept = read_exposures(tmp_path / "a")["request_id"].to_pylist()
    assert 400 < len(kept) < 600
    write(tmp_path / "b", rows[::-1], share=0.25)
    assert set(read_exposures(tmp_path / "b")["request_id"].to_pylist()) == set(kept)


def test_old_files_and_files_beyond_the_size_go(tmp_path):
    write(tmp_path, answers(10), now=0.0)
    write(tmp_path, answers(20), now=50_000.0)
    write(tmp_path, answers(30), now=100_000.0)
    assert len(read_exposures(tmp_path)) == 50  # the first is older than a day
    write(tmp_path, [], now=100_000.0, keep_bytes=list_exposure_files(tmp_path / "exposures")[-1].stat().st_size)
    assert len(read_exposures(tmp_path)) == 30


def test_a_log_stays_within_its_bytes_while_it_runs(tmp_path):
    write(tmp_path, answers(100))
    most = 4 * list_exposure_files(tmp_path / "exposures")[0].stat().st_size
    log = open_log(tmp_path, keep_bytes=most)
    for _ in range(8):
        for row in answers(100):
            log.add(row)
        log.flush()
        assert sum(path.stat().st_size for path in list_exposure_files(tmp_path / "exposures")) <= most
    log.close()
    assert len(read_exposures(tmp_path)) >= 300


def test_files_of_others_are_left_alone_and_do_not_stop_the_log(tmp_path):
    write(tmp_path, [ANSWER])
    [path] = list_exposure_files(tmp_path / "exposures")
    path.with_name("exposures-backup.parquet").write_bytes(path.read_bytes())
    for number, now in enumerate((50_000.0, 100_000.0), 1):
        write(tmp_path, [replace(ANSWER, request_id=f"r{number}")], now=now)
    assert read_exposures(tmp_path)["request_id"].to_pylist() == ["r1", "r2"]
    assert path.with_name("exposures-backup.parquet").exists()


def test_files_written_before_a_moment_are_not_read(tmp_path):
    write(tmp_path, answers(10), now=50_000.0)
    write(tmp_path, answers(20), now=60_000.0)
    assert [len(read_exposures(tmp_path, from_ms)) for from_ms in (50_000_000, 50_000_001, 60_000_001)] == [30, 20, 0]


def test_files_that_another_gateway_removes_meanwhile_are_left_out(tmp_path):
    for second in range(1_000, 1_004):
        write(tmp_path, [replace(ANSWER, request_id=f"r{second}")], now=float(second))

    def remove_the_oldest():
        list_exposure_files(tmp_path / "exposures")[0].unlink()

    with called_on_return(remove_the_oldest, list_exposure_files):
        assert read_exposures(tmp_path)["request_id"].to_pylist() == ["r1001", "r1002", "r1003"]
        assert erase_exposures(tmp_path, 7, NOW_MS) == 2
        assert len(exposures.remove_old(tmp_path / "exposures", oldest_s=2_000.0, most_bytes=1 << 30)) == 1
    assert list_exposure_files(tmp_path / "exposures") == []


@pytest.mark.parametrize("damage", [lambda content: content[:100], lambda content: content[:200] + bytes(400) + content[600:]])
def test_a_damaged_file_is_named_with_a_remedy(tmp_path, damage):
    write(tmp_path, answers(200), now=1_000.0)
    write(tmp_path, answers(10), now=2_000.0)
    path = list_exposure_files(tmp_path / "exposures")[0]
    path.write_bytes(damage(path.read_bytes()))
    everything = pc.greater_equal(pc.field("time_ms"), 0)
    for read in (
        lambda: read_exposures(tmp_path),
        lambda: exposures.read_latest(tmp_path, everything, 1_000, 0),
        lambda: erase_exposures(tmp_path, 7, NOW_MS),
    ):
        with pytest.raises(ArtifactError, match=rf"{path.name} cannot be read: .*\. Move the file away"):
            read()
    path.unlink()
    assert len(read_exposures(tmp_path)) == 10


def test_what_cannot_be_written_waits(tmp_path):
    (tmp_path / "exposures").write_text("a file where the folder should be")
    log = open_log(tmp_path)
    log.add(ANSWER)
    with pytest.raises(OSError, match="File exists"):
        log.flush()
    (tmp_path / "exposures").unlink()
    log.close()
    assert len(read_exposures(tmp_path)) == 1


def test_an_erased_users_answers_become_nobodys(tmp_path):
    write(tmp_path, answers(10))
    assert count_exposures(tmp_path, 3) == 2
    assert erase_exposures(tmp_path, 3, NOW_MS) == 2
    assert count_exposures(tmp_path, 3) == 0
    table = read_exposures(tmp_path)
    assert len(table) == 10
    assert pc.sum(pc.is_null(table["user_id"])).as_py() == 2


@pytest.mark.parametrize("erased_ms", [500, 2_000], ids=["the clock was set back", "the clock went on"])
def test_an_erased_users_answers_that_were_not_written_yet_become_nobodys(tmp_path, erased_ms):
    log = open_log(tmp_path, now=2_000.0)
    for time_ms, user_id in ((1_000, 3), (1_001, 4)):
        log.add(replace(ANSWER, request_id=f"r{time_ms}", time_ms=time_ms, user_id=user_id))
    assert erase_exposures(tmp_path, 3, erased_ms) == 0
    log.flush()
    log.add(replace(ANSWER, request_id="r3000", time_ms=3_000, user_id=3))  # the user came back
    log.close()
    assert read_exposures(tmp_path)["user_id"].to_pylist() == [None, 4, 3]


def test_an_answer_from_before_an_erasure_is_nobodys_however_late_it_is_added(tmp_path):
    log = open_log(tmp_path, now=2_000.0)
    erase_exposures(tmp_path, 3, NOW_MS)
    for time_ms in (NOW_MS - 1, NOW_MS + 1):
        log.add(replace(ANSWER, request_id=f"r{time_ms}", time_ms=time_ms, user_id=4))
    log.flush()
    for time_ms in (NOW_MS - 1, NOW_MS + 1):
        log.add(replace(ANSWER, request_id=f"r{time_ms}", time_ms=time_ms, user_id=3))
    log.close()
    assert read_exposures(tmp_path)["user_id"].to_pylist() == [4, 4, None, 3]


def test_a_user_who_is_back_after_an_erasure_is_known_to_a_gateway_that_starts_anew(tmp_path):
    write(tmp_path, answers(5))
    erase_exposures(tmp_path, 3, NOW_MS)
    write(tmp_path, [replace(ANSWER, time_ms=NOW_MS + 1, user_id=3)], now=2_000.0)
    assert read_exposures(tmp_path)["user_id"].to_pylist() == [0, 1, 2, None, 4, 3]


def test_marks_of_erasures_go_after_a_week(tmp_path):
    week_ms = 7 * 86_400 * 1_000
    erase_exposures(tmp_path, 3, erased_ms=2_000)
    erase_exposures(tmp_path, 4, erased_ms=2_001 + week_ms)
    assert len((tmp_path / "exposures" / "erased.jsonl").read_text().splitlines()) == 1


def test_without_a_log_nothing_is_found(tmp_path):
    assert len(read_exposures(tmp_path)) == 0
    assert count_exposures(tmp_path, 3) == erase_exposures(tmp_path, 3, NOW_MS) == 0


def test_a_damaged_record_of_removals_stops_only_the_retention(tmp_path, caplog):
    """A power cut may leave an empty file. Answers are written all the same, and the log says what to do."""
    write(tmp_path, answers(10), now=1_000.0)
    write(tmp_path, [ANSWER], now=50_000.0)
    (tmp_path / "exposures" / "removed.json").write_text("")
    log = open_log(tmp_path, now=100_000.0)  # the first file is older than a day
    log.add(replace(ANSWER, request_id="r1"))
    log.close()
    assert "removed.json does not say until when answers were removed" in caplog.text
    assert "Remove the file" in caplog.text
    (tmp_path / "exposures" / "removed.json").unlink()
    assert [row["request_id"] for row in read_exposures(tmp_path).to_pylist()] == ["r0", "r1"]


@pytest.mark.parametrize("damage", ['{"user": "a", "erased', "[]", '{"user": "a"}', '{"user": "a", "erased_ms": null}'])
def test_answers_wait_while_the_marks_of_erasures_are_damaged(tmp_path, caplog, monkeypatch, damage):
    """Written without the marks, they would have the ids of erased users."""
    monkeypatch.setattr(exposures, "FLUSH_S", 0.01)
    write(tmp_path, answers(5))
    erase_exposures(tmp_path, 7, NOW_MS)
    marks = tmp_path / "exposures" / "erased.jsonl"
    intact = marks.read_text()
    marks.write_text(damage)
    log = open_log(tmp_path, now=2_000.0)
    log.add(ANSWER)
    until(lambda: caplog.text.count("1 exposures cannot be written and stay in memory") >= 2, lambda: caplog.text)
    assert "erased.jsonl does not say which users were erased" in caplog.text
    assert "Remove the file, and erase the users of the last 7 days again." in caplog.text
    with pytest.raises(ArtifactError, match=r"erased\.jsonl"):
        erase_exposures(tmp_path, 8, NOW_MS)
    assert len(read_exposures(tmp_path)) == 5
    restored = marks.with_suffix(".new")
    restored.write_text(intact)
    restored.replace(marks)  # at once: the thread may read it at any moment
    log.close()
    [row] = read_exposures(tmp_path).to_pylist()[5:]
    assert (row["request_id"], row["user_id"]) == ("r0", None)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"exposures-1.parquet": null}'])
def test_a_damaged_record_of_merges_stops_only_the_retention(tmp_path, caplog, monkeypatch, damage):
    monkeypatch.setattr(exposures, "FLUSH_S", 0.01)
    monkeypatch.setattr(exposures, "RETAINED_EVERY_S", 0.0)
    write(tmp_path, answers(10), now=1_000.0)
    record = tmp_path / "exposures" / "merges.json"
    record.write_text(damage)
    log = open_log(tmp_path, now=1_000_000.0)  # the first file is older than a day
    until(lambda: "old exposures are not removed" in caplog.text, lambda: caplog.text)
    log.add(ANSWER)
    until(lambda: caplog.text.count("old exposures are not removed") >= 3, lambda: caplog.text)  # the thread goes on
    assert "merges.json does not say which files the merged ones replace" in caplog.text
    with pytest.raises(ArtifactError, match="Remove the file; answers that"):
        read_exposures(tmp_path)
    record.unlink()
    log.close()
    assert [row["request_id"] for row in read_exposures(tmp_path).to_pylist()] == [ANSWER.request_id]


def test_a_file_that_retention_cannot_remove_stops_only_the_retention(tmp_path, caplog):
    (tmp_path / "exposures" / "exposures-0000000000001-1-0.parquet").mkdir(parents=True)
    log = open_log(tmp_path, now=1_000_000.0)
    log.add(ANSWER)
    log.flush()
    assert "old exposures are not removed: [Errno 21] Is a directory" in caplog.text
    log.close()


def test_a_log_that_closes_says_how_many_answers_are_lost(tmp_path, caplog):
    (tmp_path / "exposures").write_text("a file where the folder should be")
    write(tmp_path, answers(3))
    assert "3 exposures cannot be written and are lost: [Errno 17] File exists" in caplog.text


def test_answers_that_wait_are_not_tried_anew_with_each_that_comes(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(exposures, "FLUSH_ROWS", 10)
    (tmp_path / "exposures").write_text("a file where the folder should be")
    log = open_log(tmp_path)
    for row in answers(10):
        log.add(row)
    until(lambda: "10 exposures cannot be written" in caplog.text, lambda: caplog.text)
    for row in answers(20):
        log.add(row)
        time.sleep(0.005)
    assert caplog.text.count("cannot be written and stay in memory") == 1  # the next try is due after FLUSH_S
    (tmp_path / "exposures").unlink()
    log.close()
    assert len(read_exposures(tmp_path)) == 30


def test_answers_that_come_during_a_write_are_written_next_and_once(tmp_path, monkeypatch):
    monkeypatch.setattr(exposures, "FLUSH_ROWS", 3)
    monkeypatch.setattr(exposures, "FLUSH_S", 1_000.0)
    rows, coming = answers(8), list[Exposure]()

    def read_clock() -> float:  # a write begins with it
        while coming:
            log.add(coming.pop(0))
        return 1_000.0

    log = ExposureLog(tmp_path, 1.0, 1.0, 1 << 30, read_clock)
    coming += rows[3:]
    for row in rows[:3]:
        log.add(row)
    until(lambda: len(read_exposures(tmp_path)) == len(rows), lambda: f"{len(read_exposures(tmp_path))} answers are written")
    log.close()
    assert read_exposures(tmp_path)["request_id"].to_pylist() == [row.request_id for row in rows]
