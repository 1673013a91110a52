"""A store whose file was cut short or overwritten is refused with a remedy: LMDB would end the process by SIGBUS."""

from __future__ import annotations

import os
import random
from pathlib import Path

import lmdb
import numpy as np
import pytest

from live.backup import back_up, restore
from serving.contract.errors import ConfigError, DependencyError
from serving.live.file_damage import find_damage, read_free_pages, read_header
from serving.live.reader import Reader
from serving.live.store import DATA_FILE, open_store
from tests.unit.live.batches import events, purchase

CUT = "lacks its end"
SIZES = [10, 500, 3_000, 9_000, 60_000]  # of values: several in a page, one, and on pages of their own


def test_a_store_that_was_cut_short_is_refused_and_can_be_restored(writer, folder, tmp_path):
    writer.append(events(np.random.default_rng(0), 300, ids=True))
    back_up(folder, tmp_path / "backup")
    writer.close()
    data = (folder / DATA_FILE).read_bytes()
    (folder / DATA_FILE).write_bytes(data[: len(data) // 2])
    for open_it in (open_store, lambda folder: Reader(folder).snapshot()):
        with pytest.raises(DependencyError, match=rf"{DATA_FILE} {CUT}.*move the file away.*live restore BACKUP --replace"):
            open_it(folder)
    (folder / DATA_FILE).unlink()
    assert restore(tmp_path / "backup", folder, replace=True).progress.last_sequence == 300


@pytest.mark.parametrize(("content", "damage"), [(b"", CUT), (b"x" * 100_000, "is not in the format of LMDB")])
def test_a_damaged_backup_is_refused_by_name_and_the_store_stays(writer, folder, tmp_path, content, damage):
    writer.append(events(np.random.default_rng(0), 300, ids=True))
    back_up(folder, tmp_path / "backup")
    writer.close()
    path = tmp_path / "backup" / DATA_FILE
    path.write_bytes(content or path.read_bytes()[:20_000])
    before = (folder / DATA_FILE).read_bytes()
    with pytest.raises(ConfigError, match=rf"{path} {damage}.*Copy the backup again"):
        restore(tmp_path / "backup", folder, replace=True)
    assert (folder / DATA_FILE).read_bytes() == before


def test_a_store_of_whose_file_nothing_was_written_yet_is_not_damaged(tmp_path):
    (tmp_path / DATA_FILE).touch()
    assert find_damage(tmp_path / DATA_FILE) == find_damage(tmp_path / "absent") == ""


def test_a_store_that_is_written_is_never_taken_for_damaged(writer, folder):
    for number in range(30):
        writer.append(purchase(number % 3, 5))
        assert find_damage(folder / DATA_FILE) == ""


def test_a_file_is_cut_short_only_if_a_page_with_data_is_missing(tmp_path):
    """LMDB leaves free pages at the end unwritten now and then, so the file's size alone does not tell."""
    rng, n_unwritten, path, cut = random.Random(1), 0, tmp_path / DATA_FILE, tmp_path / "cut.mdb"
    for trial in range(30):
        path.unlink(missing_ok=True)
        with lmdb.open(str(tmp_path), map_size=1 << 28, max_dbs=2) as env:
            databases = [env.open_db(name) for name in (b"a", b"b")]
            for _ in range(20):
                change_at_random(env, databases, rng)
                n_pages = env.info()["last_pgno"] + 1
                n_unwritten += path.stat().st_size < n_pages * env.stat()["psize"]
                assert find_damage(path) == "", trial
            page_bytes = env.stat()["psize"]
        data = path.read_bytes()
        last_used = max(set(range(n_pages)) - list_free_pages(path))
        cut.write_bytes(data[: (last_used + 1) * page_bytes])
        assert find_damage(cut) == "", trial
        for kept in (last_used, last_used // 2, 2):
            cut.write_bytes(data[: kept * page_bytes])
            assert CUT in find_damage(cut), (trial, kept)
    assert n_unwritten


def test_a_file_that_was_overwritten_and_cut_short_is_refused_whatever_it_holds(tmp_path):
    rng, path = random.Random(2), tmp_path / DATA_FILE
    with lmdb.open(str(tmp_path), map_size=1 << 28, max_dbs=2) as env:
        databases = [env.open_db(name) for name in (b"a", b"b")]
        for _ in range(20):
            change_at_random(env, databases, rng)
    file = os.open(path, os.O_RDONLY)
    header = read_header(file)
    os.close(file)
    assert header is not None
    start, data = header.root * header.page_bytes, path.read_bytes()
    for _ in range(200):
        noise = bytearray(data[: (header.root + 1) * header.page_bytes])
        for _ in range(rng.choice([1, 20, header.page_bytes])):
            noise[start + rng.randrange(header.page_bytes)] = rng.randrange(256)
        path.write_bytes(noise)
        assert CUT in find_damage(path)


def change_at_random(env: lmdb.Environment, databases: list, rng: random.Random) -> None:
    with env.begin(write=True) as txn:
        for _ in range(rng.randrange(1, 80)):
            database, key = rng.choice(databases), b"%d" % rng.randrange(500)
            if rng.random() < 0.5:
                txn.put(key, bytes(rng.choice(SIZES)), db=database)
            else:
                txn.delete(key, db=database)


def list_free_pages(path: Path) -> set[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        header = read_header(file)
        assert header is not None
        return {number for numbers in read_free_pages(file, header) for number in numbers.tolist()}
    finally:
        os.close(file)
