"""Find faults in a ps.json that both parsers accept: rules between keys, and keys that neither parser reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

from hps_config.parsers import BLOCKS
from hps_config.ps_config import NO_MARGIN, PERSISTENT_TYPES, VOLATILE_TYPES, ModelParams, PsConfig, VolatileDb
from hps_config.tables import ROW_FORMATS
from repository.checks.finding import Finding, make_finding
from serving.tables.formats.kafka import is_subscribed
from serving.tables.formats.names import NAME

PER_TABLE = (
    "embedding_table_names",
    "embedding_vecsize_per_table",
    "maxnum_catfeature_query_per_table_per_sample",
    "default_value_for_each_table",
    "row_format_per_table",
)
MAX_REDIS_BATCH = 262_143
MAX_WORKER_BUFFERS = 256
MIN_RECEIVE_BUFFER = 1024
DATABASE_FREE_CACHES = ("static", "uvm")  # read the sparse files themselves; databases stay empty


def check_keys_present(document: dict) -> list[Finding]:
    """Return keys that neither parser reads (misspelled, or from old samples), and missing keys that should be written out."""
    top = {schema.name for schema in fields(PsConfig)}
    findings = [
        *_find_unknown(document, top, ""),
        *_check_partitions_stated(document.get("volatile_db")),
        *_check_path_stated(document.get("persistent_db")),
    ]
    for name, block in BLOCKS.items():
        if isinstance(document.get(name), dict):
            if "type" not in document[name]:
                findings.append(
                    _make_warning(f"{name}.type", "is missing, which disables it. Expected the kind. Write its type.")
                )
            findings += _find_unknown(document[name], {schema.name for schema in fields(block)}, f"{name}.")
    models = document.get("models")
    known = {schema.name for schema in fields(ModelParams)}
    for i, model in enumerate(models if isinstance(models, list) else []):
        if isinstance(model, dict):
            findings += _find_unknown(model, known, f"models[{i}].")
    return findings


def _check_path_stated(persistent_db: object) -> Iterator[Finding]:
    if not isinstance(persistent_db, dict) or "path" in persistent_db:
        return
    if persistent_db.get("type") in PERSISTENT_TYPES["rocks_db"]:
        yield _make_warning(
            "persistent_db.path",
            "is missing: RocksDB would be in the folder for temporary files. Expected a folder that survives a restart of the "
            "machine. Write it.",
        )


def _check_partitions_stated(volatile_db: object) -> Iterator[Finding]:
    if not isinstance(volatile_db, dict) or "num_partitions" in volatile_db:
        return
    if volatile_db.get("type") in VOLATILE_TYPES["redis_cluster"]:
        yield _make_warning(
            "volatile_db.num_partitions",
            "is missing: HPS takes 16 or the machine's threads, so machines may look for the same row in different places. "
            "Expected the number the rows were written with. Write it.",
        )


def _find_unknown(document: dict, known: set[str], prefix: str) -> Iterator[Finding]:
    for name in document:
        if name not in known:
            yield _make_warning(
                f"{prefix}{name}", "is read by neither parser. Expected a key of HPS. Correct the spelling or remove it."
            )


def check_config(config: PsConfig) -> list[Finding]:
    """Check the rules between the keys of a whole file."""
    return [
        *_check_top(config),
        *_check_volatile(config.volatile_db),
        *_check_updates(config),
        *(finding for i, model in enumerate(config.models) for finding in _check_model(config, model, f"models[{i}]")),
    ]


def _make_error(where: str, message: str) -> Finding:
    return make_finding("error", where, message, "both")


def _make_warning(where: str, message: str) -> Finding:
    return make_finding("warning", where, message, "both")


def _check_top(config: PsConfig) -> Iterator[Finding]:
    if not config.supportlonglong:
        yield _make_error("supportlonglong", "is false. The hps backend takes INT64 keys only. Set it to true.")
    if config.fuse_embedding_table:
        yield _make_error(
            "fuse_embedding_table", "is true. The hps backend disagrees with fused caches and throws. Set it to false."
        )
    names = [model.model for model in config.models]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield _make_error("models", f"names {name!r} more than once. Expected unique names. Merge or rename the entries.")


def _check_volatile(db: VolatileDb) -> Iterator[Finding]:
    if db.num_partitions < 1:
        yield _make_error("volatile_db.num_partitions", f"is {db.num_partitions}. Expected at least 1. Raise it.")
    if db.type == "redis_cluster":
        if db.num_partitions < db.num_node_connections:
            yield _make_error(
                "volatile_db.num_partitions",
                f"is {db.num_partitions} with {db.num_node_connections} node connections. Expected as many partitions or more. "
                "Raise num_partitions before the first row is written; it cannot change afterwards.",
            )
        if db.max_batch_size > MAX_REDIS_BATCH:
            yield _make_error(
                "volatile_db.max_batch_size",
                f"is {db.max_batch_size}. Redis takes at most {MAX_REDIS_BATCH} fields per command. Lower it.",
            )
        if without := [address for address in db.address.split(",") if ":" not in address]:
            yield _make_error("volatile_db.address", f"has {without[0]!r}. Expected host:port. Add the port.")
        if db.overflow_margin != NO_MARGIN and db.overflow_policy == "evict_random":
            yield _make_warning(
                "volatile_db.overflow_policy",
                "is evict_random with a margin. Random eviction finds nothing to evict in Redis. Use evict_least_used.",
            )
    if db.initial_cache_rate != 1.0:
        yield _make_warning("volatile_db.initial_cache_rate", "changes only a log line: all rows are inserted. Remove it.")


def _check_updates(config: PsConfig) -> Iterator[Finding]:
    source = config.update_source
    if source.type == "null":
        return
    if source.receive_buffer_size < MIN_RECEIVE_BUFFER:
        yield _make_error(
            "update_source.receive_buffer_size",
            f"is {source.receive_buffer_size}. Expected at least {MIN_RECEIVE_BUFFER}. Raise it to the largest message.",
        )
    if ";" in source.brokers:
        yield _make_warning("update_source.brokers", "has semicolons. librdkafka takes commas. Separate brokers by commas.")
    for name, db in (("volatile_db", config.volatile_db), ("persistent_db", config.persistent_db)):
        if broken := [update_filter for update_filter in db.update_filters if not _is_regular_expression(update_filter)]:
            yield _make_error(f"{name}.update_filters", f"has {broken[0]!r}. Expected regular expressions. Correct it.")
            continue
        missed = [model.model for model in config.models if not _matches_updates(db.update_filters, model)]
        if db.type != "disabled" and missed:
            yield _make_warning(
                f"{name}.update_filters",
                f"is {list(db.update_filters)}, which matches no update of {', '.join(missed)} (filters are matched "
                'against the model name). Expected each model to be matched. Write [".+"].',
            )


def _is_regular_expression(update_filter: str) -> bool:
    try:
        is_subscribed([update_filter], "any", "any")
    except re.error:
        return False
    return True


def _matches_updates(update_filters: tuple[str, ...], model: ModelParams) -> bool:
    return bool(NAME.fullmatch(model.model)) and is_subscribed(list(update_filters), model.model, "any")


def _check_model(config: PsConfig, model: ModelParams, where: str) -> Iterator[Finding]:
    yield from _check_names(model, where)
    yield from _check_tables(model, where)
    yield from _check_devices(model, where)
    yield from _check_cache(config, model, where)
    no_database = config.volatile_db.type == config.persistent_db.type == "disabled"
    if no_database and model.embedding_cache_type not in DATABASE_FREE_CACHES:
        yield _make_error(
            where,
            "has no database: volatile_db and persistent_db are disabled, so every miss gets the default vector. Enable one.",
        )


def _check_names(model: ModelParams, where: str) -> Iterator[Finding]:
    if not NAME.fullmatch(model.model):
        yield _make_error(f"{where}.model", f"is {model.model!r}. Expected 1 to 120 of A-Z a-z 0-9 _ -. Rename the model.")
    for table in model.embedding_table_names:
        if not NAME.fullmatch(table):
            yield _make_error(
                f"{where}.embedding_table_names",
                f"has {table!r}. Expected 1 to 120 of A-Z a-z 0-9 _ -, written out for each table. Name the tables.",
            )
    repeated = sorted({name for name in model.embedding_table_names if model.embedding_table_names.count(name) > 1})
    if repeated:
        yield _make_error(
            f"{where}.embedding_table_names",
            f"repeats {', '.join(repeated)}. Tables would share their rows. Expected unique names.",
        )


def _check_tables(model: ModelParams, where: str) -> Iterator[Finding]:
    n_tables = len(model.sparse_files)
    if not n_tables:
        yield _make_error(f"{where}.sparse_files", "is empty. Expected one folder per table. List the folders.")
    for name in PER_TABLE:
        values = getattr(model, name)
        if len(values) != n_tables:
            yield _make_error(
                f"{where}.{name}",
                f"has {len(values)} values for {n_tables} sparse files. Expected {n_tables}. Write one per table.",
            )
    for name in ("embedding_vecsize_per_table", "maxnum_catfeature_query_per_table_per_sample"):
        if any(value < 1 for value in getattr(model, name)):
            yield _make_error(f"{where}.{name}", f"is {list(getattr(model, name))}. Expected values of at least 1. Correct it.")
    if any(row_format not in ROW_FORMATS for row_format in model.row_format_per_table):
        formats = ", ".join(ROW_FORMATS)
        yield _make_error(
            f"{where}.row_format_per_table", f"is {list(model.row_format_per_table)}. Expected each of {formats}. Correct it."
        )


def _check_devices(model: ModelParams, where: str) -> Iterator[Finding]:
    if not model.deployed_device_list:
        yield _make_error(f"{where}.deployed_device_list", "is empty. Expected GPU ids. Write [0].")
    elif (least := min(model.deployed_device_list)) < 0:
        yield _make_error(f"{where}.deployed_device_list", f"has {least}. Expected GPU ids of at least 0. Write [0].")
    elif not model.gpucache and 0 not in model.deployed_device_list:
        yield _make_error(f"{where}.deployed_device_list", "lacks device 0, which is needed when gpucache is false. Add 0.")
    if not 1 <= model.num_of_worker_buffer_in_pool <= MAX_WORKER_BUFFERS:
        yield _make_error(
            f"{where}.num_of_worker_buffer_in_pool",
            f"is {model.num_of_worker_buffer_in_pool}. Expected the instance count, 1 to {MAX_WORKER_BUFFERS}. Correct it.",
        )
    if model.num_of_refresher_buffer_in_pool < 1:
        yield _make_error(
            f"{where}.num_of_refresher_buffer_in_pool", "is 0: a refresh would spin for ever. Expected at least 1. Write 1."
        )


def _check_cache(config: PsConfig, model: ModelParams, where: str) -> Iterator[Finding]:
    if not model.gpucache:
        return
    if model.use_static_table and model.embedding_cache_type != "static":
        yield _make_warning(
            f"{where}.use_static_table",
            f"is true, which only parser A reads; B serves a {model.embedding_cache_type} cache. Expected the same in both. "
            "Write embedding_cache_type instead.",
        )
    if model.refresh_delay:
        yield _make_warning(
            f"{where}.refresh_delay",
            f"is {model.refresh_delay}, which the hps backend ignores. Expected 0. Remove it.",
        )
    if model.embedding_cache_type == "stochastic":
        yield _make_error(
            f"{where}.embedding_cache_type",
            "is stochastic. HPS fills its databases for dynamic only, so every row that is not cached would be the default "
            "vector. Write dynamic.",
        )
    if config.update_source.type != "null" and model.embedding_cache_type in DATABASE_FREE_CACHES:
        yield _make_warning(
            f"{where}.embedding_cache_type",
            f"is {model.embedding_cache_type}, which reads the files once and gets no updates. Expected dynamic where "
            "ps.json has an update_source. Change one of them.",
        )
    if not 0 < model.gpucacheper <= 1:
        yield _make_error(f"{where}.gpucacheper", f"is {model.gpucacheper}. Expected a share above 0, at most 1. Correct it.")
    if not 0 <= model.cache_refresh_percentage_per_iteration <= 1:
        yield _make_error(
            f"{where}.cache_refresh_percentage_per_iteration",
            f"is {model.cache_refresh_percentage_per_iteration}. Expected a share from 0 to 1. Correct it.",
        )
    if not model.prefilled:
        yield _make_warning(
            f"{where}.cache_refresh_percentage_per_iteration",
            f"is {model.cache_refresh_percentage_per_iteration} with init_ec {model.init_ec}: the cache starts empty. "
            "Expected above 0 and below 1 with init_ec true for a warm start. Set both.",
        )
    if not model.exact:
        yield _make_warning(
            f"{where}.hit_rate_threshold",
            f"is {model.hit_rate_threshold}: a request with at least that hit rate gets default vectors for its misses. "
            "Expected above 1 where answers must be exact. Raise it, or account for the defaults.",
        )
