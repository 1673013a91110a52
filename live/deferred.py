"""Keep the users and items whose events wait because their keys in Redis cannot be read, in the metadata of the store.

live/sharing.py defers an entity before it states a later position of the log, and resumes it once the key can be read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from serving.contract.errors import DependencyError
from serving.live.shared.feast_views import View
from serving.live.store import Store
from serving.live.writer import Writer

DEFERRED = b"deferred "  # then join key and id -> the sequence after which the entity's events wait
MOST_DEFERRED = 1_000  # more bad keys are a fault of Redis or of another writer; sharing stops until it is corrected


class Deferred(NamedTuple):
    """A user or an item whose events wait, and the key under which the store's metadata holds it. join_key: of the view"""

    join_key: str
    entity_id: int

    def pack(self) -> bytes:
        return DEFERRED + f"{self.join_key} {self.entity_id}".encode()

    @classmethod
    def unpack(cls, packed: bytes) -> Deferred:
        join_key, entity_id = packed.removeprefix(DEFERRED).decode().split()
        return cls(join_key, int(entity_id))


def read_deferred(store: Store) -> dict[Deferred, int]:
    """Return the sequence after which the events of each deferred user and item wait."""
    deferred = {}
    with store.env.begin() as txn:
        cursor = txn.cursor(store.meta)
        if cursor.set_range(DEFERRED):
            for key, sequence in cursor.iternext():
                if not key.startswith(DEFERRED):
                    break
                deferred[Deferred.unpack(key)] = int(sequence)
    return deferred


def defer(writer: Writer, view: View, entity_ids: Collection[int], after: int) -> set[int]:
    """Let the events of entities after a sequence wait. Return the ids that did not wait before.

    Raises DependencyError, and defers nothing, if there would be more than MOST_DEFERRED.
    """
    deferred = read_deferred(writer.store)
    added = {Deferred(view.join_key, entity_id) for entity_id in entity_ids}
    if len(deferred.keys() | added) > MOST_DEFERRED:
        raise DependencyError(
            f"Redis has more than {MOST_DEFERRED:,} users and items whose keys cannot be read. Expected hashes as Feast writes "
            "them. `python -m live inspect` lists the first of these keys. Correct their writer, and remove these keys."
        )
    _write(writer, {each: after for each in added if deferred.get(each, after + 1) > after})
    return {each.entity_id for each in added - deferred.keys()}


def advance(writer: Writer, view: View, afters: Mapping[int, int]) -> None:
    """Let only later events of deferred entities wait. afters: id -> the sequence after which its events wait from now on"""
    _write(writer, {Deferred(view.join_key, entity_id): after for entity_id, after in afters.items()})


def resume(writer: Writer, view: View, entity_ids: Collection[int]) -> int:
    """Let the events of entities no longer wait. Return how many of the entities had been deferred."""
    with writer.transaction() as txn:
        return sum(txn.delete(Deferred(view.join_key, each).pack(), db=writer.store.meta) for each in entity_ids)


def _write(writer: Writer, afters: Mapping[Deferred, int]) -> None:
    if afters:
        with writer.transaction() as txn:
            for each, after in afters.items():
                txn.put(each.pack(), str(after).encode(), db=writer.store.meta)
