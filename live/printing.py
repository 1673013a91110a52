"""Print what a live store holds, for the commands of `python -m live`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from live.archive import list_segments
from live.deferred import read_deferred
from serving.contract.ids import NAME
from serving.contract.tensors import PAD_ID
from serving.live.admission import format_ms
from serving.live.events import ITEM_CHANGED, USER_CHANGED
from serving.live.reader import Change, Snapshot
from serving.live.shared.feast_views import ITEMS_VIEW, USERS_VIEW
from serving.live.shared.redis_state import RedisState
from serving.live.store import open_store

out = Console(soft_wrap=True, highlight=False, markup=False)  # brackets in the names of events must not be read as markup


def show_user(snapshot: Snapshot, user: str, user_id: int, item_texts: Mapping[int, str]) -> None:
    """Print a user's events and history, and the columns that upsert set.

    user: the id as the shop writes it; item_texts: the same for published items, by the id on the wire
    """
    change = snapshot.read_change(USER_CHANGED, user_id)
    if change.columns:
        show_columns(change)
    rows, records = snapshot.read_users(np.array([user_id]))
    if not rows:
        out.print(f"User {user} has no live events.")
        return
    record = records[0]
    out.print(f"User {user}: {record['event_count']} events, the latest at {format_time(int(record['last_ms']))}")
    table = Table("item", "when")
    for item_id, second in zip(record["history_ids"], record["history_s"], strict=True):
        if item_id != PAD_ID:
            text = item_texts.get(int(item_id)) or snapshot.read_change(ITEM_CHANGED, int(item_id)).columns.get(NAME)
            table.add_row(make_printable(text or str(item_id)), format_time(1000 * int(second)))
    out.print(table)


def show_store(folder: Path, snapshot: Snapshot) -> None:
    """Print the sizes and clocks of a store."""
    progress = snapshot.read_progress()
    archived, changes = list_segments(folder), snapshot.read_changes(after=0)
    with closing(open_store(folder)) as store:
        store_bytes = store.measure_size_bytes()
    facts = {
        "events ever": f"{progress.accepted:,}",
        "of these late": f"{progress.late:,}",
        "repeated event ids": f"{progress.repeated:,}",
        "last place in the log": f"{progress.last_sequence:,}",
        "clock (watermark)": format_time(progress.watermark_ms),
        "latest event": format_time(progress.latest_ms),
        "names of events": ", ".join(snapshot.read_event_names()),
        "users": f"{len(snapshot.list_users()):,}",
        "items with events": f"{len(snapshot.read_all_items()[0]):,}",
        "items and users changed by upsert": f"{len(changes):,}{describe_oldest(changes)}",
        "archived events": f"{sum(s.last - s.first + 1 for s in archived):,} in {len(archived)} segments",
        "archive bytes": f"{sum(s.bytes for s in archived):,}",
        "store bytes": f"{store_bytes:,}",
    }
    table = Table(show_header=False, box=None)
    for name, text in facts.items():
        table.add_row(name, text)
    out.print(table)


def show_deferred(folder: Path, shared: RedisState) -> None:
    """Print the users and items whose events wait because their keys in Redis cannot be read, if there are any."""
    with closing(open_store(folder)) as store:
        deferred = read_deferred(store)
    views = {view.join_key: view for view in (USERS_VIEW, ITEMS_VIEW)}
    if deferred:
        out.print("Keys in Redis that this machine could not read, as redis-cli takes them. Their events wait.")
    for (join_key, entity_id), after in sorted(deferred.items()):
        key = shared.make_key(views[join_key], entity_id)
        out.print(f"{join_key} {entity_id}, events after sequence {after}: {quote_key(key)}")


def make_printable(text: str) -> str:
    """Return a text of a shop with control and formatting characters written out, such as \\x1b: a terminal would obey them."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def quote_key(key: bytes) -> str:
    """Return a key in the quoted form of redis-cli's interactive mode."""
    parts = (chr(byte) if chr(byte).isalnum() and byte < 128 else f"\\x{byte:02x}" for byte in key)
    return f'"{"".join(parts)}"'


def show_columns(change: Change) -> None:
    """Print the columns that upsert set, and when."""
    if not change.columns:
        out.print("Upsert has set no column.")
        return
    table = Table("column", "value", "set")
    for name, value in sorted(change.columns.items()):
        value_text = make_printable(json.dumps(value, ensure_ascii=False))
        table.add_row(make_printable(name), value_text, format_time(change.set_ms[name]))
    out.print(table)


def describe_oldest(changes: Iterable[Change]) -> str:
    """Return when the oldest column of the changes was set, as text to follow their number; "" if there is no column."""
    times_ms = [change.set_ms[name] for change in changes for name in change.columns]
    return f", the oldest column {format_time(min(times_ms))}" if times_ms else ""


def format_time(time_ms: int) -> str:
    """Return a time as text; "never" for 0. time_ms: unix milliseconds"""
    return format_ms(time_ms) if time_ms else "never"


def describe_counts(counts: Mapping[str, int]) -> str:
    """Return counts as text, without zeros; "none" if all are zero."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count) or "none"
