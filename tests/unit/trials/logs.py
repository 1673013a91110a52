"""Small logs of answers and events, written down by tests."""

import numpy as np
import pyarrow as pa

from live.exposures import SCHEMA
from serving.live.events import HEADER, EventBatch, Flags

NOW_MS = 1_000_000


def exposures(*rows):
    """Answers to anonymous users, unless a row says otherwise: each counts as a user of its own."""
    defaults = {"time_ms": NOW_MS, "user_id": None, "generation": 1, "degraded": [], "experiment": "e", "arm": "champion"}
    return pa.Table.from_pylist([defaults | {"scores": [], "teams": None} | row for row in rows], SCHEMA)


def events(*rows):
    """rows: (request id, item, positive, value, seconds after the answer)."""
    headers = np.zeros(len(rows), HEADER)
    for header, (_, item, positive, value, seconds) in zip(headers, rows, strict=True):
        header["item_id"], header["value"], header["received_ms"] = item, value, NOW_MS + 1_000 * seconds
        header["flags"] = Flags.POSITIVE if positive else 0
    blanks = [b""] * len(rows)
    return [(np.arange(1, len(rows) + 1), EventBatch(headers, blanks, [row[0].encode() for row in rows], blanks))]
