"""HPS's rules for names and keys: the tag of a table, the characters of its parts, the reserved keys."""

from __future__ import annotations

import re

import numpy as np

from serving.contract.errors import ConfigError, DataError

NAME = re.compile(r"[A-Za-z0-9_-]{1,120}")
TAG_PREFIX = "hps_et"
# INT64_MAX marks an empty slot of the dynamic cache, -1 (all ones) one of the static table
INT64_MAX = int(np.iinfo(np.int64).max)
RESERVED_KEYS = (-1, INT64_MAX)


def check_name(kind: str, name: str) -> str:
    """Return `name` if HPS accepts it for a model or table (`kind`). Raises ConfigError otherwise."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"{kind} name {name!r} is not accepted by HPS. Expected 1 to 120 of A-Z a-z 0-9 _ -. Rename the {kind}."
        )
    return name


def make_tag(model: str, table: str) -> str:
    """Return `hps_et.<model>.<table>`: Kafka topic, RocksDB column family and stem of the Redis hashes of one table."""
    return f"{TAG_PREFIX}.{check_name('model', model)}.{check_name('table', table)}"


def check_keys(keys: np.ndarray, source: str) -> np.ndarray:
    """Return `keys` as int64 [N]. Raises DataError, which begins with `source`, when HPS reserves one of them."""
    keys = np.asarray(keys)
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise DataError(
            f"{source}: keys are {keys.dtype} {list(keys.shape)}. Expected integers [N]. Pass the table's keys as int64."
        )
    if keys.dtype == np.uint64 and keys.size and keys.max() > np.iinfo(np.int64).max:
        raise DataError(f"{source}: key {keys.max()} is past int64. Expected keys below 2^63 - 1. Map the keys to int64.")
    keys = keys.astype(np.int64, copy=False)
    for reserved in RESERVED_KEYS:
        rows = np.flatnonzero(keys == reserved)
        if rows.size:
            raise DataError(
                f"{source}: row {rows[0]} has key {reserved}. HPS reserves -1 and INT64_MAX to mark empty slots. "
                "Map padding and unknown values to an ordinary key."
            )
    return keys
