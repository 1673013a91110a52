"""Recompute the state from the log, and compare it with the store, byte for byte."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np

from live.archive import read_log
from live.maintenance import REPLAYING, lock
from serving.contract.errors import ConfigError
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.store import ARCHIVE, PROGRESS, Progress, Store, open_store
from serving.live.writer import Writer

STATE = ("users", "seeds", "items", "seen", "columns", "changes")  # databases that the log determines


@dataclass(frozen=True)
class Replayed:
    """The result of a replay: events of the log, and records of the store that differ from the replayed ones, by database."""

    events: int
    differing: dict[str, int]

    @property
    def is_equal(self) -> bool:
        return not any(self.differing.values())


@dataclass(frozen=True)
class StoredSeeds:
    """Gives users the first records that a store keeps as seeds."""

    reader: Reader

    def make_first_records(self, user_ids: np.ndarray, layout: Layout) -> np.ndarray:
        """Return the first records [N] of users, int64 [N]."""
        records = layout.make_empty_users(len(user_ids))
        with self.reader.snapshot() as snapshot:
            rows, seeds = snapshot.read_seeds(user_ids)
        records[rows] = seeds
        return records


def replay(folder: Path, repair: bool = False) -> Replayed:
    """Recompute the state from the whole log in a temporary store, and compare. repair: replace databases that differ.

    Raises ConfigError, and changes nothing, when the log lacks events, or when events arrived meanwhile: the replayed state
    would then lack their effects.
    """
    with lock(folder, wait=True):  # otherwise a repair would bring back a user who is erased meanwhile
        return replay_unchanged(folder, repair)


def replay_unchanged(folder: Path, repair: bool) -> Replayed:
    """Do what `replay` says, while the caller holds the lock of maintenance."""
    with closing(Reader(folder)) as reader, tempfile.TemporaryDirectory(dir=folder, prefix=REPLAYING) as folder_beside:
        with reader.snapshot() as snapshot:
            names = snapshot.read_event_names()
        store = open_store(folder)
        with (
            closing(store),
            closing(Writer(Path(folder_beside, "store"), store.read_layout(), names, StoredSeeds(reader))) as writer,
        ):
            n_events, last_sequence = 0, store.read_progress().last_sequence
            for sequences, batch in read_log(folder):
                refuse_gap(folder, n_events, int(sequences[0]))
                n_events += len(batch)
                with writer.transaction() as txn:
                    writer.apply(txn, batch, sequences)
            if n_events < last_sequence:
                refuse_gap(folder, n_events, last_sequence + 1)
            differing = {name: count_differences(store, writer.store, name) for name in STATE}
            with store.env.begin(write=repair) as txn:
                refuse_new_events(txn, store, n_events)
                if repair:
                    replace_databases(writer.store, txn, store, [name for name, count in differing.items() if count])
    return Replayed(n_events, differing)


def refuse_gap(folder: Path, n_events: int, sequence: int) -> None:
    """Raise ConfigError unless the event with this sequence is the one that follows the first `n_events` events."""
    if sequence != n_events + 1:
        raise ConfigError(
            f"The log in {folder} lacks events {n_events + 1} to {sequence - 1}, which the archive no longer has ([live] "
            "archive_days, archive_bytes). Expected all of them, because the state is computed from every event since the "
            f"first. Put their segments back into {folder / ARCHIVE}, or keep the store as it is."
        )


def refuse_new_events(txn: lmdb.Transaction, store: Store, n_events: int) -> None:
    """Raise ConfigError when a store has more events than the replayed ones."""
    last_sequence = Progress.unpack(txn.get(PROGRESS, db=store.meta)).last_sequence
    if last_sequence != n_events:
        raise ConfigError(
            f"{last_sequence - n_events} events arrived during the replay of {n_events}; expected none. Nothing was changed. "
            "Stop the server and its helpers (`make stop`), and run it again."
        )


def count_differences(one: Store, other: Store, name: str) -> int:
    """Return the number of (key, value) pairs of a database that only one of two stores has."""
    with one.env.begin(db=getattr(one, name)) as txn, other.env.begin(db=getattr(other, name)) as other_txn:
        pairs, others = read_pairs(txn, name), read_pairs(other_txn, name)
    return len(pairs ^ others)


def read_pairs(txn: lmdb.Transaction, name: str) -> set[tuple[bytes, bytes]]:
    """Return all (key, value) pairs of a database; of `changes`, only the latest of each item and user, which alone matter."""
    pairs = [(bytes(key), bytes(value)) for key, value in txn.cursor()]
    return set({value: (key, value) for key, value in pairs}.values()) if name == "changes" else set(pairs)


def replace_databases(source: Store, txn: lmdb.Transaction, target: Store, names: list[str]) -> None:
    """Replace databases of the store `target` by those of `source`, within a write transaction of `target`."""
    with source.env.begin() as from_txn:
        for name in names:
            database = getattr(target, name)
            txn.drop(database, delete=False)
            txn.cursor(database).putmulti(from_txn.cursor(getattr(source, name)))
