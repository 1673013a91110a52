"""experiments.tiers: what it measures is what it says: keys, budgets, rates."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.tiers import feed, large, traffic, updates
from experiments.tiers.big import cases_of, shares
from experiments.tiers.large import Side
from experiments.tiers.large_catalogue import TABLE, ItemRows
from experiments.tiers.ram import ENOUGH_ROWS, RAM_SHARE, ram_share
from experiments.tiers.served import Cores, described
from experiments.tiers.traffic import WIDTH, resident_keys, seconds_per_call, tiers_over, warm, write_table, zipf_keys
from perf.load.open_loop import Outcome
from serving.contract.errors import ConfigError, ServerError
from serving.stages.rank import RankInputs
from serving.tables.config import TableConfig
from serving.tables.formats.kafka import KEY_GROUPS, decode_message
from serving.tables.formats.mixer import partition_of
from serving.tables.levels.rocks_store import BLOCK_CACHE_BYTES, reader_bytes
from serving.tables.metrics import TableCounts
from serving.tables.store.table import l1_sections, l2_sections


def test_keys_follow_zipfs_law():
    keys = zipf_keys(1_000, 1.0, (400, 1_000), np.random.default_rng(0))
    counts = np.bincount(keys.ravel(), minlength=1_000)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.1)
    assert (counts > 0).all()


@pytest.mark.parametrize("rows", [5_000_000, 50_000_000])
def test_no_case_takes_more_than_its_share_of_memory(rows):
    whole, *partial = (levels for _, levels in cases_of(rows).values())
    assert whole["l2_rows"] == rows
    for levels in partial:
        table = TableConfig(TABLE, rows, WIDTH, **levels)
        l1_bytes, l2_bytes = (sections(table).nbytes for sections in (l1_sections, l2_sections))
        taken = ram_share(rows, l1_bytes if table.l1_rows else 0, l2_bytes if table.l2_rows else 0)
        assert 0.98 * RAM_SHARE < taken <= RAM_SHARE


def test_what_rocksdb_keeps_counts_for_every_process():
    rows = 10_000_000
    beside = reader_bytes(rows, WIDTH) + BLOCK_CACHE_BYTES
    assert ram_share(rows, 0, 0) == pytest.approx(beside / (64 * rows), abs=1e-4)
    assert ram_share(rows, 64 * rows, 0, processes=3) == pytest.approx(1 + 3 * beside / (64 * rows), abs=1e-4)


def test_a_table_whose_share_rocksdb_fills_alone_is_refused():
    with pytest.raises(ConfigError, match=r"10% of 1,000,000 rows x 16 are 6\.4 MB; .* alone take 10\.0"):
        cases_of(1_000_000)
    assert cases_of(ENOUGH_ROWS)


def test_shares_are_of_the_rows_between_two_snapshots():
    before, after = TableCounts(100, 50, 20, 30), TableCounts(200, 100, 60, 33, late=7)
    assert shares(before, after) == {"memory_hit_rate": 0.9, "late": 0.07}


def side_of(monkeypatch, samples: dict) -> Side:
    """A server that tells this."""
    monkeypatch.setattr(large, "REPORTED_AFTER_S", 0)
    monkeypatch.setattr(large, "read_samples", lambda url: samples)
    bench, turns = SimpleNamespace(site=SimpleNamespace(metrics_url="")), SimpleNamespace(turn=nullcontext)
    return Side("a case", bench, turns)


def test_memory_of_a_server_is_that_of_all_its_instances(monkeypatch):
    rows, mib = 10_000_000, 2**20
    held = {
        ("items", "l1", 0): 5,
        ("items", "l1", 1): 7,
        ("items", "l2", 0): 30,
        ("items", "l2", 1): 30,
        ("user_0", "l2", 0): 99,
    }
    samples = {
        (large.BYTES_HELD, f"instance=rank_{i},level={level},table={table}"): float(n * mib)
        for (table, level, i), n in held.items()
    }
    asked = {
        (large.ROWS_ASKED, f"answer={answer},instance=rank_{i},table=items"): 4.0 for answer in ("l2", "l3") for i in (0, 1)
    }
    side = side_of(monkeypatch, samples | asked)
    assert side.ram_share(rows) == ram_share(rows, 12 * mib, 30 * mib, processes=2)
    assert side.answered() == {"l2": 8, "l3": 8}


def test_a_server_without_the_large_table_is_an_error(monkeypatch):
    with pytest.raises(ServerError, match="lack recommender_table_rows_total of items"):
        side_of(monkeypatch, {(large.ROWS_ASKED, "answer=l2,table=user_0"): 1.0}).answered()


def test_the_tables_rows_are_served_and_those_in_memory_known(tmp_path):
    source = write_table(tmp_path, 2_000, np.random.default_rng(0))
    rows = np.load(f"{source}/{TABLE}.npy")
    with tiers_over(2_000, source, l2_rows=500) as tiers:
        resident = resident_keys(tiers, 2_000)
        before = tiers.metrics().tables[TABLE].counts
        np.testing.assert_array_equal(tiers.lookup(TABLE, resident), rows[resident])
        after = tiers.metrics().tables[TABLE].counts
    assert 250 < len(resident) <= 500
    assert after.l2_hits - before.l2_hits == len(resident)


def test_a_cache_that_was_warmed_lacks_fewer_of_the_popular_rows(tmp_path, monkeypatch):
    """It starts with the first rows but those that others of their sets replaced."""
    rng, rows = np.random.default_rng(0), 60_000
    monkeypatch.setattr(traffic, "WARM_KEYS", 100 * traffic.WARM_BATCH)
    with tiers_over(rows, write_table(tmp_path, rows, rng), l2_rows=16_000) as tiers:
        popular = [len(resident_keys(tiers, 500))]
        warm(tiers, traffic.warm_keys(rows, 1.145, rng))
        popular.append(len(resident_keys(tiers, 500)))
    assert popular[0] < 450
    assert popular[1] > 495


def test_every_request_of_the_larger_catalogue_has_its_own_keys():
    rows, keys = np.arange(12).reshape(4, 3), np.array([[900, 901], [902, 903]])
    inputs = RankInputs(settings=None, items=None, item_rows=ItemRows(rows, keys), item_numbers=None, statistics=None)
    for expected in itertools.islice(itertools.cycle(keys), 3):
        _, item_keys = inputs.row_keys({"user_categorical": None}, np.array([[3, 1]]))
        np.testing.assert_array_equal(item_keys, [[[expected[0], 10, 11], [expected[1], 4, 5]]])


def test_requests_of_a_batch_have_keys_of_their_own_too():
    larger = ItemRows(np.arange(12).reshape(4, 3), np.array([[900, 901], [902, 903], [904, 905]]))
    for first, second in ((900, 902), (904, 900)):
        rows = larger.take(np.array([[3, 1], [0, 2]]), axis=0)
        np.testing.assert_array_equal(rows[..., 0], [[first, first + 1], [second, second + 1]])
        np.testing.assert_array_equal(rows[..., 1:], [[[10, 11], [4, 5]], [[1, 2], [7, 8]]])


def test_ways_are_called_with_every_request():
    seen = {"one": [], "other": []}
    ways = {name: calls.append for name, calls in seen.items()}
    assert seconds_per_call(ways, np.arange(6).reshape(2, 3), repeats=2).keys() == seen.keys()
    assert [len(calls) for calls in seen.values()] == [4, 4]


@pytest.mark.parametrize("as_they_are", [True, False])
def test_a_published_part_is_a_message_of_one_partition(as_they_are):
    keys = {name: np.arange(start, start + 5_000) for name, start in (("a", 0), ("b", 9_000))}
    rows = {name: np.repeat(at[:, None], 3, axis=1).astype(np.float32) for name, at in keys.items()}
    parts = feed.parts_of(feed.Published("", "m", keys, rows if as_they_are else None), np.random.default_rng(0))
    per_part, seen = feed.ROWS_PER_S // feed.PARTS_PER_S, {name: [] for name in keys}
    for number, part in enumerate(parts):
        got_keys, got_rows = decode_message(part.encoded(number, 3), 3)
        np.testing.assert_array_equal(got_keys, part.keys)
        assert len(got_keys) == per_part
        assert (got_rows == (got_keys[:, None] if as_they_are else number)).all()
        assert (partition_of(got_keys, KEY_GROUPS) == part.group).all()
        seen[part.table] += got_keys.tolist()
    for name, at in keys.items():
        assert len(seen[name]) == len(set(seen[name])) > len(at) - KEY_GROUPS * per_part
        assert set(seen[name]) <= set(at.tolist())


def outcome_of(latency_ms: list[float]) -> Outcome:
    due_ns = np.arange(len(latency_ms)) * 10**6
    return Outcome(due_ns, due_ns, due_ns + (1e6 * np.array(latency_ms)).astype(np.int64))


def test_turns_of_a_round_are_compared_with_each_other():
    p99_ms = {"quiet": [10, 10, 10], "unread": [10, 20, 10], "updated": [11, 40, 12], "watched": [9, 9, 9]}
    outcomes = {turn: [outcome_of([1.0] * 90 + [ms] * 10) for ms in rounds] for turn, rounds in p99_ms.items()}
    result = described(100.0, outcomes, [20.0, 30.0, 40.0], Cores({}, "nobody's"))
    assert result["p99_ms"] == {"quiet": 10.0, "unread": 10.0, "updated": 12.0, "watched": 9.0}
    assert result["p99_ratio_by_round"]["updated / unread"] == [1.1, 2.0, 1.2]
    assert result["p99_ratio"] == {"updated / unread": 1.2, "updated / quiet": 1.2, "unread / quiet": 1.0}
    assert result["visible_p50_ms"] == 30.0


def test_ticks_wait_for_the_word_and_end_with_it():
    go, stop, ticked = threading.Event(), threading.Event(), []
    ticking = threading.Thread(target=lambda: ticked.extend(feed.ticks(go, stop)))
    ticking.start()
    time.sleep(3 / feed.PARTS_PER_S)
    assert ticked == []
    go.set()
    time.sleep(5 / feed.PARTS_PER_S)
    stop.set()
    ticking.join(5)
    assert ticked == list(range(1, len(ticked) + 1))
    assert ticked


def refuse() -> None:
    raise SystemExit(3)


def refuse_broker(address, stop) -> None:
    refuse()


def test_what_is_measured_beside_a_process_that_died_does_not_count():
    with pytest.raises(ServerError, match="The updater ended halfway, with exit code 3"), ended_beside():
        pass


@contextmanager
def ended_beside():
    with feed.beside("The updater", refuse, (), lambda: None) as process:
        process.join()
        yield


def test_a_process_that_runs_is_told_to_stop():
    stop = feed.spawn.Event()
    with feed.beside("The waiter", stop.wait, (), stop.set) as process:
        assert process.is_alive()
    assert process.exitcode == 0


def test_a_broker_that_does_not_start_is_an_error_and_not_a_wait(monkeypatch):
    monkeypatch.setattr(feed, "run_broker", refuse_broker)
    with pytest.raises(ServerError, match="The broker ended halfway, with exit code 3"), feed.broker():
        pass


class FakeTiers:
    """Tables whose first column is always the same."""

    def lookup(self, table, keys):
        return np.full((len(keys), 2), 3.0, np.float32)


def test_a_part_that_never_becomes_visible_took_forever(monkeypatch):
    monkeypatch.setattr(updates, "NEVER_S", 0.05)
    sent = queue.Queue()
    for number in (2, 3, 4):  # 4 is newer than what is there
        sent.put((number, number, time.monotonic()))
    watch = updates.Watch(FakeTiers(), SimpleNamespace(sent=sent))
    watch.until_all_seen()
    assert np.isfinite(watch.visible_ms).tolist() == [True, True, False]
