"""Archive the older part of the log as Parquet files, and read archive and store as one log.

A segment is written to a temporary file, made durable and renamed before its events leave the store. A crash in between leaves
events in both places; readers skip the copies by their sequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from serving.contract.durable import replace_durably
from serving.contract.errors import ArtifactError, ConfigError
from serving.live.events import HEADER, OBSERVED, EventBatch, Flags, unpack
from serving.live.reader import Reader, Snapshot
from serving.live.sequences import hash_machine, unpack_sequence
from serving.live.store import ARCHIVE
from serving.live.writer import Writer

EVENTS_PER_SEGMENT = 1_000_000
LAST_SEQUENCE = LATEST_MS = (1 << 63) - 1
EVENTS_PER_READ = 65_536
CLOCK_ERROR_MS = 86_400_000  # by which the clock may have been wrong when an event arrived
FILE_NAME = re.compile(r"events-(\d+)-(\d+)\.parquet")  # sequences of the first and the last event
TYPES = ("observed", "item changed", "user changed", "user evicted", "item forgotten")  # by the type's code in HEADER
FLAGS = {
    "positive": Flags.POSITIVE,
    "seen": Flags.SEEN,
    "late": Flags.LATE,
    "counted": Flags.COUNTED,
    "erased": Flags.ERASED,
    "kafka": Flags.KAFKA,
    "returned": Flags.RETURNED,
}
NUMBERS = ("user_id", "item_id", "time_ms", "received_ms", "value", "weight", "label")
BYTES = {"event_ids": "event_id", "request_ids": "request_id", "columns": "columns"}  # EventBatch's field -> segment's column


@dataclass(frozen=True)
class Segment:
    """One closed file of the archive. first, last: sequences of its first and last event"""

    path: Path
    first: int
    last: int

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size


def list_segments(folder: Path) -> list[Segment]:
    """Return the archive's segments in the order of the log. Raises ArtifactError for a file with another name."""
    segments = []
    for path in (folder / ARCHIVE).glob("events-*.parquet"):
        if (match := FILE_NAME.fullmatch(path.name)) is None:
            raise ArtifactError(
                f"{path} is no segment of the archive; expected events-FIRST-LAST.parquet, with the sequences of its first and "
                "last event. Move it out of the folder; its events are then left out, and erasures do not reach it."
            )
        segments.append(Segment(path, int(match[1]), int(match[2])))
    return sorted(segments, key=lambda segment: segment.first)


def read_log(folder: Path, after: int = 0, most: int = EVENTS_PER_READ) -> Iterator[tuple[np.ndarray, EventBatch]]:
    """Yield (sequences int64 [N], events) of archive and store after the sequence `after`, in order, each event once.

    most: the largest N. Events that are moved into the archive meanwhile are not missed. A segment that retention removes
    before it is opened is left out, as if the log had been read afterwards.
    """
    with closing(Reader(folder)) as reader:
        while True:
            with reader.snapshot() as snapshot:
                names = snapshot.read_event_names()
                rows = [(sequence, bytes(packed)) for sequence, packed in islice(snapshot.read_events(after), most)]
            # Listed after the snapshot: an event that had left the store by then is in one of these segments.
            segments = [segment for segment in list_segments(folder) if segment.last > after]
            archived = [segment for segment in segments if not rows or segment.first < rows[0][0]]
            for segment in archived:
                try:
                    yield from read_segment(segment, names, after, most)
                except FileNotFoundError:
                    if segment in list_segments(folder):  # retention did not remove it: it is a link to a missing file
                        raise
                    break  # read store and archive again, in case the store still has the segment's events
                after = segment.last
            if archived:
                continue
            if not rows:
                return
            yield np.array([sequence for sequence, _ in rows]), unpack(packed for _, packed in rows)
            after = rows[-1][0]


def find_start(folder: Path, since_ms: int) -> int:
    """Return a sequence after which the log has all events that arrived since `since_ms` (unix milliseconds).

    Some earlier events come after it too, because the clock may have been wrong by CLOCK_ERROR_MS.
    """
    earliest_ms, start = since_ms - CLOCK_ERROR_MS, 0
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        if start := snapshot.find_last_before(earliest_ms):
            return start  # events in the archive are older
    for segment in list_segments(folder):
        if read_latest_arrival_ms(segment) >= earliest_ms:
            break
        start = segment.last
    return start


def read_segment(
    segment: Segment, names: Sequence[str], after: int = 0, most: int = EVENTS_PER_READ
) -> Iterator[tuple[np.ndarray, EventBatch]]:
    """Yield (sequences int64 [N], events) of a segment after the sequence `after`.

    names: names of the event kinds, by code; most: the largest N
    Raises ArtifactError for a damaged file.
    """
    with name_damaged(segment.path):
        file = pq.ParquetFile(segment.path)
        for part in file.iter_batches(EVENTS_PER_READ, find_groups(file, after)):
            new = part.filter(pc.greater(part["sequence"], after))
            for start in range(0, len(new), most):
                yield from_table(pa.Table.from_batches([new.slice(start, most)]), names)


def find_groups(file: pq.ParquetFile, after: int) -> list[int]:
    """Return the row groups with events after the sequence `after`: whoever reads on in a segment begins there."""
    column = file.schema_arrow.names.index("sequence")
    last = [file.metadata.row_group(group).column(column).statistics.max for group in range(file.num_row_groups)]
    return [group for group, sequence in enumerate(last) if sequence > after]


@contextmanager
def name_damaged(path: Path) -> Iterator[None]:
    """Raise ArtifactError where a segment cannot be read in the block; one that is gone stays a FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, ValueError, KeyError, OSError) as error:  # also where columns or events are another store's
        reason = str(error).rstrip(".")
        if isinstance(error, OSError) and error.errno is not None:  # the system refused it: the file may be intact
            raise ArtifactError(f"{path} cannot be read: {reason}. Correct that, and try again.") from error
        raise ArtifactError(
            f"{path} is damaged and cannot be read: {reason}. Put the file back from a backup, or move it away; its events are "
            "then left out, and erasures do not reach it."
        ) from error


def write_segment(folder: Path, sequences: np.ndarray, batch: EventBatch, names: Sequence[str]) -> Segment:
    """Write events as a closed segment, as a whole or not at all, and make it durable. sequences: int64 [N] ascending"""
    archive = folder / ARCHIVE
    archive.mkdir(mode=0o700, exist_ok=True)
    first, last = int(sequences[0]), int(sequences[-1])
    path = archive / f"events-{first:012d}-{last:012d}.parquet"
    write_table(path, to_table(sequences, batch, names))
    return Segment(path, first, last)


def write_table(path: Path, table: pa.Table) -> None:
    """Replace a Parquet file as a whole, readable by its owner alone."""
    with replace_durably(path) as file:
        pq.write_table(table, file, row_group_size=EVENTS_PER_READ, compression="zstd")


def export_log(folder: Path, target: Path, after: int = 0) -> int:
    """Write the log after the sequence `after` into one Parquet file, as `write_table` does. Return the number of its events.

    Raises ConfigError if there is none or `target` cannot be written, ArtifactError if the log cannot be read.
    """
    tables = read_tables(folder, after)
    if (first := next(tables, None)) is None:
        raise ConfigError(f"The log in {folder} has no event after {after}; nothing was written.")
    try:  # a failure leaves an earlier export as it was
        with replace_durably(target) as file, pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
            for table in chain([first], tables):
                writer.write_table(table)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}. Name a file in a folder with enough space.") from error
    return pq.read_metadata(target).num_rows


def find_log_place(folder: Path, sequence: int) -> int:
    """Return the place in a store's log of a sequence that `observe` or `upsert` returned; a place is returned as it is.

    Raises ConfigError for a sequence of another log: another machine's, or that of events that a restore has lost.
    """
    origin = unpack_sequence(sequence)
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        numbers = {0, hash_machine(snapshot.read_machine())}
        numbers |= {hash_machine(name) for name, last in snapshot.read_former_machines() if origin.place <= last}
    if origin.machine in numbers:
        return origin.place
    raise ConfigError(
        f"{sequence} is no sequence of the log in {folder}: another machine returned it, or it is of an event that was lost "
        "when a backup was restored. Expected one that this machine returned, or a place in this log."
    )


def read_tables(folder: Path, after: int) -> Iterator[pa.Table]:
    """Yield the log after the sequence `after` as tables, in order (`to_table`). Raises ArtifactError if it cannot be read."""
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        names = snapshot.read_event_names()
    try:
        for sequences, batch in read_log(folder, after):
            yield to_table(sequences, batch, names)
    except OSError as error:
        raise ArtifactError(f"The log in {folder} cannot be read: {error}. Correct that, and try again.") from error


def to_table(sequences: np.ndarray, batch: EventBatch, names: Sequence[str]) -> pa.Table:
    """Return events as a table for people: names instead of codes, one column per flag. sequences: int64 [N]"""
    headers = batch.headers
    observed = headers["type"] == OBSERVED
    columns: dict[str, object] = {"sequence": sequences, "type": [TYPES[code] for code in headers["type"]]}
    columns["event"] = [names[code] if is_event else None for code, is_event in zip(headers["kind"], observed, strict=True)]
    columns |= {name: np.ascontiguousarray(headers[name]) for name in NUMBERS}
    columns |= {name: (headers["flags"] & flag) != 0 for name, flag in FLAGS.items()}
    columns |= {name: pa.array(getattr(batch, field), pa.binary()) for field, name in BYTES.items()}
    return pa.table(columns)


def from_table(table: pa.Table, names: Sequence[str]) -> tuple[np.ndarray, EventBatch]:
    """Return (sequences int64 [N], events) of a table that `to_table` made. names: names of the event kinds, by code"""
    headers = np.zeros(len(table), HEADER)
    headers["type"] = [TYPES.index(name) for name in table["type"].to_pylist()]
    headers["kind"] = [0 if name is None else names.index(name) for name in table["event"].to_pylist()]
    for name in NUMBERS:
        headers[name] = table[name].to_numpy()
    for name, flag in FLAGS.items():
        headers["flags"] |= np.where(table[name].to_numpy(), flag, 0).astype(np.uint16)
    texts = [table[name].to_pylist() for name in BYTES.values()]
    for name, values in zip(BYTES.values(), texts, strict=True):
        headers[f"{name}_bytes"] = [len(value) for value in values]
    return table["sequence"].to_numpy(), EventBatch(headers, *texts)


def compact(writer: Writer, older_than_ms: int) -> tuple[int, list[Segment]]:
    """Move events that arrived before `older_than_ms` into the archive. Return their number and their segments.

    Their event ids are forgotten, so move only events that no caller will send again.
    """
    store, n_moved = writer.store, 0
    segments: list[Segment] = []
    with closing(Reader(store.folder)) as reader:
        while True:
            archived = max((segment.last for segment in list_segments(store.folder)), default=0)
            writer.remove_events(archived)  # a crash may have left them in both places
            with reader.snapshot() as snapshot:
                names = snapshot.read_event_names()
                rows = read_before(snapshot, older_than_ms, writer.now_ms())
            batch = unpack(packed for _, packed in rows)
            count = count_older(batch.headers["received_ms"], older_than_ms)
            if not count:
                return n_moved, segments
            sequences = np.array([sequence for sequence, _ in rows[:count]])
            segments.append(write_segment(store.folder, sequences, batch.take(np.arange(count)), names))
            n_moved += count


def read_before(snapshot: Snapshot, older_than_ms: int, now_ms: int) -> list[tuple[int, bytes]]:
    """Return (sequence, packed event) of the log's first events, at most EVENTS_PER_SEGMENT.

    Reading stops before the first event that arrived between `older_than_ms` and `now_ms`, because a long read keeps LMDB from
    reusing old pages, so that its file grows. An arrival after `now_ms` was stamped by a wrong clock, and does not stop it.
    """
    rows: list[tuple[int, bytes]] = []
    for sequence, packed in islice(snapshot.read_events(), EVENTS_PER_SEGMENT):
        if older_than_ms <= np.frombuffer(packed, HEADER, 1)["received_ms"][0] <= now_ms:
            break
        rows.append((sequence, bytes(packed)))
    return rows


def count_older(received_ms: np.ndarray, older_than_ms: int) -> int:
    """Return how many of the events of `read_before` to archive: all up to the last that arrived before `older_than_ms`.

    received_ms: int64 [N] in the log's order

    The clock may have been wrong when they arrived. An event whose clock was slow is archived no sooner than the events before
    it. An event that a fast clock stamped with a time still to come is archived with the next event that is old enough.
    """
    older = np.flatnonzero(received_ms < older_than_ms)
    return int(older[-1]) + 1 if len(older) else 0


def drop_segments(folder: Path, older_than_ms: int | None, most_bytes: int | None, now_ms: int = LATEST_MS) -> list[Segment]:
    """Remove segments whose events all arrived before `older_than_ms`, then the oldest until at most `most_bytes` are left.

    None: no such bound; now_ms: see `read_latest_arrival_ms`. Return the removed segments.
    """
    kept_segments, dropped_segments = list_segments(folder), []
    while kept_segments:
        oldest = kept_segments[0]
        too_old = older_than_ms is not None and read_latest_arrival_ms(oldest, now_ms) < older_than_ms
        too_much = most_bytes is not None and sum(segment.bytes for segment in kept_segments) > most_bytes
        if not (too_old or too_much):
            break
        oldest.path.unlink()
        dropped_segments.append(kept_segments.pop(0))
    return dropped_segments


def read_latest_arrival_ms(segment: Segment, now_ms: int = LATEST_MS) -> int:
    """Return when a segment's latest event arrived, in unix milliseconds.

    Arrivals after `now_ms` do not count, unless most of them are: then the clock is behind now, and was right.
    Raises ArtifactError for a damaged file.
    """
    with name_damaged(segment.path):
        facts = pq.ParquetFile(segment.path)
        column = facts.schema_arrow.names.index("received_ms")
        latest_ms = max(facts.metadata.row_group(group).column(column).statistics.max for group in range(facts.num_row_groups))
        if latest_ms <= now_ms:  # the usual case, for which the file's statistics are enough
            return latest_ms
        received_ms = facts.read(["received_ms"])["received_ms"].to_numpy()
    past_ms = received_ms[received_ms <= now_ms]
    return int(past_ms.max()) if 2 * len(past_ms) > len(received_ms) else latest_ms
