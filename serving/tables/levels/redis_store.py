"""Store L2 in a Redis cluster that machines share, in HPS's layout: one hash of rows per table and partition."""

from __future__ import annotations

import numpy as np
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import OutOfMemoryError, RedisClusterException, RedisError
from redis.retry import Retry

from serving.contract.errors import DataError, DependencyError, describe_redis_error
from serving.tables.config import RedisConfig
from serving.tables.formats.mixer import compute_partitions
from serving.tables.formats.redis_layout import name_log_hash, name_value_hash
from serving.tables.formats.rows import decode_vectors, encode_keys, encode_vectors
from serving.tables.levels.level import Found
from serving.tables.store.batch import Batch
from serving.tables.store.log_position import PARTITIONS, LogPosition

BEGUN = b"begun"  # a field in the hash of offsets, next to the partitions: this hash has had offsets
FAR = np.iinfo(np.int64).max

# The scripts change rows and offsets atomically. KEYS: the two hashes of a partition, rows and offsets. Machines share Redis,
# and each writes the whole log, so an update that is older than the stored offset changes nothing.
#
# BEGIN. ARGV: partitions of the log, each followed by this writer's offset. They are stored only if Redis has no offsets yet.
# From then on, a partition without an offset counts as unread.
BEGIN = """
if redis.call('HSETNX', KEYS[2], 'begun', 0) == 0 then return end
for i = 1, #ARGV, 2 do redis.call('HSETNX', KEYS[2], ARGV[i], ARGV[i + 1]) end"""
# UPDATE. ARGV: for each partition of the log its number, this writer's offset before and after these rows, the number of rows,
# and the rows. Returns how many partitions lack earlier rows, as after a failover or with an older snapshot. For those nothing
# is written.
UPDATE = """
local lacking, at, begun = 0, 1, redis.call('HEXISTS', KEYS[2], 'begun') == 1
while at <= #ARGV do
  local since, reached, last = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), at + 3 + 2 * tonumber(ARGV[at + 3])
  local log = tonumber(redis.call('HGET', KEYS[2], ARGV[at]) or (begun and 0 or since))
  if since > log then
    lacking = lacking + 1
  elseif reached > log then
    for i = at + 4, last, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
    redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 2])
  end
  at = last + 1
end
return lacking"""
# SET. ARGV: a partition of the log, and the offset to raise it to; 0 marks it as unread.
SET = """
local log, reached = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or 0), tonumber(ARGV[2])
if reached == 0 or reached > log then redis.call('HSET', KEYS[2], ARGV[1], ARGV[2]) end"""
# FILL. ARGV: the number of partitions that this machine's L3 has read; each partition with its offset; then the rows. A machine
# that is behind Redis writes nothing, because its rows may be stale. If Redis has no offsets, an updater must BEGIN first,
# unless there never was an update.
FILL = """
local own, first, log = {}, 2 + 2 * tonumber(ARGV[1]), redis.call('HGETALL', KEYS[2])
for i = 2, first - 1, 2 do own[ARGV[i]] = tonumber(ARGV[i + 1]) end
if #log == 0 and first > 2 then return end
for i = 1, #log, 2 do if tonumber(log[i + 1]) > (own[log[i]] or 0) then return end end
redis.call('HSETNX', KEYS[2], 'begun', 0)
for i = first, #ARGV, 2 do redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) end"""


class NoRoomError(DependencyError):
    """Raised when Redis has reached its maxmemory and does not evict."""


class RedisStore:
    """Rows of one model's tables. widths: table -> values per row

    It connects at its first use. Every failure is a DependencyError.
    """

    def __init__(self, config: RedisConfig, model: str, widths: dict[str, int]) -> None:
        self._config, self._model, self._widths = config, model, widths
        self._cluster: RedisCluster | None = None

    def read(self, reads: dict[str, np.ndarray]) -> tuple[Found, bool]:
        """Return (the rows found, True), in one pipeline for all tables. reads: table -> keys, int64 [N]"""
        parts = [(table, positions) for table, keys in reads.items() for positions in self._group_by_partition(keys)]
        replies = self._run(
            [("HMGET", self._name_hashes(table, reads[table][at])[0], *encode_keys(reads[table][at])) for table, at in parts]
        )
        values: dict[str, list[bytes | None]] = {table: [None] * len(keys) for table, keys in reads.items()}
        for (table, positions), reply in zip(parts, replies, strict=True):
            for position, value in zip(positions.tolist(), reply, strict=True):
                values[table][position] = value
        try:
            return {table: decode_vectors(rows, self._widths[table]) for table, rows in values.items()}, True
        except DataError as error:
            raise DependencyError(f"Redis at {self._config.address} has rows of another shape: {error}") from error

    def begin(self, table: str, reached: LogPosition) -> None:
        """Store the position in the hashes that have none."""
        log = _flatten_offsets(reached)
        self._run([("EVAL", BEGIN, 2, *names, *log) for names in self._name_all_hashes(table)])

    def read_position(self, table: str) -> LogPosition:
        """Return the earliest position of all hashes.

        A hash that never had offsets, or lost them, counts only for the partitions that it names. In other hashes a missing
        partition counts as 0, unread.
        """
        least = LogPosition(np.full(PARTITIONS, FAR))
        for log in self._run([("HGETALL", of_log) for _, of_log in self._name_all_hashes(table)]):
            reached = LogPosition(np.full(PARTITIONS, 0 if BEGUN in log else FAR))
            try:
                for partition, offset in log.items():
                    if partition != BEGUN:
                        reached[int(partition)] = int(offset)
            except (ValueError, IndexError) as error:
                keys = name_log_hash(self._model, table, 0).replace("/p0}log", "/p*}*")
                raise DependencyError(
                    f"Redis at {self._config.address} has offsets of table {table} that cannot be read ({error}). Expected "
                    f"those of this version. Delete the keys {keys}: they are written again."
                ) from error
            least.rewind(reached)
        return least

    def update(self, table: str, batch: Batch, since: LogPosition) -> bool:
        """Write the rows that are newer than the stored position. since: this writer's position before them

        Returns whether Redis lacks earlier rows of some partitions of the log; for those nothing is written.
        """
        rows, reached = batch.latest, batch.reached.to_dict()
        fields, values = encode_keys(rows.keys), encode_vectors(rows.vectors)
        positions_by_part = {
            int(compute_partitions(rows.keys[group[:1]], self._config.num_partitions)[0]): group
            for group in self._group_by_partition(rows.keys)
        }
        commands = []
        for part, names in enumerate(self._name_all_hashes(table)):  # also those without new rows: each stores the offsets
            positions = positions_by_part.get(part, np.empty(0, np.int64))
            arguments: list[bytes | int] = []
            for partition, offset in reached.items():
                of_partition = positions[rows.partitions[positions] == partition]
                log = [partition, since[partition], offset, len(of_partition)]
                arguments += [*log, *_alternate(fields, values, of_partition)]
            commands.append(("EVAL", UPDATE, 2, *names, *arguments))
        return any(self._run(commands))

    def fill(self, table: str, keys: np.ndarray, vectors: np.ndarray, reached: LogPosition) -> bool:
        """Insert rows that Redis lacks. Return False when Redis is full.

        keys: int64 [N]; vectors: float32 [N, D]
        reached: position up to which their source has read the log. If Redis is ahead, nothing is written.
        """
        fields, values, log = encode_keys(keys), encode_vectors(vectors), _flatten_offsets(reached)
        try:
            self._run(
                [
                    ("EVAL", FILL, 2, *self._name_hashes(table, keys[at]), len(log) // 2, *log, *_alternate(fields, values, at))
                    for at in self._group_by_partition(keys)
                ]
            )
        except NoRoomError:
            return False
        return True

    def set_offset(self, table: str, partition: int, reached: int) -> None:
        """Raise the offset of a partition of the log to at least `reached`; 0 resets it, so that all of it is read again."""
        self._run([("EVAL", SET, 2, *names, partition, reached) for names in self._name_all_hashes(table)])

    def _group_by_partition(self, keys: np.ndarray) -> list[np.ndarray]:
        """Return the positions in `keys`, int64 [N], of each Redis partition's keys; partitions without keys are left out."""
        partitions = compute_partitions(keys, self._config.num_partitions)
        order = np.argsort(partitions, kind="stable")
        starts = np.flatnonzero(np.diff(partitions[order], prepend=-1))
        return np.split(order, starts[1:]) if len(keys) else []

    def _name_hashes(self, table: str, keys: np.ndarray) -> tuple[str, str]:
        """Return the names of the two hashes, rows and offsets, of the partition that the keys belong to."""
        partition = int(compute_partitions(keys[:1], self._config.num_partitions)[0])
        return name_value_hash(self._model, table, partition), name_log_hash(self._model, table, partition)

    def _name_all_hashes(self, table: str) -> list[tuple[str, str]]:
        """Return the names of the two hashes, rows and offsets, of every partition."""
        parts = range(self._config.num_partitions)
        return [(name_value_hash(self._model, table, part), name_log_hash(self._model, table, part)) for part in parts]

    def _run(self, commands: list[tuple]) -> list:
        """Return the replies to commands, sent in one pipeline. Raises NoRoomError or DependencyError."""
        try:
            cluster = self._cluster or self._connect()
            self._cluster = cluster
            pipeline = cluster.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return pipeline.execute()
        except OutOfMemoryError as error:
            raise NoRoomError(
                f"Redis at {self._config.address} is full. Expected memory for the tables' rows below maxmemory. "
                "Raise maxmemory, or set maxmemory-policy allkeys-lru."
            ) from error
        except (RedisError, RedisClusterException, OSError) as error:
            self._cluster = None
            raise DependencyError(
                f"Redis at {self._config.address} did not answer ({describe_redis_error(error)}). Expected a cluster "
                f"that replies within {self._config.timeout_ms} ms. Check that it runs with cluster-enabled yes; rows come "
                "from L3 meanwhile."
            ) from error

    def _connect(self) -> RedisCluster:
        timeout_s = self._config.timeout_ms / 1e3
        return RedisCluster(
            startup_nodes=[ClusterNode(host, int(port)) for host, port in self._config.nodes],
            username=self._config.user_name if self._config.password else None,
            password=self._config.password or None,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )

    def close(self) -> None:
        """Release the connections, once a call in another thread has finished."""
        self._cluster = None


def _flatten_offsets(reached: LogPosition) -> list[int]:
    """Return partition, offset, partition, offset, … of the partitions that have an offset."""
    return [number for pair in reached.to_dict().items() for number in pair]


def _alternate(fields: list[bytes], values: list[bytes], positions: np.ndarray) -> list[bytes]:
    """Return field, value, field, value, … at these positions, int64 [M]."""
    return [part for i in positions.tolist() for part in (fields[i], values[i])]
