"""Load a Dataset from a folder with a `dataset.toml`, a bundled name, or a synthetic spec.

    dataset.toml -> files -> columns -> ids, times, numbers -> usable rows -> interactions, items, users

Bad input raises one DataError with file, column, row (line of the file, 1-based) and remedy.
"""

from __future__ import annotations

import difflib
import os
import time
from pathlib import Path

import numpy as np
import pandas as pd

from serving.contract.errors import DataError
from training.dataset.columns import Column, find_line, read_columns
from training.dataset.dataset import Dataset, Report
from training.dataset.description import Description, Interactions, Items, Users, read_description
from training.dataset.ids import convert_ids, find_ids, parse_integers
from training.dataset.repeats import find_repeats
from training.dataset.synthetic import generate, parse_spec
from training.dataset.times import parse_times

PROJECT = Path(__file__).resolve().parents[2]
BUNDLED = ("online-retail", "complete-journey", "movielens", "amazon-grocery", "amazon-sports")
FEW = 0.1  # share of ids or rows below which they are few
SHOWN = 10  # most entries that a note names
MOST = 0.5  # share above which they are most
AHEAD_S = 300  # how far another machine's clock may be ahead
ONLINE_SINCE_S = 631_152_000  # 1990-01-01 UTC; no log of a shop is older
DATA_VARIABLE = "RECOMMENDER_DATA"  # a folder with data files that are not bundled


def load_dataset(source: str | Path) -> Dataset:
    """Load a data set. source: a folder, one of BUNDLED, "synthetic:NAME" or "synthetic:users=…,items=…,events=…,seed=…"."""
    text = str(source)
    if text.startswith("synthetic:"):
        return generate(parse_spec(text.removeprefix("synthetic:")))
    folder = PROJECT / "data" / text if text in BUNDLED else Path(source)  # write "./movielens" for a folder of that name
    if not folder.is_dir():
        alike = difflib.get_close_matches(text.lower(), BUNDLED, n=1)
        raise DataError(
            f"There is no data set {text!r}. Expected a folder with a dataset.toml, one of {', '.join(BUNDLED)}, "
            f"or synthetic:small. {f'Did you mean {alike[0]!r}?' if alike else 'Check the path.'}"
        )
    return _load(folder, read_description(folder))


def find_file(folder: Path, name: str) -> Path:
    """Find a file of a dataset.toml: in its folder, else in $RECOMMENDER_DATA, else in ../shared/data beside the project."""
    places = [folder, PROJECT.parent / "shared" / "data"]
    if os.environ.get(DATA_VARIABLE):
        places.insert(1, Path(os.environ[DATA_VARIABLE]))
    for place in places:
        if (place / name).is_file():
            return place / name
        if (place / name).is_dir():
            raise DataError(f"{place / name} is a folder. Expected one file: join its files, and name the result.")
    raise DataError(
        f"{folder / 'dataset.toml'}: the file {name!r} is not there. Looked in {', '.join(str(p) for p in places)}. "
        f"Put it in the first, or set {DATA_VARIABLE} to the folder that holds it."
    )


def _load(folder: Path, description: Description) -> Dataset:
    log_file, item_file, user_file = description.interactions, description.items, description.users
    log_names = [log_file.user_id, log_file.item_id, log_file.timestamp, log_file.label, log_file.weight]
    log = _read(folder, log_file.path, [*log_names, *description.context.columns])
    catalogue, user_table = {}, {}
    if item_file:
        roles = [item_file.item_id, item_file.title, item_file.category, item_file.provider]
        roles += [item_file.price, item_file.available, item_file.updated_at]
        catalogue = _read(folder, item_file.path, [*roles, *item_file.feature_columns])
    if user_file:
        user_table = _read(folder, user_file.path, [user_file.user_id, *user_file.feature_columns])

    item_columns = [log[log_file.item_id], *([catalogue[item_file.item_id]] if item_file else [])]
    user_columns = [log[log_file.user_id], *([user_table[user_file.user_id]] if user_file else [])]
    item_ids, item_names = convert_ids(item_columns, allow_negative=False)
    user_ids, user_names = convert_ids(user_columns, allow_negative=True)
    ignored_ids = find_ids(log_file.ignore_items, item_names)
    ignored = [np.isin(ids, ignored_ids) & ~column.missing for column, ids in zip(item_columns, item_ids, strict=True)]

    report = Report()
    interactions = _make_interactions(description, log, user_ids[0], item_ids[0], ignored[0], report)
    found_ids = np.concatenate([ids[rows] for ids, rows in zip(item_ids, ignored, strict=True)])
    report.notes += _note_not_ignored(log_file.ignore_items, item_names, found_ids)
    report.notes += [*_note_odd_ids(item_columns, item_names), *_note_odd_ids(user_columns, user_names)]
    report.notes += [*_note_odd_rows(interactions), *_note_seen_before(interactions)]
    items = _collect_entities("item_id", interactions, item_columns[1:], item_ids[1:], ignored[1:], report)
    users = _collect_entities("user_id", interactions, user_columns[1:], user_ids[1:], [], report)
    item_names, user_names = _keep_names(item_names, items["item_id"]), _keep_names(user_names, users["user_id"])
    times = None
    if item_file and item_file.updated_at:
        times = _read_updates(items, catalogue[item_file.updated_at], item_file.time_format)
    items = _make_item_table(items, description.items, catalogue, item_names)
    if item_file and item_file.available:
        _refuse_nothing_to_serve(items, catalogue[item_file.available])
    users = _make_user_table(users, description.users, user_table)
    _refuse_other_ids(item_columns, item_ids)
    _refuse_other_ids(user_columns, user_ids)
    return Dataset(description, interactions, items, users, user_names, item_names, report, item_updates_s=times)


def _refuse_nothing_to_serve(items: pd.DataFrame, available: Column) -> None:
    if not items["available"].any():
        raise DataError(
            f"{available.path}, column {available.name!r}: none of the {len(items):,} items is available. "
            "Expected 1 (or true) where an item may be recommended. Is the column the other way round?"
        )


def _read(folder: Path, name: str, columns: list[str | None]) -> dict[str, Column]:
    return read_columns(find_file(folder, name), [column for column in columns if column])


def _make_interactions(
    description: Description,
    log: dict[str, Column],
    user_id: np.ndarray,
    item_id: np.ndarray,
    ignored: np.ndarray,
    report: Report,
) -> pd.DataFrame:
    """Return the log as Dataset.interactions describes it; unusable rows are dropped and counted."""
    spec = description.interactions
    timestamp, kind = parse_times(log[spec.timestamp], spec.time_format)
    if kind not in ("seconds", "ISO date-times", spec.time_format):
        report.notes.append(f"column {spec.timestamp!r} was read as unix {kind}")
    label = log[spec.label].read_numbers() if spec.label else np.full(len(user_id), np.nan)
    weight = log[spec.weight].read_numbers(missing=1.0) if spec.weight else np.ones(len(user_id))
    positive = (
        (label >= spec.positive_at if spec.positive_at is not None else label > 0)
        if spec.label
        else np.ones(len(user_id), bool)
    )
    reasons = {
        f"no user ({spec.user_id} is empty)": log[spec.user_id].missing,
        f"no item ({spec.item_id} is empty)": log[spec.item_id].missing,
        f"no time ({spec.timestamp} is empty)": log[spec.timestamp].missing,
        f"no label ({spec.label} is empty)": np.isnan(label) & (spec.label is not None),
        "item is listed in ignore_items": ignored,
        f"weight ({spec.weight}) is not above 0": weight <= 0,
    }
    keep = _find_kept_rows(reasons, report)
    _refuse_useless(log[spec.user_id].path, spec, keep, positive, label, report)
    columns = {"user_id": user_id, "item_id": item_id, "timestamp": timestamp, "positive": positive}
    columns |= {"weight": weight.astype(np.float32), "label": label.astype(np.float32)}
    columns |= {name: _read_context(log[name]) for name in description.context.categorical}
    columns |= {name: log[name].read_numbers().astype(np.float32) for name in description.context.continuous}
    frame = pd.DataFrame({name: values[keep] for name, values in columns.items()})
    return frame.sort_values("timestamp", kind="stable", ignore_index=True)


def _find_kept_rows(reasons: dict[str, np.ndarray], report: Report) -> np.ndarray:
    """Return which rows to keep, bool [n_rows]. Each dropped row is counted once, under its first reason."""
    report.rows_read = len(next(iter(reasons.values())))
    keep = np.ones(report.rows_read, bool)
    for reason, is_dropped in reasons.items():
        report.drop(reason, int((keep & is_dropped).sum()))
        keep &= ~is_dropped
    return keep


def _refuse_useless(
    path: Path, spec: Interactions, keep: np.ndarray, positive: np.ndarray, label: np.ndarray, report: Report
) -> None:
    """Raise DataError when no row, or no positive row, is left."""
    if not keep.any():
        raise DataError(f"{path}: no usable row is left.\n{report}\nMend the log, or the columns that dataset.toml names.")
    if not positive[keep].any():
        expectation = (
            "above 0, as positive_at is not given"
            if spec.positive_at is None
            else f"positive_at = {spec.positive_at:g} or more"
        )
        raise DataError(
            f"{path}: no row is positive: column {spec.label!r} goes from {label[keep].min():g} to {label[keep].max():g}. "
            f'Expected some {expectation}. Set positive_at to a label that means "liked".'
        )


def _refuse_other_ids(columns: list[Column], ids: list[np.ndarray]) -> None:
    """Raise DataError when a side file has no id of the log. columns, ids: those of the log, then those of the side file"""
    if len(columns) == 1 or not len(columns[1].values):
        return
    (log, side), (log_ids, side_ids) = columns, ids
    if not np.isin(side_ids[~side.missing], log_ids[~log.missing]).any():
        raise DataError(
            f"{side.path}, column {side.name!r}: none of its {len(side.values):,} ids is in the log: here they are like "
            f"{side.values[0]!r}, and in its column {log.name!r} like {log.values[0]!r}. Expected the same ids in both. Name "
            "another column in dataset.toml, or correct the file."
        )


def _note_not_ignored(listed: list[str | int], names: pd.DataFrame | None, ignored_ids: np.ndarray) -> list[str]:
    """Return a note of the entries of ignore_items that no row has. ignored_ids: int64 [N], ids of the rows that are ignored"""
    absent = [entry for entry in listed if not np.isin(find_ids([entry], names), ignored_ids).any()]
    if not absent:
        return []
    texts = ", ".join(repr(entry) for entry in absent[:SHOWN]) + (", …" if len(absent) > SHOWN else "")
    return [f"ignore_items: no row of the log or the item file has {texts}. Correct the ids, unless only live events have them"]


def _note_odd_ids(columns: list[Column], names: pd.DataFrame | None) -> list[str]:
    """Return a note where a few ids make all of them text: one typing error changes every id on the wire."""
    if names is None:
        return []
    texts = list(dict.fromkeys(text for column in columns for text in column.values))
    odd = [text for text in texts if parse_integers([text]) is None]
    if len(odd) >= FEW * len(texts):
        return []
    return [
        f"{columns[0].name}: all ids are text, because {len(odd):,} of {len(texts):,} are not integers, such as {odd[0]!r}. "
        "Correct these if ids should stay integers"
    ]


def _note_odd_rows(interactions: pd.DataFrame) -> list[str]:
    """Return notes where many rows repeat another one, and where the log begins too early or ends in the future."""
    notes = []
    repeats = int(interactions.duplicated(["user_id", "item_id", "timestamp"]).sum())
    if repeats > FEW * len(interactions):
        notes.append(
            f"{repeats:,} rows have user, item and time of an earlier row, and count once more. "
            "Remove them if the file holds rows twice"
        )
    if early := int((interactions["timestamp"] < ONLINE_SINCE_S).sum()):
        first_s = int(interactions["timestamp"].min())
        notes.append(
            f"the log begins on {str(np.datetime64(first_s, 's'))[:10]}: {early:,} events are before 1990. Is a time 0, "
            "or no unix time? Correct or remove them, because trends are computed over the whole span of the log"
        )
    if (last_s := int(interactions["timestamp"].max())) > time.time() + AHEAD_S:
        last = str(np.datetime64(last_s, "s"))[:16].replace("T", " ")
        notes.append(
            f"the log ends on {last} UTC, in the future: until then, live events count as older than its last ones. "
            "Correct the times; those of a time zone need their offset, such as +01:00"
        )
    return notes


def _note_seen_before(interactions: pd.DataFrame) -> list[str]:
    """Return notes where most positives repeat one of their user and item, or come after a row of both that is not positive."""
    positive, repeats = interactions["positive"].to_numpy(), find_repeats(interactions)
    notes = []
    if repeats.sum() > MOST * positive.sum():
        notes.append(
            f"{repeats.sum():,} of {positive.sum():,} positives repeat an earlier one of their user and item. What users had "
            "is not recommended to them again. If it should be, as in a grocery, set [pipeline] filter_seen = false"
        )
    firsts = positive & ~repeats
    seen_before = int(interactions.duplicated(["user_id", "item_id"]).to_numpy()[firsts].sum())
    if seen_before <= MOST * firsts.sum():
        return notes
    return [
        *notes,
        f"{seen_before:,} of {firsts.sum():,} first positives of a user and an item come after another row of the two that is "
        "not positive, such as a view. Items of such rows count as seen, and are not recommended to their users. "
        "Leave the rows out of the log, or set [pipeline] filter_seen = false",
    ]


def _read_context(column: Column) -> pd.api.extensions.ExtensionArray | np.ndarray:
    """Return Int64 [n_rows] (nullable) when every value is an integer, otherwise object [n_rows] of str."""
    numbers = parse_integers(list(column.values))
    if numbers is None:
        return column.read_texts()
    return pd.arrays.IntegerArray(np.append(numbers, 0)[column.codes], column.missing)


def _collect_entities(
    id_name: str,
    interactions: pd.DataFrame,
    columns: list[Column],
    ids: list[np.ndarray],
    ignored: list[np.ndarray],
    report: Report,
) -> pd.DataFrame:
    """Return every id of the log and of its side file, sorted: id_name int64, and its row in that file, int64, or -1.

    columns, ids, ignored: the side file's column of ids, its ids, and which rows to leave out; each empty without one
    """
    log_ids = interactions[id_name].unique()
    if not columns:
        return pd.DataFrame({id_name: np.sort(log_ids), "row": np.int64(-1)})
    column, file_ids = columns[0], ids[0]
    usable = ~column.missing
    if column.missing.any():
        report.notes.append(f"{column.path.name}: {int(column.missing.sum()):,} rows without {column.name} left out")
    if ignored:
        usable &= ~ignored[0]
    rows = pd.DataFrame({id_name: file_ids, "row": np.arange(len(file_ids))})[usable]
    repeated = rows[id_name].duplicated().to_numpy()
    if repeated.any():
        second = rows.iloc[int(np.argmax(repeated))]
        first = find_line(column.path, int(rows.loc[rows[id_name] == second[id_name], "row"].iloc[0]))
        raise column.make_fault(int(second["row"]), f"was already in row {first}", "Keep one row for each id.")
    only_in_log = log_ids[~np.isin(log_ids, rows[id_name].to_numpy())]
    if len(only_in_log):
        advice = ". They may be recommended: add rows, with available = 0 to hide them" if id_name == "item_id" else ""
        fact = f"{len(only_in_log):,} of {len(log_ids):,} {id_name}s of the log are not in {column.path.name}"
        report.notes.append(fact + advice)
    rows = pd.concat([rows, pd.DataFrame({id_name: only_in_log, "row": np.int64(-1)})])
    return rows.sort_values(id_name, ignore_index=True)


def _keep_names(names: pd.DataFrame | None, ids: pd.Series) -> pd.DataFrame | None:
    return None if names is None else names[names["id"].isin(ids)].reset_index(drop=True)


def _make_item_table(
    items: pd.DataFrame, spec: Items | None, catalogue: dict[str, Column], names: pd.DataFrame | None
) -> pd.DataFrame:
    """Return items (item_id, row) with the columns that Dataset.items describes."""
    row = items["row"].to_numpy()
    spec = spec or Items(path="", item_id="item_id")
    table = items[["item_id"]].copy()
    fallback = items["item_id"].astype(str) if names is None else names["name"]  # both sorted by id
    title = pd.Series(
        _gather(catalogue[spec.title].read_texts(), row, None) if spec.title else None, index=items.index, dtype=object
    )
    table["title"] = title.fillna(fallback)
    for role in ("category", "provider"):
        column = getattr(spec, role)
        table[role] = _gather(_read_role_texts(catalogue[column], spec), row, None) if column else None
    table["available"] = _gather(catalogue[spec.available].read_flags(), row, True) if spec.available else True
    if spec.price:
        table["price"] = _gather(catalogue[spec.price].read_prices(), row, np.nan).astype(np.float32)
    for name in spec.categorical:
        table[name] = _gather(catalogue[name].read_texts(), row, None)
    for name, separator in spec.multi_categorical.items():
        table[name] = _gather(catalogue[name].read_lists(separator), row, [])
    for name in spec.continuous:
        numbers = catalogue[name].read_prices() if name == spec.price_column else catalogue[name].read_numbers()
        table[name] = _gather(numbers, row, np.nan).astype(np.float32)
    return table


def _read_updates(items: pd.DataFrame, updated_at: Column, time_format: str | None) -> pd.Series:
    """Return when the rows of items (item_id, row) were last changed, those that say so: unix seconds by item_id."""
    times_s, _ = parse_times(updated_at, time_format)
    ahead = times_s > time.time() + AHEAD_S
    if ahead.any():
        raise updated_at.make_fault(
            int(np.argmax(ahead)),
            "is in the future",
            "Write when the row was last changed, in UTC or with its offset. Until that time, upsert would change nothing.",
        )
    row = items["row"].to_numpy()
    updates_s = pd.Series(_gather(times_s, row, 0), index=items["item_id"])
    return updates_s[~_gather(updated_at.missing, row, True)]


def _read_role_texts(column: Column, spec: Items) -> np.ndarray:
    """Return object [n_rows] of str|None: the value, or the first one of a multi_categorical column."""
    if column.name not in spec.multi_categorical:
        return column.read_texts()
    firsts = np.empty(len(column.codes), object)
    firsts[:] = [values[0] if values else None for values in column.read_lists(spec.multi_categorical[column.name])]
    return firsts


def _make_user_table(users: pd.DataFrame, spec: Users | None, user_table: dict[str, Column]) -> pd.DataFrame:
    """Return users (user_id, row) with the columns that Dataset.users describes."""
    row = users["row"].to_numpy()
    table = users[["user_id"]].copy()
    for name in spec.categorical if spec else []:
        table[name] = _gather(user_table[name].read_texts(), row, None)
    for name in spec.continuous if spec else []:
        table[name] = _gather(user_table[name].read_numbers(), row, np.nan).astype(np.float32)
    return table


def _gather(values: np.ndarray, row: np.ndarray, missing: object) -> np.ndarray:
    """Return values[row], `missing` where row is -1."""
    last = np.empty(1, values.dtype)
    last[0] = missing
    return np.concatenate([values, last])[row]
