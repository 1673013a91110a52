"""p99 of 256 keys with RAM for 10 % of the table (ram.py), against the whole table in RAM."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.tiers.ram import ram_share, within_share
from experiments.tiers.traffic import KEYS_PER_REQUEST, TABLE, latencies_us, tiers_over, warm, warm_keys, write_table, zipf_keys
from serving.tables.metrics import TableCounts

WAITS = "10 % in RAM, waits for misses"  # answers are exact
REST_OF_REQUEST_S = 0.002  # of a request that looks rows up: the network, the other stages


def cases_of(rows: int) -> dict[str, tuple[float, dict[str, int]]]:
    """-> case: (hit-rate threshold, levels). A threshold that lets rows come late asks of L1: it has all the memory.

    Raises ConfigError for a table that is too small.
    """
    return {
        "all in RAM": (1.1, {"l2_rows": rows}),
        WAITS: (1.1, within_share(rows, l1_share=0.0)),
        "10 % in RAM, threshold 0.7": (0.7, within_share(rows, l1_share=1.0)),
    }


def shares(before: TableCounts, after: TableCounts) -> dict[str, float]:
    """Of the rows asked between two snapshots: those from memory, and those answered by the default vector."""
    asked = after.rows - before.rows
    in_memory = after.l1_hits + after.l2_hits - before.l1_hits - before.l2_hits
    return {"memory_hit_rate": round(in_memory / asked, 4), "late": round((after.late - before.late) / asked, 4)}


def bench_big(folder: Path, rows: int, rng: np.random.Generator, exponent: float, n_requests: int = 2500) -> list[dict]:
    source, results = write_table(folder, rows, rng), []
    warming = warm_keys(rows, exponent, rng)
    requests = zipf_keys(rows, exponent, (n_requests, KEYS_PER_REQUEST), rng)
    for case, (threshold, levels) in cases_of(rows).items():
        with tiers_over(rows, source, threshold, **levels) as tiers:
            warm(tiers, warming)
            before = tiers.metrics().tables[TABLE]
            us = latencies_us(lambda keys, tiers=tiers: tiers.lookup(TABLE, keys), requests, REST_OF_REQUEST_S)
            after = tiers.metrics().tables[TABLE]
        p50_us, p99_us = (round(float(np.percentile(us, q)), 1) for q in (50, 99))
        share = ram_share(rows, after.l1_bytes, after.l2_bytes)
        result = {"case": case, "ram_share": share, **shares(before.counts, after.counts)}
        results.append(result | {"p50_us": p50_us, "p99_us": p99_us})
        results[-1]["p99_ratio"] = round(p99_us / results[0]["p99_us"], 2)
        print(
            "{case:30} RAM {ram_share:6.1%}  in memory {memory_hit_rate:.1%}  late {late:.1%}  "
            "p50 {p50_us:7.1f}  p99 {p99_us:7.1f} us  ({p99_ratio} of all in RAM)".format(**results[-1])
        )
    return results
