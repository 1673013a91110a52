"""ps.json as our own levels understand it, and what the planner says they cost."""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import psutil
import pytest

from hps_config.hit_rate import WARM_UP_SHARE, predict_hit_rates
from hps_config.levels import convert_levels
from hps_config.memory import compute_l1_rows
from hps_config.planning import Budgets, plan_levels
from hps_config.reader import read_ps_json
from hps_config.tables import TableSpec
from serving.contract.errors import ConfigError
from serving.tables.config import RedisConfig, RocksConfig, TableConfig, UpdateConfig
from serving.tables.store.table import LeveledTable, open_shared
from tests.unit.hps.test_parsers import document
from tests.unit.hps.test_reader import NAMED

ROWS = {"t0": 1_000, "t1": 500}


def tiers(tmp_path, block=None, **model):
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(document(block, **{**NAMED, **model})))
    return convert_levels(read_ps_json(path), "dlrm_hps", "shop", ROWS, source="rows")


def test_one_file_for_both(tmp_path):
    blocks = {
        "volatile_db": {"type": "hash_map", "num_partitions": 4, "overflow_margin": 100, "update_filters": [".+"]},
        "persistent_db": {"type": "rocks_db", "path": "/data/rows", "num_threads": 3, "update_filters": [".+", "x"]},
        "update_source": {"type": "kafka", "brokers": "a:1,b:2", "max_batch_size": 7},
    }
    config = tiers(tmp_path, blocks, gpucacheper=0.1, row_format_per_table=["int8", "fp32"])
    assert (config.model, config.arena, config.hit_rate_threshold, config.source) == ("dlrm_hps", "shop", 1.1, "rows")
    first, second = config.tables
    assert (first.name, first.width, first.row_format, first.default) == ("t0", 16, "int8", 0.5)
    assert (first.l1_rows, first.l2_rows) == (128, 400)  # whole sets of 64; 4 partitions of 100
    assert (second.name, second.width, second.l1_rows, second.l2_rows) == ("t1", 8, 64, 400)
    assert config.rocksdb == RocksConfig("/data/rows", 3)
    assert config.updates == UpdateConfig("a:1,b:2", (".+", "x"), max_batch_size=7)
    assert config.redis is None


def test_no_margin_keeps_every_row(tmp_path):
    assert [table.complete for table in tiers(tmp_path).tables] == [True, True]


def test_small_tables_never_get_more_rows_than_they_have(tmp_path):
    half = {"volatile_db": {"type": "hash_map", "num_partitions": 1, "overflow_margin": 400}}
    assert [table.l1_rows for table in tiers(tmp_path, half, gpucacheper=1.0).tables] == [1_000, 500]


def test_no_l1_over_tables_that_l2_holds_whole(tmp_path):
    assert [table.l1_rows for table in tiers(tmp_path, gpucacheper=1.0).tables] == [0, 0]


def test_redis_takes_the_place_of_shared_memory(tmp_path):
    redis = {"type": "redis", "address": "h:7000,i:7000", "num_partitions": 8, "user_name": "u", "password": "p"}
    config = tiers(tmp_path, {"volatile_db": redis})
    assert config.redis == RedisConfig("h:7000,i:7000", 8, "u", "p")
    assert [table.l2_rows for table in config.tables] == [0, 0]


def test_redis_over_tls_is_refused_rather_than_asked_without_it(tmp_path):
    with pytest.raises(ConfigError, match=r"enable_tls\), which our levels do not support"):
        tiers(tmp_path, {"volatile_db": {"type": "redis", "address": "h:7000", "num_partitions": 8, "enable_tls": True}})


@pytest.mark.parametrize("address", ["h:seven", "h", "h:7000,", "h:70000", ":7000", ""])
def test_a_redis_address_without_a_port_is_refused(address):
    with pytest.raises(ConfigError, match=r"the Redis address is '.*'\. Expected host:port"):
        RedisConfig(address)


def test_without_cache_or_l2(tmp_path):
    config = tiers(tmp_path, {"volatile_db": {"type": "none"}, "persistent_db": {"type": "rocks_db"}}, gpucache=False)
    assert [(table.l1_rows, table.l2_rows) for table in config.tables] == [(0, 0), (0, 0)]


def test_tables_without_a_row_count(tmp_path):
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(document(**NAMED)))
    with pytest.raises(ConfigError, match="tables t1 of dlrm_hps have no row count"):
        convert_levels(read_ps_json(path), "dlrm_hps", "shop", {"t0": 1})


def private_bytes_of_a_full_table(config, folder):
    """Fill L1 and L2 of a table -> what this process needed for it alone."""
    full_table(replace(config, name="small", rows=10_000, l1_rows=1_000, l2_rows=1_000), folder)  # loads the machine code
    before = psutil.Process().memory_info()
    table = full_table(config, folder)
    after = psutil.Process().memory_info()
    assert table.config == config  # it lives until here
    return (after.rss - after.shared) - (before.rss - before.shared)


def full_table(config, folder):
    table = LeveledTable(config)
    keys = np.random.default_rng(0).permutation(config.rows)
    vectors = np.ones((5_000, config.width), np.float32)
    table.attach(open_shared(folder, [table.config])[config.name])
    assert table.l1 is not None
    for start in range(0, len(keys), len(vectors)):  # small pieces, so that temporary arrays do not count
        table.l1.insert(keys[start : start + len(vectors)], vectors, 0)
    return table


@pytest.mark.parametrize(("width", "row_format"), [(16, "int8"), (4, "fp32")], ids=["hot", "cold"])
def test_planned_memory_is_what_the_tiers_take(tmp_path, width, row_format):
    """Fill L1 and L2 of a planned table and measure: this process's private memory, and the shared file."""
    spec = TableSpec(name="item", rows=1_000_000, width=width, row_format=row_format)
    plan = plan_levels((spec,), Budgets(l1_bytes=40 * 2**20, l2_bytes=12 * 2**20, l3_bytes=2**30))
    planned = plan.tables[0]
    path = tmp_path / "ps.json"
    of_one_table = {name: values[:1] for name, values in document()["models"][0].items() if isinstance(values, list)}
    changed = document(
        {"volatile_db": {"type": "hash_map", "num_partitions": 8, "overflow_margin": plan.overflow_margin}},
        **of_one_table | {"embedding_vecsize_per_table": [width]},
        embedding_table_names=["item"],
        gpucacheper=plan.gpucacheper,
        row_format_per_table=[row_format],
    )
    path.write_text(json.dumps(changed))
    config = convert_levels(read_ps_json(path), "dlrm_hps", "shop", {"item": spec.rows}, source="rows").tables[0]
    assert (config.l1_rows, config.l2_rows) == (planned.l1_rows, planned.l2_rows)

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:  # no freed memory of other tests to reuse
        private = fresh.submit(private_bytes_of_a_full_table, config, tmp_path).result()
    assert private == pytest.approx(plan.l1_bytes, rel=0.15)
    shared = next(file for file in tmp_path.iterdir() if file.name.startswith("item-") and file.suffix != ".lock")
    assert shared.stat().st_size == pytest.approx(plan.l2_bytes + plan.ring_bytes, rel=0.15)


@pytest.mark.parametrize(("skew", "share"), [(0.9, 0.1), (1.05, 0.05), (1.2, 0.1)])
def test_predicted_hit_rate_is_what_the_real_l1_reaches(tmp_path, skew, share):
    """L1 is no LRU: it keeps the most used of 8. On steady Zipf traffic it stays from 1 point below to 7 above an LRU."""
    rows, per_request = 20_000, 500
    rng = np.random.default_rng(0)
    popularity = np.arange(1, rows + 1) ** -skew
    drawn = rng.permutation(rows)[rng.choice(rows, 100 * per_request, p=popularity / popularity.sum())]
    requests = [np.unique(part) for part in drawn.reshape(-1, per_request)]
    table = LeveledTable(TableConfig("item", rows, 4, l1_rows=compute_l1_rows(rows, share)))
    table.attach(open_shared(tmp_path, [table.config])["item"])
    assert table.l1 is not None
    hits = []
    for keys in requests:
        _, missing = table.l1.slots.read(keys)
        missed = np.zeros(len(keys), bool) if missing is None else missing
        hits += (~missed).tolist()
        table.l1.insert(keys[missed], np.zeros((missed.sum(), 4), np.float32), 0)
    predicted = predict_hit_rates(np.concatenate(requests), compute_l1_rows(rows, share), 0).l1
    assert -0.01 <= np.mean(hits[int(len(hits) * WARM_UP_SHARE) :]) - predicted <= 0.07
