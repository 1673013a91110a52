"""Back up a live store while its server runs, and restore it.

A backup holds the environment as of one moment (LMDB's compacting copy), the archive that belongs to it, the proofs of
erasures, the applied rules and the exposure log. `data.mdb` is written last: a folder without it is not a backup.

A restored store lacks the events that came after the backup, and gives their places in the log to other events. So it takes a
new machine name, by which callers and other machines tell the sequences apart (serving/live/sequences.py).
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

import lmdb
import pyarrow.parquet as pq

from live.archive import list_segments, read_log
from live.erase import PROOFS, erase_user
from live.exposures import FOLDER as EXPOSURES
from live.exposures import digest_user, list_exposure_files
from live.maintenance import lock
from serving.contract.durable import append_durably, make_durable, make_file_system_durable
from serving.contract.errors import ConfigError, RecommenderError
from serving.live.events import USER_CHANGED
from serving.live.file_damage import find_damage
from serving.live.reader import Reader
from serving.live.sequences import hash_machine
from serving.live.store import (
    ARCHIVE,
    DATA_FILE,
    ERASED,
    FORMER,
    LOCK_FILE,
    MACHINE,
    PROGRESS,
    RESTORING,
    Progress,
    has_store,
    make_folder,
    open_store,
    refuse_foreign,
)
from serving.live.writer import Writer
from serving.stages.rules.applied import CURRENT_FILE
from serving.stages.rules.applied import FOLDER as RULES

# Copied besides the environment. The file that names the current version of the rules comes before the versions: otherwise it
# could name one that was added after the versions were copied.
PARTS = (ARCHIVE, PROOFS, f"{RULES}/{CURRENT_FILE}", RULES, EXPOSURES)
COPYING = ".copying"
IN_USE = (
    "A process uses the live store in {folder}: a server, its gateway, a helper or a command. Stop it first (make stop), then "
    "restore again."
)
REPLACED = "replaced"  # the folder of a store that a restored one replaces, with a number, in the store's own folder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backup:
    """The contents of a backup. segments: number of the archive's segments; bytes: size of all files"""

    progress: Progress
    segments: int
    bytes: int


@dataclass(frozen=True)
class Restored:
    """The result of a restore. erased: number of users who were erased again

    replaced: folder of the store that was there before, None if there was none
    """

    progress: Progress
    erased: int
    replaced: Path | None


def back_up(folder: Path, target: Path) -> Backup:
    """Copy a live store into an empty or new folder. Meanwhile the store may be written. Raises ConfigError if it fails."""
    if target.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{target} is in the live store itself. Name a folder elsewhere, best on another disk.")
    is_new = not target.exists()
    make_empty_folder(target)
    try:
        # Under the lock, no event moves into the archive, and no user is erased, between the copies.
        with lock(folder, wait=True), closing(open_store(folder)) as store:
            copy_parts(folder, target)
            (target / COPYING).mkdir(mode=0o700)
            store.env.copy(str(target / COPYING), compact=True)
        os.chmod(target / COPYING / DATA_FILE, 0o600)
        make_durable(target / COPYING / DATA_FILE)
        make_file_system_durable(target)  # the names of files in subfolders too, before the file that completes the backup
        os.rename(target / COPYING / DATA_FILE, target / DATA_FILE)
        (target / COPYING).rmdir()
        make_durable(target)
    except (OSError, lmdb.Error) as error:
        remove_contents(target, with_folder=is_new)
        raise ConfigError(f"The backup could not be written to {target}: {error}. Name a folder with enough space.") from error
    except BaseException:
        remove_contents(target, with_folder=is_new)
        raise
    return describe(target)


def restore(backup: Path, folder: Path, shop: str = "", replace: bool = False) -> Restored:
    """Put a backup into the place of a live store. Raises ConfigError if that is not possible; the store then stays as it was.

    shop: name of the data set that is served there, "" for any; replace: move a store that is there into a folder of its own
    Users who were erased from the replaced store are erased from the restored one too, and stay marked there. The same goes for
    stores that were replaced before if there is none: a restore may have been killed after it moved the store away.
    """
    if not (backup / DATA_FILE).is_file():
        raise ConfigError(f"{backup} holds no complete backup; expected {DATA_FILE} in it. Make one by python -m live backup.")
    if damage := find_damage(backup / DATA_FILE):
        raise ConfigError(f"{backup / DATA_FILE} {damage}. Copy the backup again, or name another.")
    make_folder(folder)
    refuse_foreign(folder)
    with lock(folder) as is_unmaintained:  # an erasure during the copy would be missed in the restored store
        if not is_unmaintained:
            raise ConfigError(IN_USE.format(folder=folder))
        return replace_store(backup, folder, shop, replace)


def replace_store(backup: Path, folder: Path, shop: str, replace: bool) -> Restored:
    """Do what `restore` says, while the caller holds the lock of maintenance."""
    with hold_unused(folder):  # checked early, and not held during the copy, because a server that starts would wait for it
        list_replaced(folder, replace)
    restored = folder / RESTORING
    was_killed = restored.exists() and not has_store(folder)  # an earlier restore, after it moved the store away
    shutil.rmtree(restored, ignore_errors=True)
    try:
        restored.mkdir(mode=0o700)
        copy_parts(backup, restored)
        copy_file(backup / DATA_FILE, restored / DATA_FILE)
        refuse_other_shop(restored, shop)
        rename_machine(restored)
        store_folders = [folder] if has_store(folder) else [folder, *sorted(folder.glob(f"{REPLACED}-*"))]
        erased, progress = carry_erasures(store_folders, restored), describe(restored).progress
        make_file_system_durable(restored)
        with hold_unused(folder):
            replaced = exchange_contents(folder, list_replaced(folder, replace), restored)
    except (OSError, lmdb.Error) as error:
        raise ConfigError(f"{backup} could not be restored: {error}. Check the backup and the disk.") from error
    finally:
        if has_store(folder) or not was_killed:  # else it stays, so that no server begins with an empty store
            shutil.rmtree(restored, ignore_errors=True)
    return Restored(progress, erased, replaced)


def describe(folder: Path) -> Backup:
    """Return what a backup holds, read from its files. No other process may have the folder's environment open."""
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        progress = snapshot.read_progress()
    (folder / LOCK_FILE).unlink()  # reading made it, it is no part of a backup, and the next opening makes it again
    n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Backup(progress, len(list_segments(folder)), n_bytes)


def make_empty_folder(folder: Path) -> None:
    """Create a folder that its owner alone may read. Raises ConfigError for one that is not empty."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; expected a new or empty folder for the backup. Name another one.")
        os.chmod(folder, 0o700)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used for the backup: {error.strerror}. Name another folder.") from error


def copy_parts(source: Path, target: Path) -> None:
    """Copy the files of PARTS, without those that are there already. A file that retention removes meanwhile is left out."""
    for part in PARTS:
        for path in [source / part, *sorted((source / part).rglob("*"))]:
            place = path.relative_to(source)
            is_hidden = any(name.startswith(".") for name in place.parts)  # drafts of files, and locks
            if os.path.lexists(path) and not (path.is_dir() or is_hidden or (target / place).exists()):
                (target / place).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                copy_file(path, target / place)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file durably, readable by its owner alone; nothing if it was removed meanwhile."""
    try:
        with open(source, "rb") as reading, open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as writing:
            shutil.copyfileobj(reading, writing, 1 << 20)
            writing.flush()
            os.fsync(writing.fileno())
    except FileNotFoundError:
        if os.path.lexists(source):
            raise


@contextmanager
def hold_unused(folder: Path) -> Iterator[None]:
    """Keep other processes from opening a store while the block runs. Raises ConfigError if one has it open.

    LMDB holds a shared lock on the first byte of its lock file for as long as an environment is open.
    """
    with open(os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise ConfigError(IN_USE.format(folder=folder)) from error
        yield
        file.truncate(0)  # the lock file describes the replaced environment; LMDB fills it again


def refuse_other_shop(folder: Path, shop: str) -> None:
    """Raise ConfigError if a store holds the events of another data set than `shop`. "" on either side matches any."""
    with closing(open_store(folder)) as store:
        held_shop = store.read_shop()
    if shop and held_shop not in ("", shop):
        raise ConfigError(
            f"The backup holds the events of {held_shop!r}, and the repository serves {shop!r}. Name a backup, or a repository "
            "(--repo), of the same data set."
        )


def rename_machine(folder: Path) -> None:
    """Give a restored store another machine name. Keep the former one, with the last sequence that was given under it."""
    with closing(open_store(folder)) as store, store.env.begin(write=True) as txn:
        former = bytes(txn.get(MACHINE, db=store.meta) or b"").decode()
        if not former:
            return
        name = former
        while hash_machine(name) == hash_machine(former):
            name = secrets.token_hex(8)
        names = json.loads(bytes(txn.get(FORMER, db=store.meta) or b"[]"))
        last = Progress.unpack(txn.get(PROGRESS, db=store.meta)).last_sequence
        txn.put(FORMER, json.dumps([*names, (former, last)]).encode(), db=store.meta)
        txn.put(MACHINE, name.encode(), db=store.meta)


def read_proofs(folder: Path) -> list[str]:
    """Return the proofs of the users who were erased from a store, each as a line of JSON (live/erase.py, Erasure).

    A line that is none is left out, with a warning: a crash cut it short, so that erasure did not end.
    """
    path, proofs = folder / PROOFS, list[str]()
    for number, line in enumerate(path.read_text(errors="replace").splitlines() if path.exists() else (), start=1):
        try:
            bytes.fromhex(json.loads(line)["user_digest"])
        except (ValueError, KeyError, TypeError):
            log.warning("%s, line %d is no proof, and is skipped. Erase that user again, if nobody did.", path, number)
        else:
            proofs.append(line)
    return proofs


def read_erased_marks(folder: Path) -> list[bytes]:
    """Return the keys of the marks of erased users in a store, [] where there is none. Raises ConfigError for a damaged one."""
    if not has_store(folder):
        return []
    try:
        with closing(open_store(folder)) as store, store.env.begin() as txn, txn.cursor(store.meta) as cursor:
            keys = cursor.iternext(keys=True, values=False) if cursor.set_range(ERASED) else iter(())
            return [bytes(key) for key in takewhile(lambda key: bytes(key).startswith(ERASED), keys)]
    except (RecommenderError, lmdb.Error) as error:
        raise ConfigError(
            f"The marks of erased users in {folder / DATA_FILE} cannot be read: {error} Move this file away, and restore "
            f"again. Then erase all users again whose erasure {folder / PROOFS} proves."
        ) from error


def carry_erasures(replaced: Iterable[Path], restored: Path) -> int:
    """Copy the marks and proofs of erased users from the folders of stores into a restored one, and erase these users from it.

    Return the number of users who were erased from it. Users whom it does not hold are marked too: a generation may know them.
    """
    restored_proofs, marks, former_proofs = set(read_proofs(restored)), list[bytes](), dict[str, None]()
    for folder in replaced:
        marks += read_erased_marks(folder)
        former_proofs |= dict.fromkeys(read_proofs(folder))
    proofs = [proof for proof in former_proofs if proof not in restored_proofs]
    with closing(open_store(restored)) as store, store.env.begin(write=True) as txn:
        for mark in marks:
            txn.put(mark, b"1", db=store.meta)
    if not proofs:
        return 0
    append_durably(restored / PROOFS, "".join(f"{proof}\n" for proof in proofs))
    digests = {json.loads(proof)["user_digest"] for proof in proofs}
    user_ids = [user_id for user_id in list_user_ids(restored) if digest_user(user_id) in digests]
    if user_ids:
        with closing(open_store(restored)) as store, closing(Reader(restored)) as reader, reader.snapshot() as snapshot:
            writer = Writer(restored, store.read_layout(), snapshot.read_event_names())
        with closing(writer):
            for user_id in user_ids:
                erase_user(writer, user_id)
    return len(user_ids)


def list_user_ids(folder: Path) -> list[int]:
    """Return all users of whom a store, its archive or its exposure log holds something."""
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        user_ids = [set(snapshot.list_users().tolist())]
        user_ids.append({change.id for change in snapshot.read_changes(after=0) if change.type == USER_CHANGED})
    user_ids += [set(batch.headers["user_id"].tolist()) for _, batch in read_log(folder)]
    for path in list_exposure_files(folder / EXPOSURES):
        user_ids.append(set(pq.read_table(path, columns=["user_id"])["user_id"].drop_null().to_pylist()))
    return sorted(set[int]().union(*user_ids))


def list_contents(folder: Path) -> list[Path]:
    """Return the files and folders of a live store, without locks, hidden ones such as RESTORING, and replaced stores."""
    return sorted(
        path
        for path in folder.iterdir()
        if not path.name.startswith((".", f"{REPLACED}-")) and path.suffix != ".lock" and path.name != LOCK_FILE
    )


def list_replaced(folder: Path, replace: bool) -> list[Path]:
    """Return the files and folders that a restored store replaces. Raises ConfigError if there are any and not `replace`."""
    contents = list_contents(folder)
    if contents and not replace:
        raise ConfigError(
            f"There is a live store in {folder} already. Add --replace to restore the backup in its place: the present one is "
            "kept in a folder inside of it."
        )
    return contents


def exchange_contents(folder: Path, contents: list[Path], restored: Path) -> Path | None:
    """Move a store's contents into a new folder inside its own, and a restored store into their place. Undo it if it fails.

    The data file is moved away first, and the new one comes last: if this process is killed, there is no store in between.
    Return the new folder, None without contents. Raises OSError, or ConfigError where contents could not be moved back.
    The store's folder itself may be a mount, which cannot be renamed.
    """
    number = next(number for number in count(1) if not (folder / f"{REPLACED}-{number}").exists())
    replaced = folder / f"{REPLACED}-{number}"
    moves = [(path, replaced / path.name) for path in sorted(contents, key=lambda path: path.name != DATA_FILE)]
    moves += [(path, folder / path.name) for path in sorted(list_contents(restored), key=lambda path: path.name == DATA_FILE)]
    try:
        if contents:
            replaced.mkdir(mode=0o700)
        for source, target in moves:
            os.rename(source, target)
        make_file_system_durable(folder)  # the names in `replaced` too
    except BaseException as error:
        try:
            for source, target in reversed(moves):
                if is_moved(source, target):
                    os.rename(target, source)
            if replaced.exists():
                replaced.rmdir()
        except OSError as failure:
            steps = [f"remove {target}" for source, target in moves[len(contents) :] if is_moved(source, target)]
            if contents:
                steps.append(f"move the contents of {replaced} into {folder}")
            raise ConfigError(
                f"The restore into {folder} failed and could not be undone: {failure}. "
                f"Before a server starts: {', '.join(steps)}."
            ) from error
        raise
    return replaced if contents else None


def is_moved(source: Path, target: Path) -> bool:
    """Return whether a move has been made."""
    return os.path.lexists(target) and not os.path.lexists(source)


def remove_contents(folder: Path, with_folder: bool) -> None:
    """Remove everything in a folder: it was empty before a backup that failed. with_folder: it was not there either"""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if with_folder:
        folder.rmdir()
