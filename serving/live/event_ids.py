"""Recognise an event that is sent again by its id, and refuse an id that is used for two events.

The store keeps the digest of each id with the sequence and the arrival of the first event that had it, until the id expires.
"""

from __future__ import annotations

from dataclasses import dataclass

import lmdb
import numpy as np

from serving.live.events import HEADER, EventBatch, compute_digest, unpack
from serving.live.store import KEY_VALUE, Store, make_sequence_key

REUSED_ID = (
    "event_id was used for an event of another user, item or name before; expected an id of its own for each event, and the "
    "same one only when that event is sent again. Add what tells them apart, such as the item of an order: order-1/22423."
)
NO_KEY = KEY_VALUE.pack(0, -(1 << 62))  # stands for an id that is not stored
DAY_MS = 86_400_000


@dataclass(frozen=True)
class EventIds:
    """The ids of a store's events. All methods run within the caller's transaction.

    key_days: how long ids are recognised; now_ms of the methods: unix milliseconds
    """

    store: Store
    key_days: float

    def find_reused(self, txn: lmdb.Transaction[bytes], batch: EventBatch, now_ms: int) -> list[int]:
        """Return the rows of events whose id belongs to an event of another user, item or name, earlier in log or batch."""
        first_headers: dict[bytes, np.ndarray] = {}
        rows = []
        for row, digest in enumerate(batch.id_digests):
            if not digest:
                continue
            header = batch.headers[row]
            if digest not in first_headers:
                first = self._find_first(txn, digest, now_ms)
                first_headers[digest] = header if first is None else self._read_header(txn, first)
            if any(first_headers[digest][name] != header[name] for name in ("user_id", "item_id", "kind")):
                rows.append(row)
        return rows

    def assign_sequences(
        self, txn: lmdb.Transaction[bytes], batch: EventBatch, last_sequence: int, now_ms: int
    ) -> tuple[np.ndarray, np.ndarray, dict[bytes, int]]:
        """Return each event's sequence int64 [N], whether it is new bool [N], and the sequences of new ids by digest."""
        if not any(batch.event_ids):
            return np.arange(last_sequence + 1, last_sequence + 1 + len(batch)), np.ones(len(batch), bool), {}
        sequences, is_new = np.empty(len(batch), np.int64), np.ones(len(batch), bool)
        added: dict[bytes, int] = {}
        for row, digest in enumerate(batch.id_digests):
            first_sequence = (added.get(digest) or self._find_first(txn, digest, now_ms)) if digest else None
            if first_sequence is None:
                last_sequence += 1
                if digest:
                    added[digest] = last_sequence
            is_new[row], sequences[row] = first_sequence is None, first_sequence or last_sequence
        return sequences, is_new, added

    def add(self, txn: lmdb.Transaction[bytes], sequences: dict[bytes, int], now_ms: int) -> None:
        """Remember new ids. sequences: by digest"""
        for digest, sequence in sequences.items():
            txn.put(digest, KEY_VALUE.pack(sequence, now_ms), db=self.store.keys)

    def forget_expired(self, txn: lmdb.Transaction[bytes], done: int, now_ms: int, most: int) -> int:
        """Remove ids that have expired, at most `most`. done: the sequence up to which that is done. Return the new one."""
        cursor, expired_ms = txn.cursor(self.store.events), self._find_expiry_ms(now_ms)
        if not cursor.set_range(make_sequence_key(done + 1)):
            return done
        for key, packed in cursor.iternext(keys=True, values=True):
            if not most or np.frombuffer(packed, HEADER, 1)["received_ms"][0] > expired_ms:
                break
            done, most = int.from_bytes(key, "big"), most - 1
            if event_id := unpack([packed]).event_ids[0]:
                forget_id(txn, self.store, event_id, done)
        return done

    def _find_first(self, txn: lmdb.Transaction[bytes], digest: bytes, now_ms: int) -> int | None:
        """Return the sequence of the first event with an id; None for an id that is new, or has expired."""
        sequence, arrived_ms = KEY_VALUE.unpack(txn.get(digest, db=self.store.keys) or NO_KEY)
        return sequence if arrived_ms > self._find_expiry_ms(now_ms) else None

    def _read_header(self, txn: lmdb.Transaction[bytes], sequence: int) -> np.ndarray:
        packed = txn.get(make_sequence_key(sequence), db=self.store.events)
        assert packed is not None  # an event and its id leave the store in one transaction
        return np.frombuffer(packed, HEADER, 1)[0]

    def _find_expiry_ms(self, now_ms: int) -> int:
        return now_ms - round(self.key_days * DAY_MS)


def forget_id(txn: lmdb.Transaction[bytes], store: Store, event_id: bytes, sequence: int) -> bool:
    """Forget the id of an event, within a transaction. Return whether it was known.

    An id that has expired may belong to a later event, maybe of another user, by now. Then it stays.
    """
    digest = compute_digest(event_id)
    return KEY_VALUE.unpack(txn.get(digest, db=store.keys) or NO_KEY)[0] == sequence and txn.delete(digest, db=store.keys)
