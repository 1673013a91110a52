"""Slots against a dictionary; readers beside a writer; writers that die in the middle."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations, count
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.tables.store import cached_table, complete_table, marks, slots
from serving.tables.store.hits import WAYS
from serving.tables.store.row_formats import RowCodec
from tests.interrupting import Killed, free, interrupted_at, kill
from tests.present import present
from tests.processes import PROCESSES, running
from tests.unit.tables.slot_tables import Table, make_table

WIDTH = 4
CODEC = RowCodec("fp32", WIDTH)
KINDS = ("complete", "cached")
N_KEYS = 64
MODULES = (slots, complete_table, cached_table, marks)  # all that run while rows are read and written


def table_of(kind: str, capacity: int = 2048, path: Path | None = None, n_keys: int = N_KEYS) -> Table:
    """Return a table for the keys 0 … n_keys - 1; roomy enough not to evict unless `capacity` says otherwise."""
    return make_table(kind, CODEC, n_keys if kind == "complete" else capacity, path)[0]


def rows_of(keys: Sequence[int] | np.ndarray, version: int = 0) -> np.ndarray:
    """Rows that tell their key and version, and whether they are whole: every column is the same number."""
    return np.repeat((np.asarray(keys) * 1000 + version).astype(np.float32)[:, None], WIDTH, axis=1)


def put(table, keys, version=0):
    keys = np.unique(np.asarray(keys, np.int64))
    with table.writing():
        missing = table.overwrite(keys, rows_of(keys, version))
        if missing is not None:
            table.insert(keys[missing], rows_of(keys[missing], version))


writes = st.lists(st.lists(st.integers(0, N_KEYS - 1), min_size=1, max_size=20), max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@given(batches=writes, asked=st.lists(st.integers(-5, N_KEYS + 5), max_size=40))
def test_a_table_with_room_is_a_dictionary(kind, batches, asked):
    table, twin = table_of(kind), {}
    for version, keys in enumerate(batches):
        put(table, keys, version)
        twin.update({key: float(key * 1000 + version) for key in keys})
    asked = np.array([key for key in asked if key != -1], np.int64)
    rows, missing = table.read(asked)
    missing = np.zeros(len(asked), bool) if missing is None else missing
    assert missing.tolist() == [key not in twin for key in asked.tolist()]
    there = asked[~missing]
    np.testing.assert_array_equal(rows[~missing], np.array([[twin[key]] * WIDTH for key in there.tolist()]).reshape(-1, WIDTH))
    assert table.rows_resident == len(twin)


@given(batches=writes)
def test_a_full_table_forgets_rows_but_never_mixes_them_up(batches):
    table, latest = table_of("cached", capacity=2 * WAYS), {}
    for version, keys in enumerate(batches):
        put(table, keys, version)
        latest.update(dict.fromkeys(keys, version))
    asked = np.arange(N_KEYS)
    rows, missing = table.read(asked)
    missing = np.zeros(N_KEYS, bool) if missing is None else missing
    for key in np.flatnonzero(~missing).tolist():
        assert rows[key].tolist() == [key * 1000 + latest[key]] * WIDTH
    assert (~missing).sum() == table.rows_resident <= 2 * WAYS


@given(keys=st.lists(st.integers(-(2**63), 2**63 - 2).filter(lambda key: key != -1), max_size=50, unique=True))
def test_any_int64_key_but_the_reserved_ones(keys):
    table = table_of("cached")
    keys = np.array(keys, np.int64)
    rows = np.arange(len(keys) * WIDTH, dtype=np.float32).reshape(-1, WIDTH)
    with table.writing():
        table.insert(keys, rows)
    found, missing = table.read(keys)
    assert missing is None
    np.testing.assert_array_equal(found, rows)


def test_keys_that_share_set_and_tag_are_told_apart():
    """All keys are in one set and have the same low 16 bits, so only the comparison of whole keys separates them."""
    table = table_of("cached", capacity=WAYS)
    keys = np.arange(WAYS, dtype=np.int64) << 16
    put(table, keys)
    rows, missing = table.read(keys)
    assert missing is None
    np.testing.assert_array_equal(rows, rows_of(keys))
    assert present(table.read(np.array([99 << 16]))[1]).all()


def test_frequent_rows_stay_when_others_pass_through():
    """A scan over many rows that are read once must not evict the rows that are read all the time."""
    table = table_of("cached", capacity=512)
    hot = np.arange(100)
    put(table, hot)
    for start in range(1000, 31_000, 50):
        table.read(hot)
        put(table, np.arange(start, start + 50))
    _, missing = table.read(hot)
    assert missing is None or missing.mean() < 0.05


def test_one_insertion_in_so_many_halves_the_counts_of_its_set():
    table, memory = make_table("cached", CODEC, WAYS)
    put(table, range(WAYS))
    uses, halved = memory["uses"], []
    for key in range(WAYS, WAYS + 2 * cached_table.HALVE_EVERY):
        uses[:] = 200
        put(table, [key])
        assert sorted(set(uses.tolist()))[0] == 0  # the new row's
        halved.append(uses.max() == 100)
    assert np.diff(np.flatnonzero(halved)).tolist() == [cached_table.HALVE_EVERY]


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_beside_a_writer_sees_whole_rows_of_the_right_key(kind):
    table = table_of(kind, capacity=4 * WAYS)
    stop = threading.Event()

    def write():
        rng, version = np.random.default_rng(0), 0
        while not stop.is_set():
            version += 1
            put(table, rng.integers(0, N_KEYS, 16), version % 900)

    writer = threading.Thread(target=write)
    writer.start()
    rng, seen = np.random.default_rng(1), 0
    try:
        for _ in range(3000):
            keys = rng.integers(0, N_KEYS, 32)
            rows, missing = table.read(keys)
            there = np.ones(32, bool) if missing is None else ~missing
            assert (rows[there] == rows[there][:, :1]).all()
            np.testing.assert_array_equal(rows[there][:, 0] // 1000, keys[there])
            seen += there.sum()
    finally:
        stop.set()
        writer.join()
    assert seen > 1000


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_being_written_is_waited_for(kind, monkeypatch):
    table, keys = table_of(kind), np.arange(N_KEYS)
    put(table, keys)
    begun, paused, done = threading.Event(), threading.Event(), threading.Event()

    def pause(_seconds: float) -> None:
        paused.set()
        done.wait(10)

    def begin() -> None:
        begun.set()
        paused.wait(10)

    def write() -> None:
        with table.writing():
            table.overwrite(keys[:5], rows_of(keys[:5], version=1), between=begin)
        done.set()

    monkeypatch.setattr(slots, "time", SimpleNamespace(sleep=pause))

    writer = threading.Thread(target=write)
    writer.start()
    assert begun.wait(10)
    rows, missing = table.read(keys)
    writer.join(10)
    assert paused.is_set()
    assert missing is None
    np.testing.assert_array_equal(rows, rows_of(keys) + (keys < 5)[:, None])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_beside_one_that_was_written_meanwhile_is_read_again(kind):
    """Otherwise it would count as missing, and a request would wait for RocksDB. Two writes happen at every point of a read."""
    table, keys = table_of(kind), np.arange(N_KEYS + 1)  # the last one is missing, so that a read looks slot by slot
    put(table, keys[:-1])
    with interrupted_at({}, *MODULES) as n_lines:
        table.read(keys)
    n_rereads = 0
    for places in combinations(range(1, n_lines[0] + 1), 2):
        writes: dict[int, Callable[[], None]] = {
            place: partial(put, table, [5, 6], version) for version, place in enumerate(places, 1)
        }
        put(table, [5, 6])
        with interrupted_at(writes, *MODULES) as n_run:
            rows, missing = table.read(keys)
        assert np.flatnonzero(present(missing)).tolist() == [N_KEYS]
        np.testing.assert_array_equal(rows[:-1][~np.isin(keys[:-1], [5, 6])], rows_of(np.setdiff1d(keys[:-1], [5, 6])))
        assert set((rows[[5, 6]] - rows_of([5, 6])).ravel().tolist()) <= {0, 1, 2}
        n_rereads += n_run[0] > n_lines[0]
    assert n_rereads > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("written", [[1, 2, 3], [16, 17]], ids=["rows that are there", "new rows"])
def test_a_writer_that_dies_at_any_line_leaves_no_torn_row(kind, written):
    """All rows that it did not write stay as they were, also those next to its own."""
    shown = []
    for line in count(1):
        table, keys = table_of(kind, capacity=8 * WAYS, n_keys=20), np.arange(20)
        put(table, np.arange(16))
        before, absent = table.read(keys)
        try:
            with interrupted_at({line: kill}, *MODULES):
                put(table, written, version=7)
        except Killed:
            free(table.lock)
            shown.append(check_after_death(table, before, present(absent), written))
        else:
            break
    turns = [state for place, state in enumerate(shown) if place == 0 or shown[place - 1] != state]
    assert turns == (["before", "absent", "written"] if written[0] < 16 else ["absent", "written"])


def check_after_death(table, before: np.ndarray, absent: np.ndarray, written: list[int]) -> str:
    """Check a table of 20 keys whose writer died, and write it again. Return in what state its rows were found.

    before, absent: what a read of all keys gave before the writer began
    """
    keys, states, others = np.arange(20), set[str](), np.setdiff1d(np.arange(20), written)
    for _ in range(2):  # before anyone cleared up, and after
        rows, missing = table.read(keys)
        missing = np.zeros(20, bool) if missing is None else missing
        np.testing.assert_array_equal(missing[others], absent[others])
        np.testing.assert_array_equal(rows[others][~missing[others]], before[others][~absent[others]])
        if missing[written].any():
            assert missing[written].all()
            states.add("absent")
        elif (rows[written] == rows_of(np.array(written), 7)).all():
            states.add("written")
        else:
            np.testing.assert_array_equal(rows[written], before[written])
            states.add("before")
        table.heal()
    assert table.rows_resident == np.count_nonzero(~missing)
    put(table, keys, version=9)
    rows, missing = table.read(keys)
    assert missing is None
    np.testing.assert_array_equal(rows, rows_of(keys, 9))
    (state,) = states
    return state


def write_for_ever(kind: str, path: Path, works: Event) -> None:
    table, rng = table_of(kind, 4 * WAYS, path), np.random.default_rng(os.getpid())
    put(table, rng.integers(0, N_KEYS, 24), int(rng.integers(900)))
    works.set()
    while True:
        put(table, rng.integers(0, N_KEYS, 24), int(rng.integers(900)))


@pytest.mark.parametrize("kind", KINDS)
def test_processes_killed_while_they_write(kind, tmp_path):
    """SIGKILL at random moments: every row read is whole and its key's own, and the survivors can go on writing."""
    table = table_of(kind, 4 * WAYS, tmp_path / "block")
    rng = np.random.default_rng(0)
    for _ in range(8):
        works = PROCESSES.Event()
        with running(write_for_ever, kind, tmp_path / "block", works):
            assert works.wait(60)
            for _ in range(int(rng.integers(50, 200))):
                check_rows(table)
        check_rows(table)
    put(table, [5], version=1)
    rows, missing = table.read(np.array([5]))
    assert missing is None
    assert rows[0, 0] == 5001


def check_rows(table) -> None:
    rows, missing = table.read(np.arange(N_KEYS))
    there = np.arange(N_KEYS) if missing is None else np.flatnonzero(~missing)
    assert (rows[there] == rows[there][:, :1]).all()
    np.testing.assert_array_equal(rows[there][:, 0] // 1000, there)
