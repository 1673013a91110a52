"""Whole processes over one table, L1, a part of L2 and an open RocksDB: they take the memory that the planner says."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hps_config.memory import make_table_config
from hps_config.planning import Budgets, plan_levels
from hps_config.tables import TableSpec
from serving.tables.config import LevelsConfig, RocksConfig
from serving.tables.leveled import LeveledTables
from serving.tables.levels.loading import load_l3

MIB = 2**20
SPEC = TableSpec(name="item", rows=600_000, width=16)
SMALL_ROWS = 2_000
INSTANCES = 2  # they share the rows that the plan counts once
BATCH = 4096  # keys of a request
WAIT_S = 100
ATTEMPTS = 3  # on a loaded machine threads lie in wait for each other, and what they hold meanwhile is not the plan's


def memory_bytes() -> dict[str, int]:
    """This process's share of the machine's memory, by kind: `Pss` all of it, `Pss_Anon` what it has for itself."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {name: 1024 * int(size.split()[0]) for name, size in (line.split(":") for line in lines)}


def look_all_up(tiers: LeveledTables, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Fill L1 and L2. Return keys and rows of the last request, which a process holds while it serves."""
    for start in range(0, rows, BATCH):
        keys = np.arange(start, min(start + BATCH, rows))
        vectors = tiers.lookup("item", keys).values
        tiers.settle()
    return keys, vectors


def serve(config: LevelsConfig, small: LevelsConfig, together, report) -> None:
    """Report the memory that opening and filling the tiers costs this process, while the others have them open as well."""
    warm = LeveledTables(small, warm=False)  # libraries, machine code and threads of every kind
    look_all_up(warm, SMALL_ROWS)
    together.wait(WAIT_S)
    before = memory_bytes()
    tiers = LeveledTables(config, warm=False)
    for _ in range(2):  # rows come to L1 when they are used again
        held = look_all_up(tiers, SPEC.rows)
    together.wait(WAIT_S)
    report.put({name: size - before[name] for name, size in memory_bytes().items()})
    together.wait(WAIT_S)
    assert len(held[0]) == len(held[1])  # they live until here
    for each in (tiers, warm):
        each.close()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> dict[int, RocksConfig]:
    """rows -> RocksDB that holds them."""
    databases = {}
    for rows in (SMALL_ROWS, SPEC.rows):
        folder = tmp_path_factory.mktemp(f"rows-{rows}")
        np.save(folder / "item.npy", np.random.default_rng(0).standard_normal((rows, SPEC.width), dtype=np.float32))
        databases[rows] = RocksConfig(str(folder / "db"))
        table = make_table_config(SPEC.model_copy(update={"rows": rows}), 0, 0)
        load_l3(LevelsConfig("rank", (table,), "load", source=str(folder), rocksdb=databases[rows]))
    return databases


@pytest.fixture
def shared():
    """Shared memory, where the machine has it: a file's pages count for nobody until they are mapped."""
    folder = tempfile.mkdtemp(prefix="planned-", dir="/dev/shm")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_processes_take_the_memory_that_was_planned(loaded, shared, monkeypatch):
    """The C library gives each reading thread a heap of its own, and memory that RocksDB frees in one serves no other: 8 to 43
    MiB a process, depending on the look-ups. The plan states that it leaves them out. Here, one heap serves all threads."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    budgets = Budgets(l1_bytes=64 * MIB, l2_bytes=20 * MIB, l3_bytes=1024 * MIB, instances=INSTANCES, max_batch_size=BATCH)
    plan = plan_levels((SPEC,), budgets)
    planned = plan.tables[0]
    assert 0 < planned.l2_rows < SPEC.rows

    table = make_table_config(SPEC, min(planned.l1_rows, SPEC.rows), planned.l2_rows)
    config = LevelsConfig("rank", (table,), "planned", shared, rocksdb=loaded[SPEC.rows])
    few = replace(table, rows=SMALL_ROWS, l1_rows=256, l2_rows=512)  # in the same kinds of cache: with an array of all slots
    small = replace(config, tables=(few,), arena="small", rocksdb=loaded[SMALL_ROWS])
    for _ in range(ATTEMPTS):
        measured = measure(config, small)
        machine_bytes = sum(grown["Pss"] for grown in measured)
        if machine_bytes == about(plan.machine_bytes) and all(
            grown["Pss_Anon"] == about(plan.process_bytes) for grown in measured
        ):
            break
    assert machine_bytes == about(plan.machine_bytes)
    for grown in measured:
        assert grown["Pss_Anon"] == about(plan.process_bytes)


def about(nbytes: int):
    return pytest.approx(nbytes, rel=0.15)


def measure(config: LevelsConfig, small: LevelsConfig) -> list[dict[str, int]]:
    """Return the bytes that each of INSTANCES processes takes, by kind."""
    context = multiprocessing.get_context("spawn")
    together, report = context.Barrier(INSTANCES), context.Queue()
    processes = [context.Process(target=serve, args=(config, small, together, report)) for _ in range(INSTANCES)]
    for process in processes:
        process.start()
    measured = [report.get(timeout=WAIT_S) for _ in processes]
    for process in processes:
        process.join(WAIT_S)
    return measured
