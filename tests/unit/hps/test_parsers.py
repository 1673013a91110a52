"""NVIDIA's two parsers, key by key: what each requires, defaults to, and misreads."""

import copy
import json
from typing import Any

import pytest

from hps_config.parsers import load_json, read_as_a, read_as_b
from hps_config.ps_config import NO_MARGIN
from repository.checks.finding import Finding
from serving.contract.errors import ConfigError

SMALLEST: dict[str, Any] = {
    "supportlonglong": True,
    "models": [
        {
            "model": "dlrm_hps",
            "sparse_files": ["/models/t0.model", "/models/t1.model"],
            "embedding_vecsize_per_table": [16, 8],
            "maxnum_catfeature_query_per_table_per_sample": [1, 3],
            "default_value_for_each_table": [0.5, 0.0],
            "deployed_device_list": [0],
            "max_batch_size": 4096,
            "gpucache": True,
            "hit_rate_threshold": 1.1,
            "gpucacheper": 0.5,
            "num_of_worker_buffer_in_pool": 2,
        }
    ],
}
REQUIRED_BY_BOTH = (
    "sparse_files",
    "embedding_vecsize_per_table",
    "maxnum_catfeature_query_per_table_per_sample",
    "default_value_for_each_table",
    "deployed_device_list",
)
REQUIRED_BY_B = ("model", "max_batch_size", "gpucache", "hit_rate_threshold", "gpucacheper", "num_of_worker_buffer_in_pool")


def document(block: dict[str, Any] | None = None, /, **model: Any) -> dict[str, Any]:
    """The smallest file both parsers take, with top-level keys and keys of its model replaced."""
    changed = copy.deepcopy(SMALLEST)
    changed["models"][0] |= model
    return changed | (block or {})


def without(key: str) -> dict[str, Any]:
    changed = document()
    del changed["models"][0][key]
    return changed


def errors(findings: list[Finding]) -> list[str]:
    return [finding.where for finding in findings if finding.level == "error"]


def warnings(findings: list[Finding]) -> list[str]:
    return [finding.where for finding in findings if finding.level == "warning"]


def test_the_smallest_file_is_read_alike():
    a, b = read_as_a(document()), read_as_b(document())
    assert a.findings == b.findings == []
    assert a.config.models[0].sparse_files == b.config.models[0].sparse_files == ("/models/t0.model", "/models/t1.model")
    assert a.config.models[0].default_value_for_each_table == b.config.models[0].default_value_for_each_table == (0.5, 0.0)
    assert a.config.models[0].hit_rate_threshold == b.config.models[0].hit_rate_threshold == 1.1


@pytest.mark.parametrize("key", ["supportlonglong", "models"])
def test_required_at_the_top_by_both(key):
    changed = document()
    del changed[key]
    assert errors(read_as_a(changed).findings) == errors(read_as_b(changed).findings) == [key]


@pytest.mark.parametrize("models", [[], {}, "x"])
def test_models_must_hold_one(models):
    assert errors(read_as_a(document({"models": models})).findings) == ["models"]
    assert errors(read_as_b(document({"models": models})).findings) == ["models"]


@pytest.mark.parametrize("key", REQUIRED_BY_BOTH)
def test_required_by_both(key):
    assert f"models[0].{key}" in errors(read_as_a(without(key)).findings)
    assert errors(read_as_b(without(key)).findings) == [f"models[0].{key}"]


@pytest.mark.parametrize("key", REQUIRED_BY_B)
def test_required_by_b_only(key):
    assert read_as_a(without(key)).findings == []
    assert errors(read_as_b(without(key)).findings) == [f"models[0].{key}"]


@pytest.mark.parametrize("key", ["hit_rate_threshold", "gpucacheper"])
@pytest.mark.parametrize("off", [False, "false", "False", "0"])
def test_not_required_without_the_cache(key, off):
    changed = without(key)
    changed["models"][0]["gpucache"] = off
    assert errors(read_as_b(changed).findings) == []


def test_defaults_of_a():
    model = read_as_a({"supportlonglong": True, "models": [{"sparse_files": ["a", "b"]}]}).config.models[0]
    assert (model.model, model.max_batch_size, model.gpucache) == ("", 64, True)
    assert (model.hit_rate_threshold, model.gpucacheper) == (0.9, 0.2)
    assert (model.num_of_worker_buffer_in_pool, model.num_of_refresher_buffer_in_pool) == (1, 1)
    assert (model.cache_refresh_percentage_per_iteration, model.init_ec, model.embedding_cache_type) == (0.0, True, "dynamic")
    assert (model.refresh_interval, model.thread_pool_size) == (0, 16)


def test_absent_table_names():
    assert read_as_a(document()).config.models[0].embedding_table_names == ("sparse_embedding0", "sparse_embedding1")
    assert read_as_b(document()).config.models[0].embedding_table_names == ("",)


@pytest.mark.parametrize(("given", "read"), [([1.0], (1.0, 0.0)), ([1.0, 2.0, 3.0], (1.0, 2.0)), ([], (0.0, 0.0))])
def test_a_pads_and_cuts_default_values(given, read):
    reading = read_as_a(document(default_value_for_each_table=given))
    assert reading.config.models[0].default_value_for_each_table == read
    assert warnings(reading.findings) == ["models[0].default_value_for_each_table"]


def test_a_reads_the_refresh_interval_as_an_integer():
    reading = read_as_a(document(refresh_interval=0.5))
    assert reading.config.models[0].refresh_interval == 0
    assert [str(finding) for finding in reading.findings] == [
        "warning (parser A) models[0].refresh_interval: is 0.5; A reads an integer, 0. Expected an integer. Write 0 or 1."
    ]


def test_static_table_forces_the_cache_type_in_a_only():
    changed = document(use_static_table=True, embedding_cache_type="dynamic")
    assert read_as_a(changed).config.models[0].embedding_cache_type == "static"
    assert read_as_b(changed).config.models[0].embedding_cache_type == "dynamic"


def test_databases_absent_and_without_type():
    absent = read_as_a(document()).config
    assert (absent.volatile_db.type, absent.persistent_db.type, absent.update_source.type) == (
        "parallel_hash_map",
        "disabled",
        "null",
    )
    empty = read_as_a(document({"volatile_db": {}, "persistent_db": {}, "update_source": {}})).config
    assert (empty.volatile_db.type, empty.persistent_db.type, empty.update_source.type) == ("disabled", "disabled", "null")
    assert read_as_b(document({"volatile_db": {}})).config.volatile_db.type == "parallel_hash_map"


def test_database_defaults():
    config = read_as_a(document({"volatile_db": {"type": "redis"}, "persistent_db": {"type": "rocks"}})).config
    redis, rocks, source = config.volatile_db, config.persistent_db, config.update_source
    assert (redis.address, redis.user_name, redis.num_node_connections, redis.max_batch_size) == (
        "127.0.0.1:7000",
        "default",
        5,
        65536,
    )
    assert (redis.overflow_margin, redis.overflow_policy, redis.overflow_resolution_target) == (NO_MARGIN, "evict_random", 0.8)
    assert (redis.initial_cache_rate, redis.cache_missed_embeddings) == (1.0, False)
    assert (rocks.num_threads, rocks.read_only, rocks.max_batch_size) == (16, False, 65536)
    assert (source.brokers, source.receive_buffer_size, source.max_batch_size) == ("127.0.0.1:9092", 262144, 8192)
    assert (source.poll_timeout_ms, source.failure_backoff_ms, source.max_commit_interval) == (500, 50, 32)


def test_update_filters_when_absent():
    changed = document({"volatile_db": {"type": "redis"}, "persistent_db": {"type": "rocks"}})
    for block in ("volatile_db", "persistent_db"):
        assert getattr(read_as_a(changed).config, block).update_filters == ("^hps_.+$",)
        assert getattr(read_as_b(changed).config, block).update_filters == ()


SPELLINGS = [
    ("volatile_db", "type", "disabled", ("disabled", "disable", "none")),
    ("volatile_db", "type", "hash_map", ("hash_map", "hashmap", "hash", "map")),
    (
        "volatile_db",
        "type",
        "parallel_hash_map",
        ("parallel_hash_map", "parallel_hashmap", "parallel_hash", "parallel_map"),
    ),
    ("volatile_db", "type", "redis_cluster", ("redis_cluster", "redis")),
    ("persistent_db", "type", "rocks_db", ("rocks_db", "rocksdb", "rocks")),
    ("update_source", "type", "null", ("null", "none")),
    ("update_source", "type", "kafka_message_queue", ("kafka_message_queue", "kafka_mq", "kafka")),
    ("volatile_db", "overflow_policy", "evict_random", ("evict_random", "random")),
    ("volatile_db", "overflow_policy", "evict_least_used", ("evict_least_used", "least_used")),
    ("volatile_db", "overflow_policy", "evict_oldest", ("evict_oldest", "oldest")),
]


@pytest.mark.parametrize(("block", "key", "canonical", "spellings"), SPELLINGS)
def test_every_spelling_is_known_to_both(block, key, canonical, spellings):
    for spelling in spellings:
        for read in (read_as_a, read_as_b):
            reading = read(document({block: {key: spelling}}))
            assert reading.findings == []
            assert getattr(getattr(reading.config, block), key) == canonical


# what A falls back to in silence, where B stops
FALLBACKS = [
    ("volatile_db", "type", "disabled"),
    ("volatile_db", "overflow_policy", "evict_random"),
    ("persistent_db", "type", "disabled"),
    ("update_source", "type", "null"),
]


@pytest.mark.parametrize(("block", "key", "fallback"), FALLBACKS)
def test_unknown_names_fall_back_in_a_and_stop_b(block, key, fallback):
    changed = document({block: {key: "memcached"}})
    a, b = read_as_a(changed), read_as_b(changed)
    assert getattr(getattr(a.config, block), key) == fallback
    assert (errors(a.findings), warnings(a.findings)) == ([], [f"{block}.{key}"])
    assert f"uses '{fallback}'" in str(a.findings[0])
    assert errors(b.findings) == [f"{block}.{key}"]


@pytest.mark.parametrize("read", [read_as_a, read_as_b])
def test_unknown_cache_type_is_dynamic_in_both(read):
    reading = read(document(embedding_cache_type="lfu"))
    assert reading.config.models[0].embedding_cache_type == "dynamic"
    assert (errors(reading.findings), warnings(reading.findings)) == ([], ["models[0].embedding_cache_type"])


def test_capitals_count_for_a_only():
    changed = document({"volatile_db": {"type": "Redis-Cluster"}}, embedding_cache_type="Static")
    a, b = read_as_a(changed), read_as_b(changed)
    assert (a.config.volatile_db.type, a.config.models[0].embedding_cache_type) == ("disabled", "dynamic")
    assert warnings(a.findings) == ["volatile_db.type", "models[0].embedding_cache_type"]
    assert (b.config.volatile_db.type, b.config.models[0].embedding_cache_type) == ("redis_cluster", "static")
    assert b.findings == []


@pytest.mark.parametrize("spelling", ["multi_process_hash_map", "multi_process_map"])
def test_the_multi_process_map_is_known_to_a_only(spelling):
    changed = document({"volatile_db": {"type": spelling}})
    assert read_as_a(changed).config.volatile_db.type == "multi_process_hash_map"
    assert errors(read_as_b(changed).findings) == ["volatile_db.type"]


def test_b_keeps_its_default_on_an_empty_name():
    assert read_as_b(document({"volatile_db": {"overflow_policy": ""}})).findings == []


# (key, as B takes it, what B makes of it)
AS_STRINGS = [
    ("gpucache", "TRUE", True),
    ("init_ec", "0", False),
    ("enable_pagelock", "2", True),
    ("max_batch_size", "128", 128),
    ("gpucacheper", "0.25", 0.25),
    ("deployed_device_list", ["0", 1], (0, 1)),
    ("default_value_for_each_table", ["1e-1", 0], (0.1, 0.0)),
]


@pytest.mark.parametrize(("key", "value", "read"), AS_STRINGS)
def test_numbers_and_booleans_as_strings_are_for_b_only(key, value, read):
    a, b = read_as_a(document(**{key: value})), read_as_b(document(**{key: value}))
    assert b.findings == []
    assert getattr(b.config.models[0], key) == read
    assert errors(a.findings) == [f"models[0].{key}"]
    assert "without quotes" in str(a.findings[0])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_batch_size", "many"),
        ("max_batch_size", 1.5),
        ("max_batch_size", True),
        ("gpucacheper", "half"),
        ("gpucacheper", [0.5]),
        ("gpucache", "perhaps"),
        ("gpucache", 1),
        ("model", 7),
        ("sparse_files", "t0.model"),
        ("sparse_files", [1, 2]),
        ("deployed_device_list", 0),
        ("embedding_cache_type", 3),
    ],
)
def test_values_b_cannot_read(key, value):
    assert f"models[0].{key}" in errors(read_as_b(document(**{key: value})).findings)


@pytest.mark.parametrize("key", ["refresh_interval", "refresh_delay", "thread_pool_size", "use_static_table"])
def test_keys_b_passes_over(key):
    assert read_as_b(document(**{key: "not even looked at"})).findings == []


@pytest.mark.parametrize("key", ["network_file", "label_dim", "slot_num"])
def test_keys_a_passes_over(key):
    assert read_as_a(document(**{key: ["not even looked at"]})).findings == []


def test_blocks_and_models_that_are_no_objects():
    for read in (read_as_a, read_as_b):
        assert errors(read(document({"volatile_db": "redis"})).findings) == ["volatile_db"]
        assert errors(read(document({"models": [3]})).findings) == ["models[0]"]


def test_comments_nan_and_numbers_beyond_float64_are_no_json(tmp_path):
    path = tmp_path / "ps.json"
    for text in ('{"models": [] // none\n}', '{"gpucacheper": NaN}', '{"max_batch_size": 1e999}', "", "[1]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"not JSON|holds a list"):
            load_json(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_json(tmp_path / "missing.json")
    path.write_text(json.dumps(SMALLEST))
    assert load_json(path) == SMALLEST
