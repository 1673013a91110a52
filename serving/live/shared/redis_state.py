"""The state of users and items in a Redis cluster that many machines share, in Feast's layout (feast_views.py).

    hash of a user or item   the features, and beside them, which Feast ignores:
        _version             counts our changes; a change is made only to the version that was read
        _log:<source>        offset up to which this hash has the events of a log: a machine's, or a partition of a Kafka topic
    hash of the project      machine -> Position of its log
    hashes of marks          machine -> 1; one in each MARKS-th of the slots. Where one is missing, a node has lost its data

Applying an event again changes nothing (it is idempotent), because each hash knows its offset in each log.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, OutOfMemoryError, RedisClusterException, RedisError, ResponseError
from redis.retry import Retry

from serving.contract.errors import DependencyError, describe_redis_error
from serving.live.shared.feast_layout import make_entity_key
from serving.live.shared.feast_views import View

PASSWORD = "LIVE_REDIS_PASSWORD"  # environment variable, as is LIVE_REDIS_USER
TIMEOUT_S = 0.05  # for a node that does not answer a request
PATIENT_S = 2.0  # for sharing and erasing, which no request waits for
PAUSE_S = 1.0  # after a failure, without a call (circuit breaker)
MARKS = 64  # more than a cluster has nodes, so that each node has some
VERSION = b"_version"
WRONG_TYPE = "WRONGTYPE"  # code of the error about a key that is no hash
# KEYS: a hash. ARGV: its version and its event time as they were read, seconds until it expires or 0; then fields and values.
# Returns whether it was changed.
CHANGE = """
if (redis.call('HGET', KEYS[1], '_version') or '') ~= ARGV[1] then return 0 end
if (redis.call('HGET', KEYS[1], ARGV[2]) or '') ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 5))
redis.call('HINCRBY', KEYS[1], '_version', 1)
if tonumber(ARGV[4]) > 0 then redis.call('EXPIRE', KEYS[1], ARGV[4]) end
return 1"""

Command = tuple[bytes | str | int, ...]


class Position(NamedTuple):
    """The position of a machine's log, and how much of it the shared state holds. Times are unix milliseconds."""

    shared_sequence: int
    latest_ms: int
    watermark_ms: int
    first_ms: int

    def pack(self) -> bytes:
        return " ".join(map(str, self)).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> Position:
        return cls(*map(int, packed.split()))


class Entity(NamedTuple):
    """A user or an item as it was read.

    offsets: in the requested logs, 0 where the hash has no event of a log
    fault: why the key cannot be read, "" if it can; an entity with a fault has no values
    """

    values: dict
    version: bytes
    time: bytes
    offsets: list[int]
    fault: str = ""


@dataclass
class RedisState:
    """A client of the cluster. It connects at its first use. A failure raises DependencyError, as do calls soon after it."""

    addresses: str  # "host:port,…"
    project: str
    timeout_s: float = TIMEOUT_S
    _cluster: RedisCluster | None = field(default=None, init=False, repr=False)
    _closed_until_s: float = field(default=0.0, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def positions_key(self) -> bytes:
        return f"recommender_live:{self.project}".encode()

    def read_positions(self) -> dict[str, Position]:
        """Return the position of each machine's log. Raises DependencyError, also for one that cannot be read."""
        (stored,) = self.run([("HGETALL", self.positions_key)])
        try:
            return {machine.decode(): Position.unpack(packed) for machine, packed in stored.items()}
        except (TypeError, ValueError) as error:
            raise DependencyError(
                f"Redis at {self.addresses} holds a machine's position that cannot be read ({error}). Expected positions of "
                "this version. Serve the same version on all machines, and remove the key "
                f"{self.positions_key.decode()}: each machine writes its position again."
            ) from error

    def write_position(self, machine: str, position: Position) -> None:
        self.run([("HSET", self.positions_key, machine, position.pack())])

    @cached_property
    def mark_keys(self) -> list[str]:
        """The keys of the marks, one in each range of slots."""
        tags: dict[int, str] = {}
        for tag in map(str, itertools.count()):
            tags.setdefault(key_slot(tag.encode()) * MARKS // REDIS_CLUSTER_HASH_SLOTS, tag)
            if len(tags) == MARKS:
                return [f"recommender_live:{{{tag}}}:{self.project}" for tag in tags.values()]
        raise AssertionError  # the count has no end

    def find_marked(self, machines: Sequence[str]) -> set[str]:
        """Return the machines whose position and marks are all left: no node has lost its data since `write_marks`."""
        keys: list[bytes | str] = [self.positions_key, *self.mark_keys]
        replies = self.run([("HMGET", key, *machines) for key in keys])
        return {machine for machine, marks in zip(machines, zip(*replies, strict=True), strict=True) if None not in marks}

    def write_marks(self, machine: str) -> None:
        self.run([("HSET", key, machine, 1) for key in self.mark_keys])

    def read(self, view: View, ids: np.ndarray, sources: Sequence[str] = ()) -> list[Entity]:
        """Return the entities with these ids, int64 [N], also those whose keys cannot be read. sources: wanted logs' offsets"""
        fields = [*view.fields, view.time_field, VERSION, *(make_offset_field(source) for source in sources)]
        rows = self._run_each([("HMGET", self.make_key(view, entity_id), *fields) for entity_id in ids.tolist()])
        return [make_entity(view, row) for row in rows]

    def change(
        self,
        view: View,
        ids: np.ndarray,
        entities: Sequence[Entity],
        fields: Iterable[Sequence[tuple[bytes, bytes]]],
        ttls_s: Sequence[int],
    ) -> np.ndarray:
        """Write fields of entities that nobody has changed since they were read. Return which were written, bool [N].

        ttls_s: seconds until each expires, 0 for never
        """
        commands: list[Command] = []
        for entity_id, entity, pairs, ttl_s in zip(ids.tolist(), entities, fields, ttls_s, strict=True):
            flat = [part for pair in pairs for part in pair]
            guard = (entity.version, view.time_field, entity.time, ttl_s)
            commands.append(("EVAL", CHANGE, 1, self.make_key(view, entity_id), *guard, *flat))
        replies = self._run_each(commands)
        return np.array([reply == 1 for reply in replies])  # a key that is no hash any more is not written

    def delete(self, view: View, entity_id: int) -> int:
        """Remove an entity with all its features, whoever wrote them. Return how many fields it had, 1 if it was no hash."""
        key = self.make_key(view, entity_id)
        count, _ = self._run_each([("HLEN", key), ("DEL", key)])
        return 1 if isinstance(count, ResponseError) else int(count)

    def count_fields(self, view: View, entity_id: int) -> int:
        """Return how many fields the hash of an entity has, 1 for a key that is no hash."""
        (count,) = self._run_each([("HLEN", self.make_key(view, entity_id))])
        return 1 if isinstance(count, ResponseError) else int(count)

    def make_key(self, view: View, entity_id: int) -> bytes:
        """Return the key of an entity's hash."""
        return make_entity_key(self.project, view.join_key, entity_id)

    def run(self, commands: Sequence[Command]) -> list:
        """Run commands of one key each, also scripts. Return their replies. Raises DependencyError."""
        replies = self._run_each(commands)
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise DependencyError(
                    f"Redis at {self.addresses} holds a key of the project {self.project} that is no hash ({reply}). Expected "
                    f"hashes as Feast writes them. Find it with `redis-cli --scan --type string --pattern '*{self.project}'` "
                    "(or list, set, zset, stream) on each node, make sure that no other application wrote it, and remove it."
                )
        return replies

    def _run_each(self, commands: Sequence[Command]) -> list:
        """Do the same as `run`, with the error WRONGTYPE in place of a reply, so that one bad key fails no other command."""
        if not commands:
            return []
        if time.monotonic() < self._closed_until_s:
            raise DependencyError(
                f"Redis at {self.addresses} did not answer a moment ago. It is tried again within {PAUSE_S:g} s."
            )
        try:
            return self._run_by_node(self._connect(), commands)
        except (RedisError, RedisClusterException, OSError) as error:
            reason = describe_redis_error(error)
            if isinstance(error, OutOfMemoryError):  # it answers what only reads
                raise DependencyError(
                    f"Redis at {self.addresses} is full ({reason}). Expected room for all users and items below maxmemory. "
                    "Raise maxmemory, or add nodes. Fewer [live] idle_days help for what is written from then on."
                ) from error
            self._cluster, self._closed_until_s = None, time.monotonic() + PAUSE_S
            raise DependencyError(
                f"Redis at {self.addresses} did not answer ({reason}). Expected a cluster that replies within "
                f"{1000 * self.timeout_s:.0f} ms. Check that it runs with cluster-enabled yes, and that LIVE_REDIS_USER and "
                f"{PASSWORD} are its credentials; answers come without live state meanwhile."
            ) from error

    def _run_by_node(self, cluster: RedisCluster, commands: Sequence[Command]) -> list:
        """Send the commands of each node as one pipeline. redis-py's would ask a server for the keys of every script."""
        rows_of: dict[str, list[int]] = {}
        nodes = {}
        for row, command in enumerate(commands):
            node = cluster.get_node_from_key(command[3] if command[0] == "EVAL" else command[1])
            nodes[node.name] = node
            rows_of.setdefault(node.name, []).append(row)
        replies: list = [None] * len(commands)
        for name, rows in rows_of.items():
            pipeline = cluster.get_redis_connection(nodes[name]).pipeline(transaction=False)
            for row in rows:
                pipeline.execute_command(*commands[row])
            for row, reply in zip(rows, pipeline.execute(raise_on_error=False), strict=True):
                replies[row] = follow_slot(cluster, commands[row]) if isinstance(reply, AskError) else reply
        for reply in replies:
            if isinstance(reply, ResponseError) and not str(reply).startswith(WRONG_TYPE):
                raise reply
        return replies

    def _connect(self) -> RedisCluster:
        with self._lock:
            if self._cluster is None:
                hosts = [address.strip().rsplit(":", 1) for address in self.addresses.split(",")]
                self._cluster = RedisCluster(
                    startup_nodes=[ClusterNode(host, int(port)) for host, port in hosts],
                    username=os.environ.get("LIVE_REDIS_USER"),
                    password=os.environ.get(PASSWORD),
                    socket_timeout=self.timeout_s,
                    socket_connect_timeout=self.timeout_s,
                    retry=Retry(NoBackoff(), 0),
                )
            return self._cluster

    def close(self) -> None:
        """Release the connections."""
        with self._lock:
            if self._cluster is not None:
                self._cluster.close()
                self._cluster = None


def follow_slot(cluster: RedisCluster, command: Command) -> object:
    """Return the reply of the node to which the slot of a command moves, or has moved; a ResponseError in its place."""
    try:
        return cluster.execute_command(*command)
    except ResponseError as error:
        return error


def make_entity(view: View, reply: list[bytes | None] | ResponseError) -> Entity:
    """Return the entity that the reply to HMGET holds: the view's fields, event time, version, offsets."""
    if isinstance(reply, ResponseError):
        return Entity({}, b"", b"", [], "The key is no hash.")
    count = len(view.fields)
    try:
        offsets = [int(offset or 0) for offset in reply[count + 2 :]]
        return Entity(view.decode(reply[:count]), reply[count + 1] or b"", reply[count] or b"", offsets)
    except (DecodeError, ValueError) as error:
        return Entity({}, b"", b"", [], f"The hash has a feature that is not in Feast's encoding: {error}.")


def make_offset_field(source: str) -> bytes:
    """Return the field with the offset up to which a hash has the events of a log."""
    return f"_log:{source}".encode()
