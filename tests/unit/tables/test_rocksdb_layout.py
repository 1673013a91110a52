"""RocksDB as others see it: HPS's layout written and read with struct and plain rocksdict, nothing of ours but RocksStore.

One column family per table, named hps_et.<model>.<table>; key: 8 little-endian bytes of an int64; value: the row's float32,
little-endian. HPS leaves the default column family empty; there ours keeps how far the updates' log is in.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from rocksdict import Options, Rdict

from serving.contract.errors import DependencyError
from serving.tables.config import RocksConfig
from serving.tables.levels import rocks_options, rocks_store
from serving.tables.levels.rocks_store import RocksStore
from serving.tables.store.log_position import LogPosition
from tests.present import present
from tests.unit.tables.updating import Log

LEAST, MOST = -(2**63), 2**63 - 2  # of keys: the largest int64 stands for nothing in HPS
KEYS = [0, 1, 255, 256, 65_536, 1_000_000_007, 2**62, -2, LEAST, MOST]  # zero bytes at either end, signs
Table = dict[int, tuple[float, ...]]
ITEMS: Table = {key: (float(at), -0.0, 1.5 - at) for at, key in enumerate(KEYS)}
USERS: Table = {3: (2.0**-149, float("inf")), 4: (3.5, -1.0)}  # the smallest float32, and no number at all
WIDTHS = {"items": 3, "users": 2}


def packed(table: Table) -> dict[bytes, bytes]:
    return {struct.pack("<q", key): struct.pack(f"<{len(row)}f", *row) for key, row in table.items()}


def arrays(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Return (int64 [N] keys, float32 [N, D] rows)"""
    return np.array(list(table), np.int64), np.array(list(table.values()), np.float32)


def plain_options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    return options


def read_plainly(path: Path) -> dict[str, dict]:
    """{column family: all that is in it}"""
    names = Rdict.list_cf(str(path), plain_options())
    database = Rdict(str(path), plain_options(), {name: plain_options() for name in names})
    families = {name: database.get_column_family(name) for name in names}
    found = {name: dict(family.items()) for name, family in families.items()}
    families.clear()
    database.close()
    return found


def write_plainly(path: Path, families: dict[str, dict[bytes, bytes]]) -> None:
    database = Rdict(str(path), plain_options(), {name: plain_options() for name in families})
    for name, rows in families.items():
        family = database.get_column_family(name)
        for key, value in rows.items():
            family[key] = value
        del family
    database.close()


def test_what_is_written_is_hps_layout_byte_for_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(rocks_store, "SST_ROWS", 4)  # three files
    store = RocksStore(RocksConfig(str(tmp_path)), "rank", WIDTHS, writable=True)
    store.bulk_load("items", *arrays(ITEMS))
    log = Log(partition=2)
    log.batch(*arrays(USERS))
    store.update("users", log.batch(*arrays(USERS)), LogPosition.at({}))
    store.close()
    assert read_plainly(tmp_path) == {
        "default": {b"log/hps_et.rank.users": struct.pack("<3q", 0, 0, 2)},
        "hps_et.rank.items": packed(ITEMS),
        "hps_et.rank.users": packed(USERS),
    }


def test_what_rocksdb_reports_of_itself_does_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(rocks_options, "REPORT_BYTES", 60_000)  # each begins with 42,000 bytes of settings
    store, log = RocksStore(RocksConfig(str(tmp_path)), "rank", WIDTHS, writable=True), Log()
    for _ in range(100):  # each reports 2,000 bytes
        store.update("items", log.batch(*arrays(ITEMS)), LogPosition.at({}))
        store.column_families["items"].flush()
    store.close()
    reports = [report.stat().st_size for report in tmp_path.glob("LOG*")]
    assert len(reports) == 2
    assert max(reports) < 80_000


def test_updates_replace_rows_that_were_loaded_and_add_new_ones(tmp_path):
    store = RocksStore(RocksConfig(str(tmp_path)), "rank", {"items": 3}, writable=True)
    store.bulk_load("items", *arrays(ITEMS))
    updates: Table = {256: (9.0, 8.0, 7.0), 77: (6.0, 5.0, 4.0)}
    store.update("items", Log().batch(*arrays(updates)), LogPosition.at({}))
    store.sync()
    store.close()
    assert read_plainly(tmp_path)["hps_et.rank.items"] == packed(ITEMS | updates)


@pytest.mark.parametrize("writable", [True, False], ids=["as the writer", "as a secondary"])
def test_what_others_wrote_is_read(tmp_path, writable):
    others = {"hps_et.other.items": packed({1: (5.0, 5.0, 5.0)}), "hps_et.rank.users": packed(USERS)}
    write_plainly(tmp_path, {"hps_et.rank.items": packed(ITEMS), **others})
    store = RocksStore(RocksConfig(str(tmp_path)), "rank", WIDTHS, writable=writable)
    keys, rows = arrays(ITEMS)
    found, intact = store.read({"items": np.append(keys, 12_345), "users": np.array([4, 3])})
    store.close()
    assert intact
    vectors, there = found["items"]
    assert present(there).tolist() == [True] * len(keys) + [False]
    assert vectors[:-1].tobytes() == rows.tobytes()
    assert found["users"][0].tolist() == [list(USERS[4]), list(USERS[3])]
    assert found["users"][1] is None


def test_rows_of_others_stay_when_ours_are_written(tmp_path):
    theirs = packed({1: (5.0, 5.0, 5.0)})
    write_plainly(tmp_path, {"hps_et.other.items": theirs, "hps_et.rank.items": packed(ITEMS)})
    store = RocksStore(RocksConfig(str(tmp_path)), "rank", {"items": 3}, writable=True)
    store.update("items", Log().batch(np.array([1]), np.array([[1.0, 2.0, 3.0]], np.float32)), LogPosition.at({}))
    store.close()
    found = read_plainly(tmp_path)
    assert found["hps_et.other.items"] == theirs
    assert found["hps_et.rank.items"] == packed(ITEMS | {1: (1.0, 2.0, 3.0)})


def test_others_rows_of_another_width_are_refused(tmp_path):
    write_plainly(tmp_path, {"hps_et.rank.items": packed(USERS)})
    store = RocksStore(RocksConfig(str(tmp_path)), "rank", {"items": 3})
    with pytest.raises(DependencyError, match=r"a stored vector has 8 bytes\. Expected 12"):
        store.read({"items": np.array([3])})
    store.close()
