"""The counters of the tables, as plain numbers; the server's adapter publishes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.contract.measurements import Histogram

WAIT_BOUNDS_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)  # from shared memory to a slow disk


@dataclass
class TableCounts:
    """Rows looked up in one table since start, by source; a key looked up twice counts twice."""

    rows: int = 0
    l1_hits: int = 0
    l2_hits: int = 0
    l3_hits: int = 0
    perhaps_old: int = 0  # rows that may lack updates: exported rows while L3 is down, or rows of a store that is behind
    late: int = 0  # default vectors, because the request did not wait for the row (asynchronous insertion)
    unknown: int = 0  # default vectors, because no available level has the key

    @property
    def hit_rate(self) -> float:
        """The share of rows that a level held; 1 when nothing was looked up."""
        return self._compute_share(self.l1_hits + self.l2_hits + self.l3_hits, self.rows, 1.0)

    @property
    def l1_hit_rate(self) -> float:
        return self._compute_share(self.l1_hits, self.rows)

    @property
    def l2_hit_rate(self) -> float:
        """The share of L1's misses that L2 held."""
        return self._compute_share(self.l2_hits, self.rows - self.l1_hits)

    @property
    def l3_hit_rate(self) -> float:
        """The share of L2's misses that L3 held, among those that requests waited for."""
        return self._compute_share(self.l3_hits, self.l3_hits + self.unknown)

    @property
    def default_rate(self) -> float:
        return self._compute_share(self.late + self.unknown, self.rows)

    @staticmethod
    def _compute_share(part: int, whole: int, if_empty: float = 0.0) -> float:
        return part / whole if whole else if_empty


@dataclass(frozen=True)
class UpdaterState:
    """The updater's own counters, per table."""

    rows_applied: int
    messages_rejected: int
    messages_lost: int  # removed by the brokers before they were read
    lag_ms: float  # of the latest batch: from the producer's timestamp until visible
    heartbeat_unix_ms: int  # 0: no updater has run
    broker_down: bool
    store_down: bool  # updates are waiting for RocksDB or Redis, or RocksDB is being filled


@dataclass(frozen=True)
class TableMetrics:
    """The state of one table. Bytes include keys, tags and marks."""

    counts: TableCounts
    l1_rows: int
    l1_bytes: int  # of this process
    l2_rows: int
    l2_bytes: int  # of the machine, shared by all processes
    updater: UpdaterState


@dataclass
class MissCounts:
    """Requests with misses: durations of the wave below L1, and other counts."""

    waits: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS_S))
    degraded_lookups: int = 0  # a level that was needed was down
    insertions_dropped: int = 0  # background work dropped because its queue or Redis was full


@dataclass(frozen=True)
class Metrics:
    """A snapshot of one process's tables."""

    tables: dict[str, TableMetrics]
    misses: MissCounts
    failures: dict[str, int]  # level -> calls that failed
    down: dict[str, str]  # level -> the error that made it unavailable

    @property
    def hit_rate(self) -> float:
        """The share of rows, over all tables, that a level held."""
        counts = [table.counts for table in self.tables.values()]
        rows = sum(count.rows for count in counts)
        return sum(count.l1_hits + count.l2_hits + count.l3_hits for count in counts) / rows if rows else 1.0
