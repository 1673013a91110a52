"""Fill the embedded store and the seen items from the training log (read by `serving/stages/features/user_store.py`)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from serving.contract.tensors import MISSING_INT, PAD_ID
from serving.contract.texts import save_strings
from serving.live.aggregations import make_entity_keys
from serving.live.aggregations.plan import NO_KEY
from serving.live.aggregations.spec import USER
from serving.stages.features.user_files import STORE_FILE
from serving.stages.features.user_store import ProfileColumn, Profiles, SeenItems
from training.features.columns import make_raw_values
from training.features.point_in_time import EventLog

KINDS = {"i": "integer", "f": "continuous"}


def make_profiles(users: pd.DataFrame, kinds: dict[str, str]) -> Profiles:
    """Return the profile columns of the user table.

    users: sorted by user_id; kinds: column -> "integer", "string" or "continuous".
    """
    columns = {name: _make_profile_column(make_raw_values(users[name], kind), kind) for name, kind in kinds.items()}
    return Profiles(users["user_id"].to_numpy(), columns)


def _make_profile_column(values: np.ndarray, kind: str) -> ProfileColumn:
    if kind != "string":
        missing = MISSING_INT if kind == "integer" else np.nan
        return ProfileColumn(np.append(values, np.array([missing], values.dtype)))
    codes, texts = pd.factorize(values)
    return ProfileColumn(np.append(codes + 1, 0), np.array([None, *texts], object))


def write_store(folder: Path, log: EventLog, user_ids: np.ndarray) -> None:
    """Write the state of users, int64 [U] ascending, at the end of the log, in the format of UserStore."""
    folder.mkdir(parents=True, exist_ok=True)
    # One more moment than users: PAD_ID is the unknown user, whose totals close the arrays.
    moments = log.find_moments_at_end(np.append(user_ids, PAD_ID))
    moments.users[-1], moments.ends[-1] = len(log.profiles.user_ids), log.offsets[-1]
    for name, values in log.compute_totals(moments).items():
        np.save(folder / f"{name}.npy", values)
    starts, ends = log.find_positive_ranges(moments)
    starts = np.maximum(starts, ends - log.history_length)[:-1]
    counts = ends[:-1] - starts
    offsets = np.concatenate([[0], np.cumsum(counts)])
    rows = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
    ids, times, categories = log.positives
    rows = np.append(rows, len(ids) - 1)  # the extra event, which belongs to no user
    np.save(folder / "user_ids.npy", user_ids)
    np.save(folder / "event_offsets.npy", offsets)
    np.save(folder / "event_ids.npy", ids[rows])
    np.save(folder / "event_times.npy", times[rows])
    np.save(folder / "event_categories.npy", np.zeros(len(rows), np.int32) if categories is None else categories[rows])
    aggregations = log.aggregates.list_of_entity(USER)
    if aggregations:
        known_ids = np.append(user_ids, NO_KEY)  # the last record is the unknown user's
        log.aggregates.save_prices(folder, aggregations)
        np.save(folder / "aggregates.npy", log.aggregates.make_records(USER, make_entity_keys(USER, known_ids, known_ids, {})))
    settings = {
        "schema": 1,
        "history_length": log.history_length,
        "as_of_s": log.as_of_s,
        "has_categories": categories is not None,
        "aggregations": [asdict(aggregation) for aggregation in aggregations],
        "event_names": log.aggregates.event_names,
        "amount": log.aggregates.amount,
        "profile": [
            _save_profile(folder, number, name, column._replace(values=column.values[moments.users]))
            for number, (name, column) in enumerate(log.profiles.columns.items())
        ],
    }
    (folder / STORE_FILE).write_text(json.dumps(settings, indent=1) + "\n")


def _save_profile(folder: Path, number: int, name: str, column: ProfileColumn) -> dict[str, str]:
    np.save(folder / f"profile.{number}.npy", column.values)
    if column.texts is None:
        return {"name": name, "kind": KINDS[column.values.dtype.kind]}
    save_strings(folder, f"profile.{number}.texts", column.texts[1:].tolist())
    return {"name": name, "kind": "string"}


def collect_seen_items(events: pd.DataFrame, user_ids: np.ndarray) -> SeenItems:
    """Return all items of users, int64 [U] ascending, whatever the label."""
    pairs = events.loc[events["user_id"].isin(user_ids), ["user_id", "item_id"]]
    pairs = pairs.drop_duplicates().sort_values(["user_id", "item_id"])
    offsets = np.searchsorted(pairs["user_id"].to_numpy(), user_ids)
    return SeenItems(user_ids, np.append(offsets, len(pairs)), pairs["item_id"].to_numpy())
