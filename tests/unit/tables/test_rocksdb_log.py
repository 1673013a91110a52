"""A log that RocksDB wrote, whole, cut off, and overwritten."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from serving.tables.config import RocksConfig
from serving.tables.formats.rocksdb_log import CRC_TABLE, compute_crc32c, find_damage
from serving.tables.levels.rocks_store import RocksStore
from serving.tables.store.log_position import LogPosition
from tests.unit.tables.updating import Log


def test_the_checksum_of_the_castagnoli_check_string():
    assert compute_crc32c(np.frombuffer(b"123456789", np.uint8), CRC_TABLE) == 0xE3069283


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> bytes:
    """Some 200 KiB, of records shorter and longer than a block."""
    folder, log, rng = tmp_path_factory.mktemp("db"), Log(), np.random.default_rng(0)
    store = RocksStore(RocksConfig(str(folder)), "rank", {"items": 16}, writable=True)
    for n_rows in (1, 1000, 3, 300, 1, 1200):
        batch = log.batch(np.arange(n_rows), rng.standard_normal((n_rows, 16), dtype=np.float32))
        store.update("items", batch, LogPosition.at({}))
    store.sync()
    [file] = [file for file in folder.glob("*.log") if file.stat().st_size]
    content = file.read_bytes()
    store.close()
    return content


def damage_of(content: bytes, folder: Path) -> int:
    (folder / "log").write_bytes(content)
    return find_damage(folder / "log")


def test_what_was_written_is_whole_wherever_it_ends(written, tmp_path):
    assert damage_of(written, tmp_path) == -1
    assert damage_of(written + bytes(70_000), tmp_path) == -1  # room that was set aside
    for length in np.random.default_rng(1).integers(0, len(written), 300):
        assert damage_of(written[:length], tmp_path) == -1


@pytest.mark.parametrize("n_bytes", [1, 5, 500, 50_000])
def test_other_bytes_are_found_no_later_than_where_they_lie(written, tmp_path, n_bytes):
    rng = np.random.default_rng(n_bytes)
    for _ in range(100):
        start = int(rng.integers(0, len(written) - (40_000 + n_bytes)))  # in the last block it may be a record's beginning
        changed = bytearray(written)
        changed[start : start + n_bytes] = bytes(byte ^ 0x5A for byte in written[start : start + n_bytes])
        assert 0 <= damage_of(bytes(changed), tmp_path) <= start
