"""The typed content of a ps.json. These dataclasses are also the schema of `parsers.py`.

A field's default is what parser A (HPS's library: databases, caches) uses when the key is absent. `a` and `b` say how each of
NVIDIA's two parsers treats the key: REQUIRED, OPTIONAL, CACHED (required when `gpucache` is on) or UNREAD. Parser B is the
Triton backend (instances and lookup sessions). `b_absent` is the value that it uses when the key is absent, if it differs from
A's; `b_unknown` is the value that it uses for an unknown name, if it does not stop.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from typing import Any

from serving.contract.errors import ConfigError

REQUIRED, OPTIONAL, CACHED, UNREAD = "required", "optional", "required with gpucache", "unread"
NO_MARGIN = 2**64 - 1
DEFAULT_PARTITIONS = min(16, os.cpu_count() or 1)  # HPS's own rule: machines may differ

# canonical name -> accepted spellings
VOLATILE_TYPES = {
    "disabled": ("disabled", "disable", "none"),
    "hash_map": ("hash_map", "hashmap", "hash", "map"),
    "parallel_hash_map": ("parallel_hash_map", "parallel_hashmap", "parallel_hash", "parallel_map"),
    "multi_process_hash_map": (
        "multi_process_hash_map",
        "multi_process_hashmap",
        "multi_process_hash",
        "multi_process_map",
    ),
    "redis_cluster": ("redis_cluster", "redis"),
}
PERSISTENT_TYPES = {"disabled": ("disabled", "disable", "none"), "rocks_db": ("rocks_db", "rocksdb", "rocks")}
SOURCE_TYPES = {"null": ("null", "none"), "kafka_message_queue": ("kafka_message_queue", "kafka_mq", "kafka")}
OVERFLOW_POLICIES = {
    "evict_random": ("evict_random", "random"),
    "evict_least_used": ("evict_least_used", "least_used"),
    "evict_oldest": ("evict_oldest", "oldest"),
}
CACHE_TYPES = {name: (name,) for name in ("dynamic", "static", "uvm", "stochastic")}
UNKNOWN_TO_B = ("multi_process_hash_map",)
_FILTERS_THAT_NEVER_MATCH = ("^hps_.+$",)


def key(default: Any, a: str = OPTIONAL, b: str = OPTIONAL, **more: Any) -> Any:
    """Return a field with its treatment by the two parsers; `more` may give `b_absent` and `names` (an enumeration)."""
    return field(default=default, metadata={"a": a, "b": b, **more})


@dataclass(frozen=True)
class VolatileDb:
    """L2. An absent object means a parallel hash map; an object without `type` means disabled."""

    type: str = key("disabled", names=VOLATILE_TYPES, b_absent="parallel_hash_map")
    address: str = key("127.0.0.1:7000")  # Redis: host:port, first entry of a comma list
    user_name: str = key("default")
    password: str = key("")
    num_partitions: int = key(DEFAULT_PARTITIONS)
    num_node_connections: int = key(5)
    allocation_rate: int = key(268435456)
    shared_memory_size: int = key(17179869184)
    shared_memory_name: str = key("hctr_mp_hash_map_database")
    shared_memory_auto_remove: bool = key(True)
    max_batch_size: int = key(65536)
    enable_tls: bool = key(False)
    tls_ca_certificate: str = key("cacertbundle.crt")
    tls_client_certificate: str = key("client_cert.pem")
    tls_client_key: str = key("client_key.pem")
    tls_server_name_identification: str = key("redis.localhost")
    overflow_margin: int = key(NO_MARGIN)  # rows per partition
    overflow_policy: str = key("evict_random", names=OVERFLOW_POLICIES)
    overflow_resolution_target: float = key(0.8)
    initial_cache_rate: float = key(1.0)  # no effect: all rows are inserted
    cache_missed_embeddings: bool = key(False)
    update_filters: tuple[str, ...] = key(_FILTERS_THAT_NEVER_MATCH, b_absent=())


@dataclass(frozen=True)
class PersistentDb:
    """L3."""

    type: str = key("disabled", names=PERSISTENT_TYPES)
    path: str = key(f"{tempfile.gettempdir()}/rocksdb")
    num_threads: int = key(16)
    read_only: bool = key(False)
    max_batch_size: int = key(65536)
    update_filters: tuple[str, ...] = key(_FILTERS_THAT_NEVER_MATCH, b_absent=())


@dataclass(frozen=True)
class UpdateSource:
    """The source of live updates."""

    type: str = key("null", names=SOURCE_TYPES)
    brokers: str = key("127.0.0.1:9092")  # comma list, as librdkafka takes it
    metadata_refresh_interval_ms: int = key(30000)
    receive_buffer_size: int = key(262144)
    poll_timeout_ms: int = key(500)
    max_batch_size: int = key(8192)
    failure_backoff_ms: int = key(50)
    max_commit_interval: int = key(32)


@dataclass(frozen=True)
class ModelParams:
    """One entry of `models`; lists have one value per table."""

    model: str = key("", b=REQUIRED)
    sparse_files: tuple[str, ...] = key((), REQUIRED, REQUIRED)
    max_batch_size: int = key(64, b=REQUIRED)
    embedding_table_names: tuple[str, ...] = key((), b_absent=("",))  # A: sparse_embedding0, …1, … when absent
    embedding_vecsize_per_table: tuple[int, ...] = key((), REQUIRED, REQUIRED)
    maxnum_catfeature_query_per_table_per_sample: tuple[int, ...] = key((), REQUIRED, REQUIRED)
    default_value_for_each_table: tuple[float, ...] = key((), REQUIRED, REQUIRED)
    deployed_device_list: tuple[int, ...] = key((), REQUIRED, REQUIRED)
    gpucache: bool = key(True, b=REQUIRED)
    hit_rate_threshold: float = key(0.9, b=CACHED)
    gpucacheper: float = key(0.2, b=CACHED)
    num_of_worker_buffer_in_pool: int = key(1, b=REQUIRED)
    num_of_refresher_buffer_in_pool: int = key(1)
    cache_refresh_percentage_per_iteration: float = key(0.0)
    init_ec: bool = key(True)
    embedding_cache_type: str = key("dynamic", names=CACHE_TYPES, b_unknown="dynamic")
    use_static_table: bool = key(False, b=UNREAD)
    fuse_embedding_table: bool | None = key(None, b=UNREAD)  # None: the top level's value
    refresh_delay: float = key(0.0, b=UNREAD)
    refresh_interval: int = key(0, b=UNREAD)  # A reads an integer: 0.5 becomes 0
    maxnum_des_feature_per_sample: int = key(26)
    dense_file: str = key("")
    network_file: str = key("", a=UNREAD)
    label_dim: int = key(1, a=UNREAD)
    slot_num: int = key(10, a=UNREAD)
    thread_pool_size: int = key(16, b=UNREAD)
    use_hctr_cache_implementation: bool = key(True, b=UNREAD)
    use_context_stream: bool = key(True, b=UNREAD)
    enable_pagelock: bool = key(False)
    fp8_quant: bool = key(False)
    row_format_per_table: tuple[str, ...] = key((), UNREAD, UNREAD)  # ours: NVIDIA's parsers ignore it; absent: fp32

    @property
    def exact(self) -> bool:
        """Whether requests wait for every miss, so that they never get a default vector for a key that a database holds."""
        return not self.gpucache or self.hit_rate_threshold >= 1.0

    @property
    def prefilled(self) -> bool:
        """Whether the cache is filled from the start of the sparse files before the first request.

        HPS leaves the last step to the requests (init_ec), so with a share of 1 it would fill nothing.
        """
        return self.gpucache and self.init_ec and 0 < self.cache_refresh_percentage_per_iteration < 1


@dataclass(frozen=True)
class PsConfig:
    """A whole ps.json."""

    supportlonglong: bool = key(True, REQUIRED, REQUIRED)
    fuse_embedding_table: bool = key(False, b=UNREAD)
    volatile_db: VolatileDb = key(VolatileDb(type="parallel_hash_map"))  # noqa: RUF009 - key() is field()
    persistent_db: PersistentDb = key(PersistentDb())  # noqa: RUF009
    update_source: UpdateSource = key(UpdateSource())  # noqa: RUF009
    models: tuple[ModelParams, ...] = key((), REQUIRED, REQUIRED)

    def find_model(self, name: str) -> ModelParams:
        """Return the entry of one model. Raises ConfigError with the existing ones."""
        for params in self.models:
            if params.model == name:
                return params
        existing = ", ".join(params.model for params in self.models)
        raise ConfigError(f"ps.json has no model {name!r}. It has: {existing}. Give the Triton model one of these names.")
