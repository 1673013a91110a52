import io
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from hps_config.memory import compute_l1_bytes, compute_l1_rows, compute_l2_bytes, compute_l3_bytes, compute_l3_memory_bytes
from hps_config.planning import SHARE_STEPS, Budgets, plan_levels, predict
from hps_config.ps_config import NO_MARGIN
from hps_config.report import format_bytes, print_plan
from hps_config.tables import ROW_FORMATS, TableSpec
from serving.contract.errors import ConfigError
from serving.tables.config import RocksConfig
from serving.tables.levels.rocks_options import BLOCK_CACHE_BYTES, estimate_reader_bytes
from serving.tables.levels.rocks_store import RocksStore
from serving.tables.store.row_formats import RowCodec
from tests.unit.hps.oracle import simulate

MIB = 2**20
ITEM = TableSpec(name="item", rows=100_000, width=16)
USER = TableSpec(name="user", rows=1_000_000, width=16, row_format="int8", keys_per_sample=2)
AMPLE = Budgets(l1_bytes=200 * MIB, l2_bytes=1024 * MIB, l3_bytes=1024 * MIB, instances=2, max_batch_size=1000)


def test_every_row_format_is_one_of_the_codecs():
    sizes = [RowCodec(row_format, ITEM.width).row_bytes for row_format in ROW_FORMATS]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == ITEM.fp32_row_bytes


def test_everything_fits():
    plan = plan_levels((ITEM, USER), AMPLE)
    assert plan.gpucacheper == 1.0
    assert plan.overflow_margin == NO_MARGIN
    assert plan.l2_complete
    assert [planned.l2_rows for planned in plan.tables] == [planned.l3_rows for planned in plan.tables] == [100_000, 1_000_000]
    assert [planned.l1_rows for planned in plan.tables] == [100_032, 1_000_000]  # whole sets of 64
    assert plan.buffer_bytes == 1000 * (1 * (8 + 64) + 2 * (8 + 64))
    assert plan.l3_memory_bytes == compute_l3_memory_bytes((ITEM, USER))
    assert plan.process_bytes == plan.l1_bytes + plan.buffer_bytes + plan.l3_memory_bytes
    assert plan.machine_bytes == 2 * plan.process_bytes + plan.l2_bytes + plan.ring_bytes
    assert plan.spared_bytes == plan.l1_bytes


def test_the_plan_names_the_l1_that_our_own_levels_leave_out():
    """They have no L1 for tables that L2 holds whole: here the smaller one, which fits its partitions."""
    plan = plan_levels((ITEM, USER), replace(AMPLE, l2_bytes=20 * MIB))
    assert [planned.l2_rows == planned.table.rows for planned in plan.tables] == [True, False]
    assert plan.spared_bytes == plan.tables[0].l1_bytes > 0
    said = Console(record=True, width=120, file=io.StringIO())
    print_plan(plan, {}, said)
    own = [format_bytes(size) for size in (plan.process_bytes - plan.spared_bytes, plan.machine_bytes - 2 * plan.spared_bytes)]
    lines = [line for line in said.export_text().splitlines() if "the same in our own levels" in line]
    assert [size in line for size, line in zip(own, lines, strict=True)] == [True, True]


@pytest.mark.parametrize("l1", [1, 3, 17])
@pytest.mark.parametrize("l2", [5, 20])
def test_cache_sizes_are_as_large_as_the_budgets_allow(l1, l2):
    beside = compute_l3_memory_bytes((ITEM, USER))
    plan = plan_levels((ITEM, USER), replace(AMPLE, l1_bytes=l1 * MIB + beside, l2_bytes=l2 * MIB))
    assert plan.l1_bytes <= l1 * MIB
    assert plan.l2_bytes <= l2 * MIB
    share = plan.gpucacheper + 1 / SHARE_STEPS
    assert sum(compute_l1_bytes(table, compute_l1_rows(table.rows, share)) for table in (ITEM, USER)) > l1 * MIB or share > 1
    margin = plan.overflow_margin + 1
    assert sum(compute_l2_bytes(table, min(table.rows, margin * AMPLE.num_partitions)) for table in (ITEM, USER)) > l2 * MIB
    assert not plan.l2_complete


def test_bytes_are_those_of_the_rows():
    plan = plan_levels((ITEM,), replace(AMPLE, l2_bytes=0))
    assert plan.tables[0].l2_rows == plan.l2_bytes == 0
    assert plan.l3_bytes == 100_000 * (64 + 20)
    assert plan.l1_bytes >= 100_000 * (64 + 8)


def refusal(tables, budgets) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_levels(tables, budgets)
    return str(caught.value)


def number(pattern: str, message: str) -> int:
    found = re.search(pattern, message)
    assert found is not None
    return int(found[1])


def test_l3_refusal_says_what_fits():
    budgets = replace(AMPLE, l3_bytes=MIB)
    message = refusal((ITEM,), budgets)
    needed = number(r"Raise l3 to (\d+)", message)
    assert plan_levels((ITEM,), replace(budgets, l3_bytes=needed)).l3_bytes == needed
    assert number(r"Raise l3 to (\d+)", refusal((ITEM,), replace(budgets, l3_bytes=needed - 1))) == needed
    rows = number(r"at most (\d+) rows", message)
    assert plan_levels((ITEM.model_copy(update={"rows": rows}),), budgets).l3_bytes <= MIB
    assert number(r"at most (\d+) rows", refusal((ITEM.model_copy(update={"rows": rows + 1}),), budgets)) == rows


def test_l1_refusal_says_what_fits():
    budgets = replace(AMPLE, l1_bytes=100)
    needed = number(r"Raise l1 to (\d+)", refusal((ITEM, USER), budgets))
    plan = plan_levels((ITEM, USER), replace(budgets, l1_bytes=needed))
    assert [planned.l1_rows for planned in plan.tables] == [64, 64]


def test_l1_shares_its_budget_with_rocksdb_unless_l2_holds_every_row():
    budgets, beside = replace(AMPLE, l1_bytes=MIB, l2_bytes=5 * MIB), compute_l3_memory_bytes((ITEM,))
    message = refusal((ITEM,), budgets)
    assert f"{beside} bytes of it for RocksDB's index, filters and block cache" in message
    needed = number(r"Raise l1 to (\d+)", message)
    assert plan_levels((ITEM,), replace(budgets, l1_bytes=needed)).tables[0].l1_rows == 64
    assert number(r"Raise l1 to (\d+)", refusal((ITEM,), replace(budgets, l1_bytes=needed - 1))) == needed
    assert plan_levels((ITEM,), replace(budgets, l2_bytes=AMPLE.l2_bytes)).process_bytes > budgets.l1_bytes
    without = plan_levels((ITEM,), replace(AMPLE, l3_bytes=0))
    assert (without.l3_memory_bytes, without.process_bytes) == (0, without.l1_bytes + without.buffer_bytes)


def test_l2_refusal_says_what_fits():
    budgets = replace(AMPLE, l2_bytes=100)
    message = refusal((ITEM, USER), budgets)
    plan_levels((ITEM, USER), replace(budgets, l2_bytes=number(r"Raise l2 to (\d+)", message)))
    assert plan_levels((ITEM, USER), replace(budgets, l2_bytes=0)).l2_bytes == 0
    assert "set it to 0" in message


def test_a_machine_without_disk_must_hold_every_row():
    budgets = replace(AMPLE, l2_bytes=5 * MIB, l3_bytes=0)
    message = refusal((ITEM,), budgets)
    plan_levels((ITEM,), replace(budgets, l2_bytes=number(r"raise l2 to (\d+)", message)))
    plan_levels((ITEM,), replace(budgets, l3_bytes=number(r"give l3 (\d+)", message)))
    assert "keep the rows as fp16" in message
    plan = plan_levels((ITEM.model_copy(update={"row_format": "fp16"}),), budgets)
    assert plan.l2_complete
    assert plan.tables[0].l3_rows == 0
    assert "keep the rows" not in refusal((ITEM,), replace(budgets, l2_bytes=MIB))


@pytest.mark.parametrize(
    ("tables", "change", "message"),
    [
        ((), {}, "the plan has no tables"),
        ((ITEM, ITEM), {}, "table names repeat: item"),
        ((ITEM,), {"instances": 0}, "a count below 1"),
        ((ITEM,), {"l2_bytes": 0, "l3_bytes": 0}, "neither L2 nor L3"),
    ],
)
def test_contradictory_settings_are_refused(tables, change, message):
    assert message in refusal(tables, replace(AMPLE, **change))


def test_predictions_against_simulated_tiers():
    table = ITEM.model_copy(update={"rows": 5_000})
    plan = plan_levels((table,), replace(AMPLE, l1_bytes=20_000 + compute_l3_memory_bytes((table,)), l2_bytes=100_000))
    planned = plan.tables[0]
    assert 64 <= planned.l1_rows < planned.l2_rows < 5_000
    keys = np.random.default_rng(2).zipf(1.1, 8_000) % 5_000
    rates = predict(plan, {"item": keys})["item"]
    counted = simulate(keys, planned.l1_rows, planned.l2_rows, AMPLE.instances)[1_600:]
    assert rates.l1 == pytest.approx(counted.count(1) / len(counted), abs=1e-12)
    assert rates.l2 == pytest.approx(counted.count(2) / len(counted), abs=1e-12)


def test_a_complete_l2_answers_every_miss():
    plan = plan_levels((ITEM.model_copy(update={"rows": 5_000}),), replace(AMPLE, l1_bytes=20_000))
    rates = predict(plan, {"item": np.arange(5_000)})["item"]
    assert (rates.l1, rates.l2) == (0.0, 1.0)


def test_traces_of_unknown_tables():
    with pytest.raises(ConfigError, match=r"keys of shop\. Expected tables of the plan: item"):
        predict(plan_levels((ITEM,), AMPLE), {"shop": np.arange(3)})


def test_disk_bytes_of_a_real_rocksdb(tmp_path):
    """The planner's overhead per row covers RocksDB's, and exceeds it by at most 15 % of all bytes."""
    from rocksdict import Options, Rdict, WriteBatch

    from serving.tables.formats.rows import encode_keys, encode_vectors

    table = TableSpec(name="item", rows=50_000, width=16)
    rng = np.random.default_rng(0)
    keys = rng.permutation(table.rows)
    database = Rdict(str(tmp_path), Options(raw_mode=True))
    batch = WriteBatch(raw_mode=True)
    vectors = rng.normal(size=(table.rows, table.width)).astype(np.float32)
    for key, value in zip(encode_keys(keys), encode_vectors(vectors), strict=True):
        batch.put(key, value)
    database.write(batch)
    database.flush()
    database.compact_range(None, None)
    database.close()
    measured = sum(path.stat().st_size for path in tmp_path.glob("*.sst"))
    assert 0.85 <= measured / compute_l3_bytes(table, table.rows) <= 1.0


@pytest.mark.parametrize(("width", "step"), [(4, 1), (16, 1), (64, 1), (128, 1), (4, 9_876_543_210), (128, 9_876_543_210)])
def test_planned_memory_of_rocksdb_is_what_it_reports(tmp_path, width, step):
    """It is the memory of index and filters of a loaded table in one instance, with consecutive or scattered keys."""
    rows = 100_000
    store = RocksStore(RocksConfig(str(tmp_path)), "rank", {"item": width, "user": width}, writable=True)
    vectors = np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)
    store.bulk_load("item", np.arange(rows) * step, vectors)
    store.close()
    store = RocksStore(RocksConfig(str(tmp_path)), "rank", {"item": width, "user": width})
    assert store.read({"item": np.array([step])})[1]

    def read_property(table: str, name: str) -> int:
        value = store.column_families[table].property_value(f"rocksdb.{name}")
        assert value is not None
        return int(value)

    said = read_property("item", "estimate-table-readers-mem")
    of_both = [read_property(table, "block-cache-usage") for table in ("item", "user")]
    cache = read_property("item", "block-cache-capacity")
    store.close()
    assert estimate_reader_bytes(rows, width) == pytest.approx(said, rel=0.15)
    assert cache == BLOCK_CACHE_BYTES
    assert of_both[0] == of_both[1] > 0  # one cache
