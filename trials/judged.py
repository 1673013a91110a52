"""Read the answers and events of a running experiment again and again: only new ones, of as many users as fit into memory."""

from __future__ import annotations

import time
from math import inf
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from live.archive import find_start, read_log
from live.exposures import FOLDER, SCHEMA, list_exposure_files, parse_written_ms, read_file
from repository.file_stamps import Stamp, read_stamp
from serving.live.events import OBSERVED, EventBatch
from serving.live.experiment import Experiment
from serving.live.reader import Reader

WAITS_MS = 600_000  # how long an event waits for its answer, which a gateway writes within seconds
MOST_PARTS = 8  # parts of the log in memory, 65,536 events each
MOST_ANSWERS = 400_000  # in memory; some 300 MB while they are judged
COLUMNS = (
    *("request_id", "time_ms", "user_id", "generation", "degraded", "experiment", "arm"),
    *("item_ids", "teams", "latency_ms", "assignment"),
)


class JudgedEvents:
    """The events that react to the answers of the running experiment. folder: of the live store

    An event may arrive before a gateway writes the answer. So an event without an answer is kept for WAITS_MS.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version: tuple[str, int] | None = None
        self._last = 0  # sequence of the last event that was read
        self._kept = EventBatch.join([])

    def read(self, experiment: Experiment, answers: pa.Table) -> list[tuple[np.ndarray, EventBatch]]:
        """Read the events since the last call. Return those of all calls, as `join_feedback` takes them.

        answers: from `JudgedAnswers.read`
        """
        if not Reader(self._folder).exists():
            return []
        version = experiment.name, experiment.changed_ms
        if version != self._version:
            self._version, self._kept = version, EventBatch.join([])
            self._last = find_start(self._folder, experiment.changed_ms)
        parts, known = [self._kept], set(answers["request_id"].cast(pa.binary()).to_pylist())
        now_ms = time.time_ns() // 1_000_000
        for sequences, batch in read_log(self._folder, self._last):
            parts.append(take_reactions(batch))
            self._last = int(sequences[-1])
            if len(parts) == MOST_PARTS:
                parts = [take_known(EventBatch.join(parts), known, now_ms)]
        self._kept = take_known(EventBatch.join(parts), known, now_ms)
        return [(np.arange(len(self._kept)), self._kept)]


def take_reactions(batch: EventBatch) -> EventBatch:
    """Return the observed events that name an answer, without user ids and other texts: an erasure cannot reach memory."""
    observed = np.flatnonzero(batch.headers["type"] == OBSERVED).tolist()
    rows = [row for row in observed if batch.request_ids[row]]
    headers, blanks = batch.headers[rows], [b""] * len(rows)
    headers["user_id"] = 0
    return EventBatch(headers, blanks, [batch.request_ids[row] for row in rows], blanks)


def take_known(events: EventBatch, answers: set[bytes], now_ms: int) -> EventBatch:
    """Return the events that name one of `answers`, and those whose answer may still be written.

    answers: request ids; now_ms: unix milliseconds. Events that a fast clock stamped with a time still to come cannot make the
    others seem old, and wait no longer than until the clock is right.
    """
    received_ms = events.headers["received_ms"]
    latest_ms = min(received_ms.max(initial=0), now_ms)
    is_known = np.fromiter((request_id in answers for request_id in events.request_ids), bool, len(events))
    return events.take(np.flatnonzero(is_known | (np.abs(received_ms - latest_ms) < WAITS_MS)))


class JudgedAnswers:
    """The answers of the running experiment. folder: of the live store; most: answers in memory

    Whenever there are more than `most`, half of the users are left out, with all of their answers. A hash of the user id
    chooses them, so that the choice does not depend on what users did.
    """

    def __init__(self, folder: Path, most: int = MOST_ANSWERS) -> None:
        self._folder, self._most = folder / FOLDER, most
        self._version: tuple[str, int] | None = None
        self._tables: dict[Path, tuple[Stamp | None, pa.Table]] = {}
        self._share = 1.0

    @property
    def share(self) -> float:
        """Share of the users whose answers the last call of `read` returned."""
        return self._share

    def read(self, experiment: Experiment, until_ms: float = inf) -> pa.Table:
        """Return the answers since the experiment's last change, with COLUMNS and an empty `sources`. Raises ArtifactError.

        until_ms: time after which gateways wrote none of its answers, unix milliseconds
        """
        version = experiment.name, experiment.changed_ms
        if version != self._version:
            self._version, self._tables, self._share = version, {}, 1.0
        paths = list_exposure_files(self._folder)
        listed = [path for path in paths if experiment.changed_ms <= parse_written_ms(path) <= until_ms]
        self._tables = {path: self._tables[path] for path in listed if path in self._tables}  # merged files are not listed
        count = sum(len(table) for _, table in self._tables.values())
        answer_filter = (pc.field("experiment") == experiment.name) & (pc.field("time_ms") >= experiment.changed_ms)
        for path in listed:
            stamp = read_stamp(path)  # before the file is read: an erasure that replaces it meanwhile changes the stamp
            if path in self._tables and self._tables[path][0] == stamp:
                continue
            if (table := read_file(path, COLUMNS)) is not None:
                count -= len(self._tables[path][1]) if path in self._tables else 0
                self._tables[path] = stamp, take_users(table.filter(answer_filter), self._share)
                count += len(self._tables[path][1])
                if count > self._most:
                    count = self._leave_out()
        tables = [table for _, table in self._tables.values()]
        answers = pa.concat_tables([SCHEMA.empty_table().select(COLUMNS), *tables]).combine_chunks()
        return answers.append_column("sources", pa.nulls(len(answers), SCHEMA.field("sources").type))

    def _leave_out(self) -> int:
        """Leave out half of the users, again and again until at most `most` answers are left. Return their number."""
        while True:
            self._share /= 2
            self._tables = {path: (stamp, take_users(table, self._share)) for path, (stamp, table) in self._tables.items()}
            if (count := sum(len(table) for _, table in self._tables.values())) <= self._most:
                return count


def take_users(answers: pa.Table, share: float) -> pa.Table:
    """Return all answers of a share of the users. Answers of erased users, who have no id, are chosen one by one."""
    ids = pc.coalesce(answers["user_id"], answers["time_ms"]).to_numpy().astype(np.uint64)
    return answers if share == 1.0 else answers.filter(hash_ids(ids) < np.uint64(share * 2**64))


def hash_ids(ids: np.ndarray) -> np.ndarray:
    """Return a hash of each id, uint64. ids: uint64. This is the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    mixed = ids + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
