"""p99 of 256 keys with RAM for 10 % of the table, against the whole table in RAM.

The budget holds rows with all that finds them, and RocksDB's index and filters; `ram_share` says those and its block cache too,
which does not grow with the table.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from perf.tiers.traffic import KEYS_PER_REQUEST, ROW_BYTES, TABLE, WIDTH, latencies_us, tiers_over, write_table, zipf_keys
from stages.embeddings.config import TableConfig
from stages.embeddings.metrics import TableCounts
from stages.embeddings.rocks_store import BLOCK_CACHE_BYTES, reader_bytes
from stages.embeddings.table import l1_sections, l2_sections

RAM_SHARE = 0.1
WAITS = "10 % in RAM, waits for misses"  # answers are exact
REST_OF_REQUEST_S = 0.002  # of a request that looks rows up: the network, the other stages


def within_budget(rows: int, width: int, budget_bytes: float, l1_share: float) -> dict[str, int]:
    """l1_rows and l2_rows that take `budget_bytes` with their keys, tags, marks and indices, and RocksDB's."""
    budget_bytes -= reader_bytes(rows, width)
    cached = int(budget_bytes / (4 * width))
    while True:
        table = TableConfig(TABLE, rows, width, l1_rows=int(l1_share * cached), l2_rows=int((1 - l1_share) * cached))
        if l1_sections(table).nbytes + (l2_sections(table).nbytes if table.l2_rows else 0) <= budget_bytes:
            return {"l1_rows": table.l1_rows, "l2_rows": table.l2_rows}
        cached = int(cached * 0.99)


def cases_of(rows: int, width: int) -> dict[str, tuple[float, dict[str, int]]]:
    """-> case: (hit-rate threshold, levels). A threshold that lets rows come late asks of L1: it has all the memory."""
    budget_bytes = RAM_SHARE * rows * 4 * width
    return {
        "all in RAM": (1.1, {"l2_rows": rows}),
        WAITS: (1.1, within_budget(rows, width, budget_bytes, 0.0)),
        "10 % in RAM, threshold 0.7": (0.7, within_budget(rows, width, budget_bytes, 1.0)),
    }


def shares(before: TableCounts, after: TableCounts) -> dict[str, float]:
    """Of the rows asked between two snapshots: those from memory, and those answered by the default vector."""
    asked = after.rows - before.rows
    in_memory = after.l1_hits + after.l2_hits - before.l1_hits - before.l2_hits
    return {"memory_hit_rate": round(in_memory / asked, 4), "late": round((after.late - before.late) / asked, 4)}


def bench_big(folder: Path, rows: int, rng: np.random.Generator, exponent: float, n_requests: int = 2500) -> list[dict]:
    source, results = write_table(folder, rows, rng), []
    requests = zipf_keys(rows, exponent, (2 * n_requests, KEYS_PER_REQUEST), rng)
    for case, (threshold, levels) in cases_of(rows, WIDTH).items():
        with tiers_over(rows, source, threshold, **levels) as tiers:
            for keys in requests[:n_requests]:
                tiers.lookup(TABLE, keys)
            tiers.settle()
            before = tiers.metrics().tables[TABLE]
            us = latencies_us(lambda keys, tiers=tiers: tiers.lookup(TABLE, keys), requests[n_requests:], REST_OF_REQUEST_S)
            after = tiers.metrics().tables[TABLE]
        p50_us, p99_us = (round(float(np.percentile(us, q)), 1) for q in (50, 99))
        beside = reader_bytes(rows, WIDTH) + BLOCK_CACHE_BYTES if levels["l2_rows"] < rows else 0  # all in RAM: it is not read
        ram_share = round((after.l1_bytes + after.l2_bytes + beside) / (rows * ROW_BYTES), 4)
        result = {"case": case, "ram_share": ram_share, **shares(before.counts, after.counts)}
        results.append(result | {"p50_us": p50_us, "p99_us": p99_us})
        results[-1]["p99_ratio"] = round(p99_us / results[0]["p99_us"], 2)
        print(
            "{case:30} RAM {ram_share:6.1%}  in memory {memory_hit_rate:.1%}  late {late:.1%}  "
            "p50 {p50_us:7.1f}  p99 {p99_us:7.1f} us  ({p99_ratio} of all in RAM)".format(**results[-1])
        )
    return results
