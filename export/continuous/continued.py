"""Continue a data set's log with the live events, so that the next generation learns from them.

data set ─┐
          ├─▶ one log, one catalogue, one table of users
live log ─┘   (archive and store of the repository, `python -m live`)
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from export.steps.live import find_catalogue_times, list_changeable_columns
from live.archive import read_log
from serving.contract.errors import ConfigError
from serving.contract.ids import NAME, is_text_of, stable_id
from serving.live.admission import format_ms, keep_fitting
from serving.live.events import HEADER, ITEM_CHANGED, OBSERVED, EventBatch, Flags
from serving.live.reader import Change, Reader
from serving.live.store import open_store
from serving.stages.live.counts.sales import HORIZONS_S, NO_SALES, add_sales, subtract_sales
from training.dataset import Dataset
from training.dataset.ids import find_ids
from training.dataset.load import AHEAD_S

KEY = ["user_id", "item_id", "timestamp"]
FORGET = ", or forget those of upsert: python -m live forget"
FORGET_OR_DATE = f"{FORGET}. With [items] updated_at, the later of both is used"


def continue_log(dataset: Dataset, folder: Path, before_s: int | None = None) -> Dataset:
    """Return the data set with the events, items and users of a live store; unchanged where there is none, or another shop's.

    An event that the log holds already counts once. before_s: leave out events at or after this moment, unix seconds
    """
    if not Reader(folder).exists():
        return dataset
    with closing(open_store(folder)) as store:
        shop, count = store.read_shop(), store.read_progress().last_sequence
    if shop != dataset.description.name:
        note = note_other_shop(folder, shop, dataset.description.name) if count else []
        return replace(dataset, report=replace(dataset.report, notes=[*dataset.report.notes, *note]))
    ignored_ids, times = find_ignored_ids(dataset), find_catalogue_times(dataset)
    changes, misfits = drop_misfits(times.drop_older(read_changes(folder)) if times else read_changes(folder), dataset)
    item_changes = {change.id: change for change in changes if change.type == ITEM_CHANGED and change.id not in ignored_ids}
    user_changes = {change.id: change for change in changes if change.type != ITEM_CHANGED}
    batches, notes = read_events(dataset, folder, before_s, ignored_ids, item_changes)
    events = pd.concat([make_frame(batch, dataset) for batch in batches] or [dataset.interactions.iloc[:0]])
    known_keys = pd.MultiIndex.from_frame(dataset.interactions[KEY])
    new = events[~pd.MultiIndex.from_frame(events[KEY]).isin(known_keys)]
    item_names = add_names(dataset.item_names, item_changes)
    items = merge_items(dataset.items, item_names, new["item_id"].unique(), item_changes)
    users = add_rows(dataset.users, "user_id", [*new["user_id"].unique(), *user_changes])
    users = apply_changes(users, "user_id", user_changes)
    notes += misfits
    notes += note_overridden("items", dataset.items, items, "item_id", item_changes, FORGET if times else FORGET_OR_DATE)
    notes += note_overridden("users", dataset.users, users, "user_id", user_changes)
    return replace(
        dataset,
        interactions=pd.concat([dataset.interactions, new]).sort_values("timestamp", kind="stable", ignore_index=True),
        items=items,
        users=users,
        item_names=item_names,
        report=replace(dataset.report, notes=[*dataset.report.notes, *notes, f"{len(new):,} live events continue the log"]),
        learned_sales=count_sales(batches, find_lost_sales(folder, before_s)),
    )


def read_events(
    dataset: Dataset, folder: Path, before_s: int | None, ignored_ids: np.ndarray, item_ids: Iterable[int]
) -> tuple[list[EventBatch], list[str]]:
    """Return the live events that continue a log, and notes of those left out. item_ids: of items that `upsert` changed

    Views, changes and ids of events are dropped at once: an archive may hold many times more of them than fit into memory.
    """
    batches = [keep_log_rows(batch) for _, batch in read_log(folder)]
    if before_s is not None:
        batches = [batch.take(np.flatnonzero(batch.headers["time_ms"] < 1_000 * before_s)) for batch in batches]
    batches, future_note = drop_future(
        batches, time.time_ns() // 1_000_000, 1_000 * int(dataset.interactions["timestamp"].max())
    )
    batches, notes = drop_ignored(batches, ignored_ids)
    notes = future_note + notes
    if dataset.item_names is None:
        return batches, notes
    batches, note = drop_unnamed(batches, np.union1d(dataset.items["item_id"], np.fromiter(item_ids, np.int64)))
    return batches, notes + note


def drop_future(batches: Sequence[EventBatch], now_ms: int, log_until_ms: int) -> tuple[list[EventBatch], list[str]]:
    """Return the events without those of the future, and a note if there are any.

    A wrong clock stamped them. A generation that learned from them would take all later events for old ones.
    now_ms, log_until_ms: the clock, and the end of the data set's log, unix milliseconds
    Raises ConfigError if that log ends in the future, too, because then the clock is behind.
    """
    latest_ms = now_ms + 1_000 * AHEAD_S
    times_ms = [batch.headers["time_ms"] for batch in batches]
    future_ms = np.concatenate([np.empty(0, np.int64), *(times[times > latest_ms] for times in times_ms)])
    if not len(future_ms):
        return list(batches), []
    fact = f"{len(future_ms):,}, of the future, the latest of {format_ms(future_ms.max())}"
    if log_until_ms > latest_ms:
        raise ConfigError(
            f"The clock of this machine says {format_ms(now_ms)}, the data set's log ends at {format_ms(log_until_ms)}, and "
            f"there are live events: {fact}. Expected a clock that is later. Correct the clock, or the times of the log."
        )
    past_batches = [batch.take(np.flatnonzero(batch.headers["time_ms"] <= latest_ms)) for batch in batches]
    return past_batches, [f"live events left out: {fact}. A wrong clock stamped them when they arrived"]


def merge_items(
    items: pd.DataFrame, names: pd.DataFrame | None, new_ids: np.ndarray, changes: Mapping[int, Change]
) -> pd.DataFrame:
    """Return a catalogue with items that are new in the log, int64 [N], and with what `upsert` set."""
    items = add_rows(items, "item_id", [*new_ids, *changes])
    if names is not None:
        items["title"] = items["title"].fillna(items["item_id"].map(names.set_index("id")["name"]))
    items["title"] = items["title"].fillna(items["item_id"].astype(str))
    items["available"] = items["available"].fillna(True).astype(bool)
    return apply_changes(items, "item_id", changes)


def note_other_shop(folder: Path, shop: str, name: str) -> list[str]:
    """Return a note that a live store is of the data set `shop`, and this one is `name`."""
    return [
        f"live events left out: {folder} holds those of the data set {shop!r}, and this one is {name!r}. A server that loads "
        "the new generation sets them aside. If it is the same shop, export it with its former name (name in dataset.toml)"
    ]


def read_changes(folder: Path) -> list[Change]:
    """Return what `upsert` set in a live store, each item and user once."""
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        return snapshot.read_changes(after=0)


def drop_misfits(changes: Sequence[Change], dataset: Dataset) -> tuple[list[Change], list[str]]:
    """Return changes without values that the data set's columns cannot hold, as answers are made, and a note if there are any.

    A column may have got another type, or no place in the data set any more, since `upsert` set it.
    """
    known = list_changeable_columns(dataset.description, has_names=dataset.item_names is not None)
    fitting = [
        change._replace(columns=keep_fitting(change.columns, known["item" if change.type == ITEM_CHANGED else "user"]))
        for change in changes
    ]
    names = {name for change, rest in zip(changes, fitting, strict=True) for name in change.columns.keys() - rest.columns}
    if not names:
        return fitting, []
    columns = ", ".join(sorted(names))
    return fitting, [
        f"values from upsert left out, because the data set has no such columns, or columns of another type: {columns}"
    ]


def find_ignored_ids(dataset: Dataset) -> np.ndarray:
    """Return the ids that live events of `ignore_items` have, int64 [N]."""
    texts = dataset.description.interactions.ignore_items
    ids = find_ids(texts, None) if dataset.item_names is None else [stable_id(str(text)) for text in texts]
    return np.setdiff1d(np.asarray(ids, np.int64), dataset.items["item_id"])  # a collision does not hide an item


def drop_ignored(batches: Sequence[EventBatch], ignored_ids: np.ndarray) -> tuple[list[EventBatch], list[str]]:
    """Return the events without those of `ignore_items`, and a note if there are any. ignored_ids: int64 [N]"""
    if not len(ignored_ids):
        return list(batches), []
    is_ignored = [np.isin(batch.headers["item_id"], ignored_ids) for batch in batches]
    count = sum(int(rows.sum()) for rows in is_ignored)
    kept_batches = [batch.take(np.flatnonzero(~rows)) for batch, rows in zip(batches, is_ignored, strict=True)]
    return kept_batches, [f"live events left out: {count:,}, of items that ignore_items lists"] if count else []


def drop_unnamed(batches: Sequence[EventBatch], item_ids: np.ndarray) -> tuple[list[EventBatch], list[str]]:
    """Return the events without those of other items, and a note if there are any. item_ids: int64 [N]

    A live event holds the hash of a text id. Without its text no answer could name the item, and a mistyped id would be one.
    """
    logged_ids = np.concatenate([np.empty(0, np.int64), *(batch.headers["item_id"] for batch in batches)])
    left_out = logged_ids[~np.isin(logged_ids, item_ids)]
    named_batches = [batch.take(np.flatnonzero(np.isin(batch.headers["item_id"], item_ids))) for batch in batches]
    if not len(left_out):
        return named_batches, []
    return named_batches, [
        f"live events left out: {len(left_out):,}, of items: {len(np.unique(left_out)):,}. Their ids are in neither the data "
        "set nor an upsert. If they are not mistyped, add the items by PUT /v1/items/{id}"
    ]


def find_prompted(interactions: pd.DataFrame, folder: Path) -> np.ndarray:
    """Return which rows of a log are live events that name the answer they react to (`request_id`), bool [N]."""
    keys = [np.empty((0, len(KEY)), np.int64)]
    for _, batch in read_log(folder):
        headers = batch.headers[batch.headers["request_id_bytes"] > 0]
        keys.append(np.stack([headers["user_id"], headers["item_id"], headers["time_ms"] // 1000], axis=1))
    prompted = pd.MultiIndex.from_arrays(np.concatenate(keys).T, names=KEY)
    return pd.MultiIndex.from_frame(interactions[KEY]).isin(prompted)


def keep_log_rows(batch: EventBatch) -> EventBatch:
    """Return the events that belong in the interaction log, without their ids."""
    kept = batch.take(find_log_rows(batch.headers))
    blanks = [b""] * len(kept)
    return EventBatch(kept.headers, blanks, blanks, kept.columns)


def find_log_rows(headers: np.ndarray) -> np.ndarray:
    """Return the rows of HEADER [N] that belong in the interaction log, int64 [M]."""
    is_counted = (headers["flags"] & (Flags.COUNTED | Flags.ERASED)) == Flags.COUNTED
    return np.flatnonzero((headers["type"] == OBSERVED) & is_counted)


def count_sales(batches: Sequence[EventBatch], lost_sales: np.ndarray = NO_SALES) -> np.ndarray | None:
    """Return LEARNED_SALE [L] of events that belong in the interaction log, as the live store counts them; None without any.

    lost_sales: LEARNED_SALE [N] that count as well
    """
    headers = np.concatenate([np.empty(0, HEADER), *(batch.headers[find_log_rows(batch.headers)] for batch in batches)])
    sold = headers[(headers["flags"] & Flags.POSITIVE) != 0]
    sales = add_sales(lost_sales, sold)
    return sales if len(sales) else None


def find_lost_sales(folder: Path, before_s: int | None = None) -> np.ndarray:
    """Return the live sales, LEARNED_SALE [L], whose events retention has removed from the archive.

    The store counts them for ever. No log has them, unless the shop has delivered them in its own: they must not count twice.
    before_s: unix seconds by which they were over; None: they were at the latest event of their items
    """
    first = next((int(sequences[0]) for sequences, _ in read_log(folder, most=1)), None)
    if first == 1:
        return NO_SALES
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        last, (item_ids, records) = snapshot.read_progress().last_sequence, snapshot.read_all_items()
    held_headers = (batch.headers[sequences <= last] for sequences, batch in read_log(folder))
    sales = subtract_sales(item_ids, records, held_headers)
    if before_s is not None:
        moments_ms = np.minimum(sales["last_ms"], 1_000 * before_s - 1)
        sales["decayed"] *= np.exp((sales["last_ms"] - moments_ms)[:, None] / 1_000 / HORIZONS_S)
        sales["last_ms"] = moments_ms
    return sales


def make_frame(batch: EventBatch, dataset: Dataset) -> pd.DataFrame:
    """Return the events that belong in the interaction log, as its rows."""
    rows = find_log_rows(batch.headers)
    headers = batch.headers[rows]
    frame = pd.DataFrame(
        {"user_id": headers["user_id"], "item_id": headers["item_id"], "timestamp": headers["time_ms"] // 1000}
    )
    frame["positive"] = (headers["flags"] & Flags.POSITIVE) != 0
    frame["weight"], frame["label"] = headers["weight"].astype(np.float32), headers["label"].astype(np.float32)
    contexts = [json.loads(batch.columns[row] or b"{}") for row in rows.tolist()]
    for column in dataset.context_columns:
        dtype = dataset.interactions[column.name].dtype
        values = [fit_context(context.get(column.name), dtype) for context in contexts]
        frame[column.name] = pd.Series(values, dtype=dtype)
    return frame


def fit_context(value: object, dtype: Any) -> object:
    """Return a context value as a column of this dtype holds it, None if it cannot: the column may have got another type."""
    if dtype.kind == "O":
        return None if value is None else str(value)
    return value if isinstance(value, int if dtype.kind == "i" else int | float) else None


def add_rows(table: pd.DataFrame, key: str, ids: Iterable[int]) -> pd.DataFrame:
    """Return a table with a row for every id, sorted by id. Values of new rows are missing; lists are empty."""
    known_ids = table[key].to_numpy()
    new = np.setdiff1d(np.fromiter(ids, np.int64), known_ids)
    merged = table.set_index(key).reindex(pd.Index(np.union1d(known_ids, new), name=key)).reset_index()[table.columns]
    is_new = np.isin(merged[key], new)
    for name in [name for name, dtype in table.dtypes.items() if dtype.kind == "O"]:
        is_list = len(table) > 0 and isinstance(table[name].iloc[0], list)
        missing: list[Any] = [[] if is_list else None] * len(merged)
        merged[name] = pd.Series(
            [empty if new_row else value for value, empty, new_row in zip(merged[name], missing, is_new, strict=True)],
            dtype=object,
        )
    return merged.astype(find_kept_types(table))


def add_names(names: pd.DataFrame | None, changes: Mapping[int, Change]) -> pd.DataFrame | None:
    """Return the names of items with those that `upsert` gave to further ones, sorted by id; None where ids are numbers."""
    if names is None:
        return None
    new = {change.id: change.columns[NAME] for change in changes.values() if is_text_of(change.columns.get(NAME), change.id)}
    for identifier in names["id"]:
        new.pop(identifier, None)
    added = pd.DataFrame({"id": np.fromiter(new, np.int64), "name": pd.Series(list(new.values()), dtype=object)})
    return pd.concat([names, added.astype(names.dtypes.to_dict())]).sort_values("id", ignore_index=True)


def find_kept_types(table: pd.DataFrame) -> dict[str, Any]:
    """Return the dtypes that can hold missing values, by column: all but bool, whose columns stay objects until filled."""
    return {name: dtype for name, dtype in table.dtypes.items() if dtype.kind != "b"}


def apply_changes(table: pd.DataFrame, key: str, changes: Mapping[int, Change]) -> pd.DataFrame:
    """Return a table with the values that `upsert` set. Columns that the table does not have are ignored."""
    positions = {int(identifier): row for row, identifier in enumerate(table[key])}
    for name in table.columns:
        set_rows = {positions[change.id]: change.columns[name] for change in changes.values() if name in change.columns}
        if not set_rows or name == key:
            continue
        values = table[name].to_numpy(copy=True)
        for row, value in set_rows.items():
            values[row] = convert_value(value, table[name].dtype, values)
        table = table.assign(**{name: values})
    return table


def note_overridden(
    name: str, table: pd.DataFrame, changed: pd.DataFrame, key: str, changes: Mapping[int, Change], remedy: str = ""
) -> list[str]:
    """Return a note that counts the rows of a data set's table in which `upsert` set other values; [] without any.

    changed: the table with the changes; remedy: what else than `upsert` brings the data set's values back
    """
    known_ids = np.intersect1d(table[key], np.fromiter(changes, np.int64))
    before, after = (rows.set_index(key).loc[known_ids].astype(str) for rows in (table, changed))
    differs = before != after
    count = int(differs.any(axis=1).sum())
    if not count:
        return []
    oldest_ms = min(changes[row].set_ms[name] for row in known_ids for name in differs.columns[differs.loc[row].to_numpy()])
    oldest = time.strftime("%Y-%m-%d", time.gmtime(oldest_ms / 1_000))
    return [
        f"{name} with values from upsert that differ from the data set's: {count:,}, the oldest set on {oldest}. Those of "
        f"upsert are used. To use the data set's, send them by upsert too{remedy}"
    ]


def convert_value(value: object, dtype: Any, values: np.ndarray) -> object:
    """Return a JSON value as a column of this dtype holds it; null is a missing value. values: the column so far"""
    if dtype.kind == "b":
        return value is not False
    if dtype.kind == "O":
        return [] if value is None and any(isinstance(other, list) for other in values[:1]) else value
    return np.nan if value is None else value
