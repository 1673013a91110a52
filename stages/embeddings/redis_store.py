"""L2 in a Redis cluster, shared by many machines, in HPS's own layout: one hash of rows per table and partition."""

from __future__ import annotations

import numpy as np
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import RedisClusterException, RedisError
from redis.retry import Retry

from stages.embeddings.config import RedisConfig
from stages.embeddings.formats.mixer import partition_of
from stages.embeddings.formats.redis_layout import value_hash
from stages.embeddings.formats.rows import decode_vectors, encode_keys, encode_vectors
from stages.embeddings.level import Found
from stages.errors import DataError, DependencyError

# One command for all rows of a partition: a command for each takes a client a quarter of a millisecond
SET_ABSENT = "for i = 1, #ARGV, 2 do redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) end"


class RedisStore:
    """Rows of one model's tables, `widths` values each. Connects when first used; every failure is a DependencyError."""

    def __init__(self, config: RedisConfig, model: str, widths: dict[str, int]) -> None:
        self._config, self._model, self._widths = config, model, widths
        self._cluster: RedisCluster | None = None

    def read(self, wanted: dict[str, np.ndarray]) -> tuple[Found, bool]:
        """{table: int64 [N] keys} -> ({table: (float32 [N, D], bool [N] found)}, True): one pipeline for all tables."""
        parts = [(table, positions) for table, keys in wanted.items() for positions in self._by_partition(keys)]
        replies = self._run(
            [("HMGET", self._hash(table, wanted[table][at]), *encode_keys(wanted[table][at])) for table, at in parts]
        )
        values: dict[str, list[bytes | None]] = {table: [None] * len(keys) for table, keys in wanted.items()}
        for (table, positions), reply in zip(parts, replies, strict=True):
            for position, value in zip(positions.tolist(), reply, strict=True):
                values[table][position] = value
        try:
            return {table: decode_vectors(rows, self._widths[table]) for table, rows in values.items()}, True
        except DataError as error:
            raise DependencyError(f"Redis at {self._config.address} holds rows of another shape: {error}") from error

    def write(self, table: str, keys: np.ndarray, vectors: np.ndarray, only_absent: bool = False) -> None:
        """int64 [N], float32 [N, D]. `only_absent` leaves rows alone that are there."""
        fields, values = encode_keys(keys), encode_vectors(vectors)
        commands: list[tuple] = []
        for positions in self._by_partition(keys):
            name = self._hash(table, keys[positions])
            pairs = [part for i in positions.tolist() for part in (fields[i], values[i])]
            commands.append(("EVAL", SET_ABSENT, 1, name, *pairs) if only_absent else ("HSET", name, *pairs))
        self._run(commands)

    def _by_partition(self, keys: np.ndarray) -> list[np.ndarray]:
        """Positions of the keys of each partition that has any."""
        partitions = partition_of(keys, self._config.num_partitions)
        order = np.argsort(partitions, kind="stable")
        starts = np.flatnonzero(np.diff(partitions[order], prepend=-1))
        return np.split(order, starts[1:]) if len(keys) else []

    def _hash(self, table: str, keys: np.ndarray) -> str:
        """The hash that keys of one partition lie in."""
        return value_hash(self._model, table, int(partition_of(keys[:1], self._config.num_partitions)[0]))

    def _run(self, commands: list[tuple]) -> list:
        try:
            cluster = self._cluster or self._connect()
            self._cluster = cluster
            pipeline = cluster.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return pipeline.execute()
        except (RedisError, RedisClusterException, OSError) as error:
            self._cluster = None
            raise DependencyError(
                f"Redis at {self._config.address} did not answer ({error!r}). Expected a cluster that replies within "
                f"{self._config.timeout_ms} ms. Check that it runs with cluster-enabled yes; rows come from L3 meanwhile."
            ) from error

    def _connect(self) -> RedisCluster:
        places = [address.strip().rsplit(":", 1) for address in self._config.address.split(",")]
        timeout_s = self._config.timeout_ms / 1e3
        return RedisCluster(
            startup_nodes=[ClusterNode(host, int(port)) for host, port in places],
            username=self._config.user_name if self._config.password else None,
            password=self._config.password or None,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )

    def close(self) -> None:
        """Let the connections go; another thread may be in the middle of a call, and finishes it."""
        self._cluster = None
