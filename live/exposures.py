"""The exposure log: what was shown to whom, by which generation. Parquet files in `<repository>.live/exposures`.

An answer is kept when it belongs to an experiment, or when a hash of its request id falls into the logged share. Rows are
gathered in memory and written every FLUSH_ROWS rows or FLUSH_S seconds; maintenance merges the files of an hour
(exposure_merges.py). A killed gateway loses the rows in memory, but no events: they have a log of their own. An erasure leaves
a mark, so that gateways write the answers that they have in memory without the erased user's id.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from live.archive import write_table
from serving.contract.durable import replace_durably
from serving.contract.errors import ArtifactError, RecommenderError
from serving.contract.locks import hold_lock
from serving.contract.tensors import Sources
from serving.live.experiment import hash_share

log = logging.getLogger("exposures")

FOLDER = "exposures"
FLUSH_ROWS, FLUSH_S = 10_000, 10.0
MOST_WAITING = 100_000  # rows in memory while nothing can be written; more are lost, and counted by the gateway
DAY_S = 86_400
ERASED, ERASED_LOCK = "erased.jsonl", ".erased.lock"  # marks of erasures; a lock held while marks or answers are written
MARKED_S = 7 * DAY_S  # how long a mark is kept: no answer stays in memory for longer
REMOVED_FILE = "removed.json"  # the time, unix milliseconds, up to which retention has removed answers
MERGES_FILE = "merges.json"  # name of a file -> names of the files that it replaces (exposure_merges.py)
RETAINED_EVERY_S, RETAINED_SHARE = 600.0, 0.01  # retention runs this often, and whenever this share of `keep_bytes` was written
FILE_NAME = re.compile(r"exposures-\d{13}-\d+-\d+\.parquet")  # unix milliseconds, process, number of the file
# Marks in `degraded`. FAILED: the challenger failed, and the champion answered. FALLBACK: the gateway's own popular items
FAILED, FALLBACK = "challenger", "gateway_fallback"
SOURCE_NAMES = {int(source): source.name.lower() for source in Sources if source.name}
SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("time_ms", pa.int64()),
        ("user_id", pa.int64()),
        ("generation", pa.int64()),
        ("degraded", pa.list_(pa.string())),
        ("experiment", pa.string()),
        ("arm", pa.string()),
        ("item_ids", pa.list_(pa.int64())),
        ("scores", pa.list_(pa.float32())),
        ("teams", pa.list_(pa.int8())),
        ("latency_ms", pa.float32()),
        ("assignment", pa.float64()),
        ("propensities", pa.list_(pa.float32())),
        ("sources", pa.list_(pa.uint8())),
    ]
)


@dataclass(frozen=True)
class Exposure:
    """One answer. user_id: the id on the wire, None where the request named neither user nor session.

    experiment, arm: "" outside of experiments
    item_ids, scores: in the served order; teams: of interleaving (trials/interleaving.py), None elsewhere.
    latency_ms: from the request to the servers' answer; None where it is not known
    assignment: probability with which the user was assigned to this arm; 1 outside of experiments
    propensities: for each item, the probability that the answer's random draws put it at its place, given the items before
        it, None for an item where that is not known; None instead of the list where the server does not say
    sources: for each item, what proposed it: bits of SOURCE_NAMES; None instead of the list where the server does not say
    """

    request_id: str
    time_ms: int
    user_id: int | None
    generation: int
    item_ids: list[int]
    scores: list[float | None]
    degraded: list[str]
    experiment: str = ""
    arm: str = ""
    teams: list[int] | None = None
    latency_ms: float | None = None
    assignment: float = 1.0
    propensities: list[float | None] | None = None
    sources: list[int] | None = None


class ExposureLog:
    """Gathers answers in memory, and writes them to files in a thread. Belongs to one event loop.

    folder: of the live store; share: share of all answers that is kept besides those of experiments
    keep_days, keep_bytes: age and total size beyond which the oldest files are removed
    """

    def __init__(
        self, folder: Path, share: float, keep_days: float, keep_bytes: int, now: Callable[[], float] = time.time
    ) -> None:
        self.folder, self.share, self._now = folder / FOLDER, share, now
        self._keep_s, self._keep_bytes = keep_days * DAY_S, keep_bytes
        self._rows: list[Exposure] = []
        self._files = 0
        self._marks: dict[str, int] = {}  # of erasures, at the last flush: a mark that is new applies to all that is in memory
        with suppress(OSError, ArtifactError):  # every flush reads them too, and reports it
            self._marks = _read_marks(self.folder)
        self._retained_s, self._new_bytes = float("-inf"), 0  # when retention last ran, and how much was written since
        self._oldest_s = find_newest_s(self.folder, now()) - self._keep_s  # retention has removed older files, if any
        self._lock, self._wake, self._closed = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="exposures", daemon=True)
        self._thread.start()

    def keeps(self, request_id: str, experiment: str) -> bool:
        """Return whether an answer is kept: it belongs to an experiment, or its request to the logged share."""
        return bool(experiment) or hash_share(request_id) < self.share

    def add(self, exposure: Exposure) -> bool:
        """Add an answer, unless the log does not keep it. Return False if it is lost, because too many wait in memory."""
        if not self.keeps(exposure.request_id, exposure.experiment):
            return True
        if len(self._rows) >= MOST_WAITING:
            return False
        self._rows.append(exposure)
        if len(self._rows) == FLUSH_ROWS:  # what waits beyond that is tried every FLUSH_S seconds
            self._wake.set()
        return True

    def flush(self) -> None:
        """Write what was added, and apply retention if it is due.

        Raises OSError, and ArtifactError for damaged marks of erasures. What could not be written stays in memory.
        """
        with self._lock:
            if rows := list(self._rows):
                self._write(rows)
                del self._rows[: len(rows)]  # in place: `add` may have appended meanwhile
                if len(self._rows) >= FLUSH_ROWS:
                    self._wake.set()
            is_much = self._new_bytes > RETAINED_SHARE * self._keep_bytes
            if is_much or time.monotonic() - self._retained_s >= RETAINED_EVERY_S:
                self._retained_s, self._new_bytes = time.monotonic(), 0
                try:
                    # A day more at most, so that a clock that is far ahead for some minutes does not remove everything.
                    oldest_s = min(self._now() - self._keep_s, self._oldest_s + DAY_S)
                    self._oldest_s = max(oldest_s, self._oldest_s)  # also after a clock that was behind
                    remove_old(self.folder, oldest_s, self._keep_bytes)
                except (OSError, RecommenderError) as error:
                    log.warning("old exposures are not removed: %s", error)

    def close(self) -> None:
        """Stop the thread, and write the rest. What cannot be written is lost, and the log says how much that is."""
        self._closed = True
        self._wake.set()
        self._thread.join()
        try:
            self.flush()
        except (OSError, RecommenderError) as error:
            log.error("%d exposures cannot be written and are lost: %s", len(self._rows), error)

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            try:
                self.flush()
            except (OSError, RecommenderError) as error:
                log.warning("%d exposures cannot be written and stay in memory: %s", len(self._rows), error)

    def _write(self, rows: list[Exposure]) -> None:
        for folder in (self.folder.parent, self.folder):  # the live store refuses a folder that others can read
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with hold_lock(self.folder / ERASED_LOCK):
            path = self._choose_file()
            marks = _read_marks(self.folder)
            records = [asdict(row) | {"user_id": _leave_out_erased(row, marks, self._marks)} for row in rows]
            write_table(path, pa.Table.from_pylist(records, SCHEMA))
            self._marks = marks
        self._files += 1
        self._new_bytes += path.stat().st_size

    def _choose_file(self) -> Path:
        """Return a file that no gateway has written. In containers, several may have the same process number."""
        written_ms = int(self._now() * 1_000)
        while (path := self.folder / f"exposures-{written_ms:013d}-{os.getpid()}-{self._files}.parquet").exists():
            self._files += 1
        return path


def list_exposure_files(folder: Path) -> list[Path]:
    """Return the files that together hold each answer of a log once, oldest first. folder: `exposures` in the live store

    Raises ArtifactError (`read_merges`).
    """
    paths = list_all_files(folder)
    merges = read_merges(folder)  # after the files were listed: a file that replaces others is recorded before it is written
    replaced = {name for path in paths for name in merges.get(path.name, ())}
    return [path for path in paths if path.name not in replaced]


def list_all_files(folder: Path) -> list[Path]:
    """Return all files of a log, oldest first, also those that another one replaces."""
    return sorted(path for path in folder.glob("exposures-*.parquet") if FILE_NAME.fullmatch(path.name))


def read_merges(folder: Path) -> dict[str, list[str]]:
    """Return the names of the files that each merged file replaces, by its name. A merged file may not be written yet.

    Raises ArtifactError for a damaged record.
    """
    path = folder / MERGES_FILE
    try:
        return {name: list(parts) for name, parts in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError) as error:
        raise ArtifactError(
            f"{path} does not say which files the merged ones replace ({error!r}). Expected the record that maintenance wrote. "
            "Remove the file; answers that the last round of maintenance merged are then counted twice."
        ) from error


def parse_written_ms(file: Path) -> int:
    """Return when a file of a log was written, unix milliseconds. No answer in it is later."""
    return int(file.name.split("-")[1])


def find_newest_s(folder: Path, now_s: float) -> float:
    """Return when the newest file of a log was written, in unix seconds; now without one."""
    paths = list_all_files(folder)
    return parse_written_ms(paths[-1]) / 1_000 if paths else now_s


def remove_old(folder: Path, oldest_s: float, most_bytes: int) -> list[Path]:
    """Remove files written before `oldest_s` (unix seconds), then the oldest beyond `most_bytes`. Return the removed files.

    Other gateways write the same log, and may remove its files meanwhile. Raises OSError, and ArtifactError (`read_merges`,
    `read_removed_ms`).
    """
    sizes = {}
    for path in list_exposure_files(folder):
        with suppress(FileNotFoundError):
            sizes[path] = path.stat().st_size
    removed, total = [], sum(sizes.values())
    for path, size in sizes.items():
        if parse_written_ms(path) >= oldest_s * 1_000 and total <= most_bytes:
            break
        path.unlink(missing_ok=True)
        removed.append(path)
        total -= size
    if removed and (until_ms := parse_written_ms(removed[-1])) > read_removed_ms(folder):
        with replace_durably(folder / REMOVED_FILE) as file:
            file.write(json.dumps({"until_ms": until_ms}).encode())
    return removed


def read_removed_ms(folder: Path) -> int:
    """Return the time up to which retention removed answers, unix milliseconds; 0 if it removed none.

    folder: as in `list_exposure_files`. Raises ArtifactError for a file that cannot be read.
    """
    path = folder / REMOVED_FILE
    try:
        return int(json.loads(path.read_text())["until_ms"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} does not say until when answers were removed ({error!r}). Remove the file.") from error


def read_exposures(folder: Path, from_ms: int = 0) -> pa.Table:
    """Return the log of a live store's folder as one table, oldest first, without files written before `from_ms`.

    from_ms: unix milliseconds; the table may hold some earlier answers too.

    Raises ArtifactError for a file that cannot be read.
    """
    tables = [table for _, table in _read_files(folder / FOLDER, from_ms)]
    return pa.concat_tables(tables) if tables else SCHEMA.empty_table()


def read_latest(folder: Path, answer_filter: pc.Expression, count: int, from_ms: int) -> pa.Table:
    """Return the latest answers of a live store's log that match `answer_filter`, at most `count`, oldest first.

    Files are read from the newest back, until there are `count` answers, or a file was written before `from_ms` (unix
    milliseconds). Raises ArtifactError for a file that cannot be read.
    """
    parts: list[pa.Table] = []
    for path in reversed(list_exposure_files(folder / FOLDER)):
        if parse_written_ms(path) < from_ms or sum(map(len, parts)) >= count:
            break
        if (table := read_file(path)) is not None:
            parts.append(table.filter(answer_filter))
    answers = pa.concat_tables(parts).sort_by("time_ms") if parts else SCHEMA.empty_table()
    return answers.slice(max(len(answers) - count, 0))


def erase_exposures(folder: Path, user_id: int, erased_ms: int) -> int:
    """Set the user id of a user's logged answers to null. Return the number of these answers.

    Gateways will write the answers that they have in memory, and all from before `erased_ms` (unix milliseconds), without the
    id. Those that follow until a gateway's next flush lose it too.
    The caller holds the lock of maintenance. Raises ArtifactError for a file that cannot be read.
    """
    (folder / FOLDER).mkdir(mode=0o700, exist_ok=True)
    with hold_lock(folder / FOLDER / ERASED_LOCK):
        marks = {user: at_ms for user, at_ms in _read_marks(folder / FOLDER).items() if at_ms > erased_ms - 1_000 * MARKED_S}
        marks[digest_user(user_id)] = erased_ms
        lines = [json.dumps({"user": user, "erased_ms": at_ms}) + "\n" for user, at_ms in marks.items()]
        with replace_durably(folder / FOLDER / ERASED) as file:
            file.write("".join(lines).encode())
    count, listed = 0, set(list_exposure_files(folder / FOLDER))
    for path in list_all_files(folder / FOLDER):
        if (table := read_file(path)) is None:
            continue
        is_users = pc.fill_null(pc.equal(table["user_id"], user_id), False)
        if n_answers := pc.sum(is_users).as_py():
            user_ids = pc.if_else(is_users, pa.scalar(None, pa.int64()), table["user_id"])
            write_table(path, table.set_column(SCHEMA.get_field_index("user_id"), "user_id", user_ids))
            count += n_answers if path in listed else 0
    return count


def count_exposures(folder: Path, user_id: int) -> int:
    """Return the number of logged answers to a user."""
    count = 0
    for path in list_exposure_files(folder / FOLDER):
        if (table := read_file(path, ["user_id"])) is not None:
            count += pc.sum(pc.equal(table["user_id"], user_id)).as_py() or 0
    return count


def _read_files(folder: Path, from_ms: int) -> Iterator[tuple[Path, pa.Table]]:
    """Yield each file of a log with its table, oldest first, without those that retention removes meanwhile."""
    for path in list_exposure_files(folder):
        if parse_written_ms(path) >= from_ms and (table := read_file(path)) is not None:
            yield path, table


def read_file(path: Path, columns: Sequence[str] | None = None) -> pa.Table | None:
    """Return a file's table, None if retention removed it meanwhile. Raises ArtifactError for one that cannot be read."""
    try:
        return pq.read_table(path, columns=columns and list(columns), schema=SCHEMA)
    except FileNotFoundError:
        return None
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).rstrip(".")
        raise ArtifactError(f"{path} cannot be read: {reason}. Move the file away; its answers are then left out.") from error


def _read_marks(folder: Path) -> dict[str, int]:
    """Return when users were erased: unix milliseconds by `digest_user`. Raises ArtifactError for damaged marks."""
    path = folder / ERASED
    try:
        marks = map(json.loads, path.read_text().splitlines())
        return {str(mark["user"]): int(mark["erased_ms"]) for mark in marks}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path} does not say which users were erased ({error!r}). Expected the marks that `python -m live erase` wrote. "
            f"Remove the file, and erase the users of the last {MARKED_S // DAY_S} days again."
        ) from error


def _leave_out_erased(answer: Exposure, marks: Mapping[str, int], known: Mapping[str, int]) -> int | None:
    """Return the user id of an answer, None where the user was erased. marks: of erasures; known: those of the last flush

    A mark that is not known applies whatever the answer's time is, because the clock may have been set back.
    """
    if answer.user_id is None or not marks:
        return answer.user_id
    user = digest_user(answer.user_id)
    is_erased = user in marks and (marks[user] != known.get(user) or answer.time_ms <= marks[user])
    return None if is_erased else answer.user_id


def digest_user(user_id: int) -> str:
    """Return the SHA-256 of a user id as text, in hex. Marks and proofs of erasures hold it in place of the id."""
    return hashlib.sha256(str(user_id).encode()).hexdigest()
