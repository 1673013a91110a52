"""What the tiers count. Plain numbers: the server's adapter publishes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.tables.updates.ring import UpdaterState

LATENCY_BUCKETS = 24  # bucket b counts misses that took less than 2^b µs, and not less than half of that


@dataclass
class TableCounts:
    """Rows asked of one table since start, by what answered; a key asked twice counts twice."""

    rows: int = 0
    l1_hits: int = 0
    l2_hits: int = 0
    l3_hits: int = 0
    perhaps_old: int = 0  # a row that may lack updates: the exported one because L3 is down, or of a store that is behind
    late: int = 0  # answered by the default vector because the request did not wait for a miss (asynchronous insertion)
    unknown: int = 0  # answered by the default vector because no level that was up has the key

    @property
    def hit_rate(self) -> float:
        """Share of rows that any level answered with the key's own row; 1 when nothing was asked."""
        return self._share(self.l1_hits + self.l2_hits + self.l3_hits, self.rows, 1.0)

    @property
    def l1_hit_rate(self) -> float:
        return self._share(self.l1_hits, self.rows)

    @property
    def l2_hit_rate(self) -> float:
        """Of the rows that L1 did not have."""
        return self._share(self.l2_hits, self.rows - self.l1_hits)

    @property
    def l3_hit_rate(self) -> float:
        """Of the rows that neither L1 nor L2 had, and that were waited for."""
        return self._share(self.l3_hits, self.l3_hits + self.unknown)

    @property
    def memory_hit_rate(self) -> float:
        """L1 and L2 together."""
        return self._share(self.l1_hits + self.l2_hits, self.rows)

    @property
    def default_rate(self) -> float:
        return self._share(self.late + self.unknown, self.rows)

    @staticmethod
    def _share(part: int, whole: int, of_nothing: float = 0.0) -> float:
        return part / whole if whole else of_nothing


@dataclass(frozen=True)
class TableMetrics:
    """One table now. Bytes include keys, tags and marks, not only rows."""

    counts: TableCounts
    l1_rows: int
    l1_bytes: int  # of this process
    l2_rows: int
    l2_bytes: int  # of the machine, shared by all processes
    updater: UpdaterState


@dataclass
class MissCounts:
    """Requests with misses: how long the wave below L1 took, and what else happened."""

    buckets: list[int] = field(default_factory=lambda: [0] * LATENCY_BUCKETS)
    total_us: int = 0
    degraded_lookups: int = 0  # a level that was needed was down
    insertions_dropped: int = 0  # background work that found no room in the queue, or in Redis

    def add(self, duration_us: int) -> None:
        self.buckets[min(duration_us.bit_length(), LATENCY_BUCKETS - 1)] += 1
        self.total_us += duration_us

    def quantile_us(self, share: float) -> int:
        """Upper bound of the bucket that holds the quantile; 0 without misses."""
        needed, seen = share * sum(self.buckets), 0
        for bucket, count in enumerate(self.buckets):
            seen += count
            if count and seen >= needed:
                return 1 << bucket
        return 0


@dataclass(frozen=True)
class Metrics:
    """A snapshot of one process's tiers."""

    tables: dict[str, TableMetrics]
    misses: MissCounts
    failures: dict[str, int]  # level -> calls that failed
    down: dict[str, str]  # level -> the error that keeps it out of use now

    @property
    def hit_rate(self) -> float:
        """Overall: of all rows of all tables, the share answered with the key's own row."""
        counts = [table.counts for table in self.tables.values()]
        rows = sum(count.rows for count in counts)
        return sum(count.l1_hits + count.l2_hits + count.l3_hits for count in counts) / rows if rows else 1.0
