"""ps.json as serving reads it: the two parsers put together, and the rules beyond them."""

import json

import pytest

from hps_config.reader import check_document, check_ps_json, read_ps_json
from serving.contract.errors import ConfigError
from tests.unit.hps.test_parsers import document, errors, warnings

NAMED = {"embedding_table_names": ["t0", "t1"], "cache_refresh_percentage_per_iteration": 0.2}


def found(block=None, **model):
    _, findings = check_document(document(block, **{**NAMED, **model}))
    return errors(findings), warnings(findings)


def test_a_good_file_has_no_findings():
    assert found() == ([], [])


def test_databases_come_from_a_and_models_from_b(tmp_path):
    path = tmp_path / "ps.json"
    changed = document(
        {"volatile_db": {"type": "parallel_hash_map", "update_filters": [".+"]}},
        **NAMED,
        refresh_interval=3,
        thread_pool_size=4,
        network_file="dlrm.json",
    )
    path.write_text(json.dumps(changed))
    config = read_ps_json(path)
    assert config.volatile_db.update_filters == (".+",)
    model = config.find_model("dlrm_hps")
    assert (model.refresh_interval, model.thread_pool_size, model.network_file) == (3, 4, "dlrm.json")
    assert model.row_format_per_table == ("fp32", "fp32")
    assert model.exact
    assert model.prefilled
    with pytest.raises(ConfigError, match=r"no model 'other'\. It has: dlrm_hps"):
        config.find_model("other")


def test_every_error_is_in_one_message(tmp_path):
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(document({"supportlonglong": False}, **{**NAMED, "gpucacheper": 0, "model": "a.b"})))
    with pytest.raises(ConfigError) as caught:
        read_ps_json(path)
    for where in ("supportlonglong", "models[0].gpucacheper", "models[0].model"):
        assert where in str(caught.value)
    assert [finding.level for finding in check_ps_json(path)] == ["error"] * 3


def test_a_consequence_does_not_repeat_its_cause():
    changed = document(**NAMED)
    del changed["models"][0]["deployed_device_list"]
    _, findings = check_document(changed)
    assert [finding.parser for finding in findings] == ["A", "B"]


# (top-level blocks, keys of the model, where the error is)
ERRORS = [
    ({"supportlonglong": False}, {}, "supportlonglong"),
    ({"fuse_embedding_table": True}, {}, "fuse_embedding_table"),
    ({"volatile_db": {"type": "hash_map", "num_partitions": 0}}, {}, "volatile_db.num_partitions"),
    ({"volatile_db": {"type": "redis", "num_partitions": 4}}, {}, "volatile_db.num_partitions"),
    ({"volatile_db": {"type": "redis", "num_partitions": 8, "max_batch_size": 262144}}, {}, "volatile_db.max_batch_size"),
    ({"volatile_db": {"type": "redis", "address": "localhost"}}, {}, "volatile_db.address"),
    ({"volatile_db": {"type": "redis", "num_partitions": 8, "address": "a,b:7000"}}, {}, "volatile_db.address"),
    ({"update_source": {"type": "kafka", "receive_buffer_size": 1023}}, {}, "update_source.receive_buffer_size"),
    (
        {"update_source": {"type": "kafka"}, "volatile_db": {"type": "hash_map", "update_filters": ["["]}},
        {},
        "volatile_db.update_filters",
    ),
    ({"volatile_db": {"type": "none"}}, {}, "models[0]"),
    ({}, {"model": ""}, "models[0].model"),
    ({}, {"embedding_table_names": ["t.0", "t1"]}, "models[0].embedding_table_names"),
    ({}, {"embedding_table_names": ["t0", "t0"]}, "models[0].embedding_table_names"),
    ({}, {"embedding_table_names": ["t0"]}, "models[0].embedding_table_names"),
    ({}, {"embedding_vecsize_per_table": [16]}, "models[0].embedding_vecsize_per_table"),
    ({}, {"embedding_vecsize_per_table": [16, 0]}, "models[0].embedding_vecsize_per_table"),
    (
        {},
        {"maxnum_catfeature_query_per_table_per_sample": [1, 1, 1]},
        "models[0].maxnum_catfeature_query_per_table_per_sample",
    ),
    ({}, {"default_value_for_each_table": [0.0]}, "models[0].default_value_for_each_table"),
    ({}, {"row_format_per_table": ["fp32"]}, "models[0].row_format_per_table"),
    ({}, {"row_format_per_table": ["fp32", "fp8"]}, "models[0].row_format_per_table"),
    ({}, {"row_format_per_table": "fp32"}, "models[0].row_format_per_table"),
    ({}, {"deployed_device_list": []}, "models[0].deployed_device_list"),
    ({}, {"deployed_device_list": [-1, 0]}, "models[0].deployed_device_list"),
    ({}, {"gpucache": False, "deployed_device_list": [1]}, "models[0].deployed_device_list"),
    ({}, {"num_of_worker_buffer_in_pool": 0}, "models[0].num_of_worker_buffer_in_pool"),
    ({}, {"num_of_worker_buffer_in_pool": 257}, "models[0].num_of_worker_buffer_in_pool"),
    ({}, {"num_of_refresher_buffer_in_pool": 0}, "models[0].num_of_refresher_buffer_in_pool"),
    ({}, {"gpucacheper": 0.0}, "models[0].gpucacheper"),
    ({}, {"gpucacheper": 1.5}, "models[0].gpucacheper"),
    ({}, {"cache_refresh_percentage_per_iteration": 2.0}, "models[0].cache_refresh_percentage_per_iteration"),
    ({}, {"embedding_cache_type": "stochastic"}, "models[0].embedding_cache_type"),
]


@pytest.mark.parametrize(("block", "model", "where"), ERRORS)
def test_rules_between_keys(block, model, where):
    assert where in found(block, **model)[0]


KAFKA = {"update_source": {"type": "kafka"}}
FOLLOWED = KAFKA | {"volatile_db": {"type": "hash_map", "update_filters": [".+"]}}
WARNINGS = [
    ({"volatile_db": {}, "persistent_db": {"type": "rocks_db"}}, {}, "volatile_db.type"),
    ({"persistent_db": {"path": "/data"}}, {}, "persistent_db.type"),
    ({"update_source": {"brokers": "a:1"}}, {}, "update_source.type"),
    ({"volatile_db": {"type": "redis", "num_node_connections": 1}}, {}, "volatile_db.num_partitions"),
    ({}, {"hit_rate_threshold": 0.9}, "models[0].hit_rate_threshold"),
    ({}, {"cache_refresh_percentage_per_iteration": 0.0}, "models[0].cache_refresh_percentage_per_iteration"),
    ({}, {"cache_refresh_percentage_per_iteration": 1.0}, "models[0].cache_refresh_percentage_per_iteration"),
    ({}, {"init_ec": False}, "models[0].cache_refresh_percentage_per_iteration"),
    ({}, {"embedding_cache_type": "lfu"}, "models[0].embedding_cache_type"),
    ({"volatile_db": {"type": "hash_map", "initial_cache_rate": 0.5}}, {}, "volatile_db.initial_cache_rate"),
    ({"volatile_db": {"type": "redis", "num_partitions": 8, "overflow_margin": 10}}, {}, "volatile_db.overflow_policy"),
    (KAFKA | {"volatile_db": {"type": "hash_map"}}, {}, "volatile_db.update_filters"),
    (KAFKA | {"volatile_db": {"type": "hash_map", "update_filters": ["t0"]}}, {}, "volatile_db.update_filters"),
    (KAFKA | {"persistent_db": {"type": "rocks_db"}}, {}, "persistent_db.update_filters"),
    ({"update_source": {"type": "kafka", "brokers": "a:1;b:2"}}, {}, "update_source.brokers"),
    ({"peristent_db": {"type": "rocks_db"}}, {}, "peristent_db"),
    ({"volatile_db": {"type": "hash_map", "max_get_batch_size": 1}}, {}, "volatile_db.max_get_batch_size"),
    ({"volatile_db": {"type": "hash_map", "refresh_time_after_fetch": True}}, {}, "volatile_db.refresh_time_after_fetch"),
    ({}, {"hit_rate_insert_threshold": 1.0}, "models[0].hit_rate_insert_threshold"),
    ({}, {"db_type": "local"}, "models[0].db_type"),
    ({"volatile_db": {"type": "hash_map", "initialize_after_startup": False}}, {}, "volatile_db.initialize_after_startup"),
    ({"persistent_db": {"type": "rocks_db", "initialize_after_startup": False}}, {}, "persistent_db.initialize_after_startup"),
    ({"persistent_db": {"type": "rocks_db"}}, {}, "persistent_db.path"),
    ({}, {"use_static_table": True}, "models[0].use_static_table"),
    ({}, {"refresh_delay": 2.0}, "models[0].refresh_delay"),
    ({}, {"refresh_interval": 0.5}, "models[0].refresh_interval"),
    ({"fuse_tables": True}, {}, "fuse_tables"),
    (FOLLOWED, {"embedding_cache_type": "static"}, "models[0].embedding_cache_type"),
    (FOLLOWED, {"embedding_cache_type": "uvm"}, "models[0].embedding_cache_type"),
]


@pytest.mark.parametrize(("block", "model", "where"), WARNINGS)
def test_what_quietly_does_something_else(block, model, where):
    stops, quietly = found(block, **model)
    assert stops == []
    assert where in quietly


def test_filters_that_match_are_silent():
    both = {"volatile_db": {"type": "hash_map", "update_filters": [".+"]}}
    assert found(KAFKA | both) == ([], [])


def test_the_two_static_spellings_may_agree():
    assert found(use_static_table=True, embedding_cache_type="static") == ([], [])


def test_tables_without_names_are_no_tables():
    """Parser A counts them, and parser B names all of them "", so the two would look for their rows in different places."""
    _, findings = check_document(document(cache_refresh_percentage_per_iteration=0.2))
    assert "models[0].embedding_table_names" in errors(findings)


@pytest.mark.parametrize("n", [1, 3])
def test_default_values_that_a_pads_or_cuts_stop_the_export(n):
    stops, quietly = found(default_value_for_each_table=[0.5] * n)
    assert "models[0].default_value_for_each_table" in stops
    assert "models[0].default_value_for_each_table" in quietly


@pytest.mark.parametrize(("block", "key"), [("volatile_db", "type"), ("update_source", "type"), ("persistent_db", "type")])
def test_names_that_a_does_not_know_stop_the_export(block, key):
    stops, quietly = found({block: {key: "memcached"}})
    assert f"{block}.{key}" in stops
    assert f"{block}.{key}" in quietly


def test_two_models_of_one_name():
    changed = document(**NAMED)
    changed["models"] *= 2
    _, findings = check_document(changed)
    assert errors(findings) == ["models"]


def test_a_file_without_databases_may_hold_a_static_cache():
    assert found({"volatile_db": {"type": "none"}}, embedding_cache_type="static") == ([], [])
