"""Convert ps.json to the settings of our own levels: one file configures NVIDIA's `hps` backend and our levels alike.

gpucache, gpucacheper      ─▶ L1 rows per process        volatile_db    ─▶ L2: shared memory, or Redis
hit_rate_threshold         ─▶ the same                   persistent_db  ─▶ L3: RocksDB
row_format_per_table       ─▶ rows of L2                 update_source  ─▶ Kafka
"""

from __future__ import annotations

from collections.abc import Mapping

from hps_config.memory import compute_l1_rows
from hps_config.ps_config import ModelParams, PsConfig, UpdateSource, VolatileDb
from serving.contract.errors import ConfigError
from serving.tables.config import LevelsConfig, RedisConfig, RocksConfig, TableConfig, UpdateConfig


def convert_levels(
    config: PsConfig, model: str, arena: str, table_rows: Mapping[str, int], source: str | None = None
) -> LevelsConfig:
    """Convert one model of a ps.json to the settings of our levels.

    table_rows: table -> number of rows, whose keys are 0 … rows - 1
    source: folder of <table>.npy that fills an empty L3

    Raises ConfigError for unknown models, tables without a row count, and a Redis over TLS.
    """
    params = config.find_model(model)
    lacking = [table for table in params.embedding_table_names if table not in table_rows]
    if lacking:
        raise ConfigError(
            f"tables {', '.join(lacking)} of {model} have no row count. Expected one per table. Count their rows."
        )
    volatile, persistent = config.volatile_db, config.persistent_db
    return LevelsConfig(
        model=model,
        tables=tuple(_convert_table(config, params, i, table_rows) for i in range(len(params.embedding_table_names))),
        arena=arena,
        hit_rate_threshold=params.hit_rate_threshold,
        redis=_convert_redis(volatile) if volatile.type == "redis_cluster" else None,
        rocksdb=RocksConfig(persistent.path, persistent.num_threads, read_only=persistent.read_only)
        if persistent.type == "rocks_db"
        else None,
        updates=_convert_updates(config.update_source, config) if config.update_source.type != "null" else None,
        source=source,
    )


def _convert_table(config: PsConfig, params: ModelParams, i: int, table_rows: Mapping[str, int]) -> TableConfig:
    """Return one table's settings. A table that L2 holds whole has no L1: shared rows are as fast (store/side_by_side.py)."""
    name = params.embedding_table_names[i]
    rows = table_rows[name]
    l2_rows = _count_l2_rows(config.volatile_db, rows)
    return TableConfig(
        name,
        rows,
        params.embedding_vecsize_per_table[i],
        params.row_format_per_table[i],
        l1_rows=min(compute_l1_rows(rows, params.gpucacheper), rows) if params.gpucache and l2_rows < rows else 0,
        l2_rows=l2_rows,
        default=params.default_value_for_each_table[i],
    )


def _count_l2_rows(volatile: VolatileDb, rows: int) -> int:
    """Return the rows of a table in shared memory: 0 when Redis is L2 or L2 is off."""
    if volatile.type in ("disabled", "redis_cluster"):
        return 0
    return min(rows, volatile.overflow_margin * volatile.num_partitions)


def _convert_redis(volatile: VolatileDb) -> RedisConfig:
    if volatile.enable_tls:
        raise ConfigError(
            "ps.json asks for Redis over TLS (enable_tls), which our levels do not support. Expected enable_tls false. Put "
            "a TLS tunnel between, or serve the rank stage by HPS."
        )
    return RedisConfig(volatile.address, volatile.num_partitions, volatile.user_name, volatile.password)


def _convert_updates(source: UpdateSource, config: PsConfig) -> UpdateConfig:
    """Return the update source: one consumer feeds all levels, so it follows the topics of both databases."""
    databases = (config.volatile_db, config.persistent_db)
    followed = dict.fromkeys(f for database in databases if database.type != "disabled" for f in database.update_filters)
    return UpdateConfig(
        brokers=source.brokers,
        update_filters=tuple(followed),
        max_batch_size=source.max_batch_size,
        max_commit_interval=source.max_commit_interval,
    )
