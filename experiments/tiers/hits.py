"""Rows per second of look-ups that hit, against numpy.take of the same rows of a plain array."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.tiers.traffic import TABLE, WIDTH, resident_keys, seconds_per_call, tiers_over, write_table, zipf_keys
from serving.tables.store.tiers import Tiers

BATCHES = (256, 1024, 4096, 32768)  # keys of a look-up
KEYS = 400_000  # of a round


def kinds_of(rows: int) -> dict[str, dict]:
    return {
        "L2 complete fp32": {"l2_rows": rows},
        "L1 over L2, slot index": {"l1_rows": rows // 4, "l2_rows": rows},
        "L2 partial, hashed": {"l2_rows": rows // 10},
        "L2 complete int8": {"l2_rows": rows, "row_format": "int8"},
        "L2 complete int4": {"l2_rows": rows, "row_format": "int4"},
        "L1 over L2 int8": {"l1_rows": rows // 4, "l2_rows": rows, "row_format": "int8"},
    }


def bench_hits(folder: Path, rows: int, rng: np.random.Generator, exponent: float) -> list[dict]:
    source = write_table(folder, rows, rng)
    plain = np.load(f"{source}/{TABLE}.npy")
    results = []
    for kind, table in kinds_of(rows).items():
        with tiers_over(rows, source, **table) as tiers:
            resident = resident_keys(tiers, rows)
            for batch in BATCHES:
                requests = resident[zipf_keys(len(resident), exponent, (max(4, KEYS // batch), batch), rng)]
                results.append({"kind": kind, "batch": batch, **_beside_take(plain, tiers, requests)})
                print(
                    "{kind:24} batch {batch:6}  {rows_per_s:>12,} rows/s  {of_take:.2f} / {of_take_into:.2f} of take".format(
                        **results[-1]
                    )
                )
    return results


def _beside_take(plain: np.ndarray, tiers: Tiers, requests: np.ndarray) -> dict:
    """requests: int64 [R, batch]. "into": both write into an array that is there."""
    batch = requests.shape[1]
    out = np.empty((batch, WIDTH), np.float32)
    ways = {
        "take": lambda keys: plain.take(keys, axis=0),
        "lookup": lambda keys: tiers.lookup(TABLE, keys),
        "take into": lambda keys: plain.take(keys, axis=0, out=out, mode="clip"),
        "lookup into": lambda keys: tiers.lookup(TABLE, keys, out),
    }
    cost_s = seconds_per_call(ways, requests)
    return {
        "rows_per_s": round(batch / cost_s["lookup into"]),
        "of_take": round(cost_s["take"] / cost_s["lookup"], 3),
        "of_take_into": round(cost_s["take into"] / cost_s["lookup into"], 3),
    }
