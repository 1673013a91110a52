"""Small files of the exposure log become one an hour, and every answer is read once, whenever a merge is killed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from live import archive, exposure_merges
from live.exposure_merges import HOUR_MS, merge_exposures
from live.exposures import (
    Exposure,
    ExposureLog,
    count_exposures,
    erase_exposures,
    list_all_files,
    list_exposure_files,
    read_exposures,
    remove_old,
)
from serving.live.experiment import Experiment
from tests.interrupting import Killed, interrupted_at, kill
from trials.judged import JudgedAnswers

FIRST_MS = 100 * HOUR_MS
NOW_MS = FIRST_MS + 3 * HOUR_MS
SPRING = Experiment("spring", 1, 2, 0.5, changed_ms=FIRST_MS)


def write(folder: Path, time_ms: int) -> None:
    """Write a file of two answers."""
    log = ExposureLog(folder, 1.0, keep_days=1_000_000, keep_bytes=1 << 30, now=lambda: time_ms / 1_000)
    for user_id in (1, 2):
        name = f"{time_ms}-{user_id}"
        log.add(Exposure(name, time_ms, user_id, 1, [user_id, 3], [2.0, 1.0], [], "spring", "champion"))
    log.close()


def write_hours(folder: Path, files_of_hours: list[int]) -> Path:
    for hour, files in enumerate(files_of_hours):
        for minute in range(files):
            write(folder, FIRST_MS + hour * HOUR_MS + minute * 60_000)
    return folder


@pytest.fixture(autouse=True)
def parts_s(monkeypatch) -> float:
    """Let a round remove at once what the round before has merged. Return how long it stays otherwise."""
    usual_s = exposure_merges.PARTS_S
    monkeypatch.setattr(exposure_merges, "PARTS_S", 0.0)
    return usual_s


@pytest.fixture
def folder(tmp_path) -> Path:
    """A live store with answers of three hours, five files each, and of the fourth, which is not over."""
    return write_hours(tmp_path, [5, 5, 5, 2])


def read_ids(folder: Path) -> list[str]:
    return sorted(read_exposures(folder)["request_id"].to_pylist())


def count_files(folder: Path) -> tuple[int, int]:
    """Return how many files hold the log, and how many there are."""
    return len(list_exposure_files(folder / "exposures")), len(list_all_files(folder / "exposures"))


def test_the_files_of_a_past_hour_become_one_and_hold_the_same_answers(folder):
    before = read_exposures(folder)
    assert merge_exposures(folder, NOW_MS) == 15
    assert count_files(folder) == (5, 20)  # whoever has just listed the files still finds them
    assert read_exposures(folder).equals(before)
    assert merge_exposures(folder, NOW_MS) == 0
    assert count_files(folder) == (5, 5)
    assert read_exposures(folder).equals(before)
    write(folder, FIRST_MS + 30 * 60_000)  # by a gateway whose clock is behind
    ids = read_ids(folder)
    assert merge_exposures(folder, NOW_MS) == 2
    assert merge_exposures(folder, NOW_MS) == 0
    assert count_files(folder) == (5, 5)
    assert read_ids(folder) == ids


def test_a_reader_finds_what_it_has_listed_though_another_server_of_the_store_does_a_round(folder, parts_s, monkeypatch):
    monkeypatch.setattr(exposure_merges, "PARTS_S", parts_s)
    listed, ids = list_exposure_files(folder / "exposures"), read_ids(folder)
    assert merge_exposures(folder, NOW_MS) == 15
    assert merge_exposures(folder, NOW_MS) == 0  # a moment later
    assert all(path.exists() for path in listed)
    assert read_ids(folder) == ids
    record = folder / "exposures" / "merges.json"
    merged_s = record.stat().st_mtime - parts_s
    os.utime(record, (merged_s, merged_s))
    merge_exposures(folder, NOW_MS)
    assert count_files(folder) == (5, 5)
    assert read_ids(folder) == ids


def test_a_merged_file_is_removed_when_its_last_answers_are_too_old(folder):
    merge_exposures(folder, NOW_MS)
    merge_exposures(folder, NOW_MS)
    last_s = (FIRST_MS + 4 * 60_000) / 1_000
    assert remove_old(folder / "exposures", last_s, 1 << 30) == []
    assert len(remove_old(folder / "exposures", last_s + 1, 1 << 30)) == 1
    assert len(read_exposures(folder)) == 24


def test_large_files_are_left_as_they_are(folder, monkeypatch):
    size = list_exposure_files(folder / "exposures")[0].stat().st_size
    monkeypatch.setattr(exposure_merges, "MERGED_BYTES", 7 * size // 2)
    ids = read_ids(folder)
    assert merge_exposures(folder, NOW_MS) == 15
    assert count_files(folder) == (8, 23)  # three and two of each hour
    assert read_ids(folder) == ids


def test_without_answers_nothing_is_merged(tmp_path):
    assert merge_exposures(tmp_path, NOW_MS) == 0


def test_every_answer_is_read_once_wherever_a_merge_is_killed(tmp_path, tmp_path_factory):
    folder = write_hours(tmp_path, [2, 2, 1])
    merge_exposures(folder, FIRST_MS + HOUR_MS)  # of the first hour, so that the next merge begins by removing files
    ids, line = read_ids(folder), 0
    while True:
        line += 1
        copy = Path(shutil.copytree(folder, tmp_path_factory.mktemp("killed") / "live"))
        try:
            with interrupted_at({line: kill}, exposure_merges, archive):
                merge_exposures(copy, NOW_MS)
        except Killed:
            assert read_ids(copy) == ids
            for _ in range(2):
                merge_exposures(copy, NOW_MS)
                assert read_ids(copy) == ids
            assert count_files(copy) == (3, 3)
            shutil.rmtree(copy)
        else:
            break
    assert line > 50


def test_an_erasure_reaches_files_that_wait_for_their_removal(folder):
    merge_exposures(folder, NOW_MS)
    assert erase_exposures(folder, 1, NOW_MS) == 17
    assert count_exposures(folder, 1) == 0
    (folder / "exposures" / "merges.json").unlink()  # so that all files are read
    assert count_exposures(folder, 1) == 0


def test_looks_of_a_guard_see_each_answer_once(folder):
    judged, guard = JudgedAnswers(folder), JudgedAnswers(folder)
    ids = set(judged.read(SPRING)["request_id"].to_pylist())
    for _ in range(2):
        merge_exposures(folder, NOW_MS)
        read = judged.read(SPRING)["request_id"].to_pylist()
        assert (len(read), set(read)) == (len(ids), ids)
    assert guard.read(SPRING).num_rows == len(ids)  # as after a restart
