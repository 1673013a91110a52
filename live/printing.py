"""Print what a live store holds, for the commands of `python -m live`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping

import numpy as np
from rich.console import Console
from rich.table import Table

from serving.contract.ids import NAME
from serving.contract.tensors import PAD_ID
from serving.live.events import ITEM_CHANGED, USER_CHANGED
from serving.live.reader import Change, Snapshot

out = Console(soft_wrap=True, highlight=False, markup=False)  # names of events are not markup


def show_user(snapshot: Snapshot, user: str, user_id: int, item_texts: Mapping[int, str]) -> None:
    """Print a user's events and history, and the columns that upsert set.

    user: the id as the shop writes it; item_texts: published items' ids likewise, by `item_id`
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
            table.add_row(text or str(item_id), format_time(1000 * int(second)))
    out.print(table)


def show_columns(change: Change) -> None:
    """Print the columns that upsert set, and when."""
    if not change.columns:
        out.print("Upsert has set no column.")
        return
    table = Table("column", "value", "set")
    for name, value in sorted(change.columns.items()):
        table.add_row(name, json.dumps(value, ensure_ascii=False), format_time(change.set_ms[name]))
    out.print(table)


def describe_oldest(changes: Iterable[Change]) -> str:
    """Return text that follows the number of changes: when the oldest of their columns was set; "" without any."""
    times_ms = [change.set_ms[name] for change in changes for name in change.columns]
    return f", the oldest column {format_time(min(times_ms))}" if times_ms else ""


def format_time(time_ms: int) -> str:
    """Return a time as text; "never" for 0. time_ms: unix milliseconds"""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_ms / 1000)) if time_ms else "never"


def describe_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count) or "none"
