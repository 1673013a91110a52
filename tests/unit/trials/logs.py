"""Small logs of answers and events, written down by tests."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from live.exposures import SCHEMA
from serving.contract.tensors import OBSERVE
from serving.live.events import HEADER, EventBatch, Flags
from serving.stages.live.models import Observe

NOW_MS = 1_000_000


def exposures(*rows):
    """Answers, each to a user of its own, unless a row says otherwise."""
    defaults: dict[str, object] = {"time_ms": NOW_MS, "generation": 1, "degraded": [], "scores": []}
    defaults |= {"experiment": "e", "arm": "champion", "teams": None}
    return pa.Table.from_pylist([{"user_id": number} | defaults | row for number, row in enumerate(rows)], SCHEMA)


def events(*rows):
    """rows: (request id, item, positive, value, seconds after the answer). The others show interest, such as views."""
    headers = np.zeros(len(rows), HEADER)
    for header, (_, item, positive, value, seconds) in zip(headers, rows, strict=True):
        header["item_id"], header["value"], header["received_ms"] = item, value, NOW_MS + 1_000 * seconds
        header["flags"], header["weight"] = Flags.POSITIVE if positive else 0, 1.0
    blanks = [b""] * len(rows)
    return [(np.arange(1, len(rows) + 1), EventBatch(headers, blanks, [row[0].encode() for row in rows], blanks))]


def observe(repo: Path, given: Mapping[str, Any], now_ms: int | None = None) -> None:
    """Post events to generation 1 of a repository. now_ms: when; None: now

    given: inputs of `observe` by name, [N] each; all others are left out
    """
    with closing(Observe.load(repo / OBSERVE / "1")) as model:
        if now_ms is not None:
            model.now_ms = model.writer.now_ms = lambda: now_ms
        spec = model.info.spec
        stated = {t.name: np.array(given[t.name], t.numpy_dtype)[:, None] for t in spec.inputs if t.name in given}
        model(spec.fill_optional(len(given["user_id"])) | stated)
