"""Measure in process how long `preprocess` takes to replace one user's state by the live record."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from perf.figures import Figure
from perf.load.open_loop import prevent_delays
from serving.contract.tensors import NO_SEQUENCE, PAD_ID
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.store import PROGRESS, Progress, make_id_keys, write_records
from serving.live.writer import Writer
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_state import NO_CATEGORY, UserState
from serving.stages.live.users.live_users import LiveUsers

P50_US = 20.0  # upper bound of each store's median read
DRIFT = 1.1  # upper bound of the last tenth's median over that of the first
GROWTH = 1.5  # upper bound of the largest store's median over that of the smallest
SIZES = (10_000, 1_000_000)
N_ITEMS = 10_000
WARMING_CALLS = 10_000
USERS_PER_TRANSACTION = 50_000
NOW_S = 1_700_000_000
MS_PER_DAY = 86_400_000


def measure(calls: int, sizes: tuple[int, ...], folder: Path, rng: np.random.Generator, progress) -> list[Figure]:
    """Return the figures of stores of `sizes` users, filled with random records. folder: for temporary stores"""
    taken_us: dict[int, np.ndarray] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            progress(f"a store of {size:,} users")
            store = Path(scratch) / "shop.live"
            fill_store(store, size, rng)
            progress(f"{calls:,} reads")
            taken_us[size] = time_reads(store, size, calls, rng)
    return make_figures(taken_us)


def make_figures(taken_us: dict[int, np.ndarray]) -> list[Figure]:
    """Return the figures. taken_us: float64 [calls] by the number of users"""
    figures = []
    p50 = {size: float(np.median(times_us)) for size, times_us in taken_us.items()}
    for size, times_us in taken_us.items():
        tenth = max(len(times_us) // 10, 1)
        drift = float(np.median(times_us[-tenth:]) / np.median(times_us[:tenth]))
        figures += [
            Figure(name=f"{size:,} users: p50 of a read", values=[p50[size]], unit="us", at_most=P50_US),
            Figure(name=f"{size:,} users: p99 of a read", values=[float(np.quantile(times_us, 0.99))], unit="us"),
            Figure(
                name=f"{size:,} users: last tenth of {len(times_us):,} over the first", values=[drift], unit="x", at_most=DRIFT
            ),
        ]
    smallest, largest = min(p50), max(p50)
    name = f"p50 of {largest:,} users over {smallest:,}"
    return [*figures, Figure(name=name, values=[p50[largest] / p50[smallest]], unit="x", at_most=GROWTH)]


def fill_store(folder: Path, n_users: int, rng: np.random.Generator) -> None:
    """Write a store of users 0 … n_users - 1, each with a full record."""
    layout = Layout()
    with closing(Writer(folder, layout, ["purchase"])) as writer:
        keys = make_id_keys(np.arange(n_users))
        order = sorted(range(n_users), key=keys.__getitem__)  # sequential inserts fill pages one after the other
        for start in range(0, n_users, USERS_PER_TRANSACTION):
            part = [keys[place] for place in order[start : start + USERS_PER_TRANSACTION]]
            records = draw_records(layout, len(part), rng)
            with writer.transaction() as txn:
                write_records(txn, writer.store.users, part, records)
        now_ms = 1_000 * NOW_S
        progress = Progress(n_users, now_ms, now_ms, 0, n_users, 0, 0, 0, now_ms - 30 * MS_PER_DAY)
        with writer.transaction() as txn:
            txn.put(PROGRESS, progress.pack(), db=writer.store.meta)


def draw_records(layout: Layout, count: int, rng: np.random.Generator) -> np.ndarray:
    records = layout.make_empty_users(count)
    records["history_ids"] = rng.integers(0, N_ITEMS, records["history_ids"].shape)
    records["history_s"] = NOW_S - np.sort(rng.integers(0, 10**6, records["history_s"].shape))
    records["session_ids"] = rng.integers(0, N_ITEMS, records["session_ids"].shape)
    records["session_ms"] = 1_000 * (NOW_S - np.sort(rng.integers(0, 10**6, records["session_ms"].shape)))
    records["event_count"] = layout.history
    records["first_ms"], records["last_ms"] = 1_000 * (NOW_S - 10**6), 1_000 * NOW_S
    return records


def time_reads(folder: Path, n_users: int, calls: int, rng: np.random.Generator) -> np.ndarray:
    """Return float64 [calls] microseconds of `LiveUsers.update` for one user each."""
    user_ids, after = rng.integers(0, n_users, (WARMING_CALLS + calls, 1)), np.full(1, NO_SEQUENCE)
    taken_ns = np.empty(calls, np.int64)
    with closing(Reader(folder)) as reader:
        with reader.snapshot() as snapshot:
            snapshot.list_users()  # maps every page, as in a server that has run for a while
        live = LiveUsers(reader, ItemIndex(np.arange(N_ITEMS)), np.zeros(N_ITEMS + 1, np.int32))
        live, state = live.with_machine_code(make_empty_state(np.zeros(2, np.int64))), make_empty_state(user_ids[0])
        with prevent_delays():
            for user_id in user_ids[:WARMING_CALLS]:
                state.user_ids[:] = user_id
                live.update(state, after, NOW_S)
            for number in range(calls):
                state.user_ids[:] = user_ids[WARMING_CALLS + number]
                started_ns = time.perf_counter_ns()
                live.update(state, after, NOW_S)
                taken_ns[number] = time.perf_counter_ns() - started_ns
    return taken_ns / 1e3


def make_empty_state(user_ids: np.ndarray) -> UserState:
    """Return the state of users whom the generation does not know. user_ids: int64 [B]"""
    batch, history = len(user_ids), Layout().history
    return UserState(
        user_ids.copy(),
        history_ids=np.full((batch, history), PAD_ID),
        history_times=np.zeros((batch, history), np.int64),
        history_categories=np.full((batch, history), NO_CATEGORY, np.int32),
        history_interests=np.zeros(batch, np.int64),
        event_count=np.zeros(batch, np.int64),
        sum_weight=np.zeros(batch),
        sum_label=np.zeros(batch),
        first_time=np.zeros(batch, np.int64),
        last_time=np.zeros(batch, np.int64),
    )
