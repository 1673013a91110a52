"""Check RocksDB's write-ahead log, because a secondary hangs on some kinds of damage in the middle of a log.

Blocks of 32 KiB hold records one after another; no record crosses the end of a block:

    u32 masked CRC-32C  u16 length  u8 type  [u32 number of the log, types 5 to 8]  payload of `length` bytes

The CRC covers everything from the type on. Zeros fill the rest of a block. The last block may end anywhere, because a
writer that is killed, or still writing, leaves the beginning of a record.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from serving.loops.compiled import compiled

BLOCK_BYTES, HEADER_BYTES, LOG_NUMBER_BYTES = 32 << 10, 7, 4
FIRST_RECYCLED, LAST_RECYCLED = 5, 8  # record types with the log's number
MASK = np.uint32(0xA282EAD8)


def _make_crc_table() -> np.ndarray:
    """Return the table of CRC-32C (Castagnoli), uint32 [256], lowest bit first."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table


CRC_TABLE = _make_crc_table()


def find_damage(path: Path) -> int:
    """Return the byte position of the first damaged record; -1 when there is none."""
    return int(_scan_records(np.frombuffer(path.read_bytes(), np.uint8), CRC_TABLE))


@compiled
def compute_crc32c(data, table):
    """Return the CRC, uint32, of uint8 [N]."""
    crc = np.uint32(0xFFFFFFFF)
    for byte in data:
        crc = (crc >> np.uint32(8)) ^ table[(crc ^ byte) & np.uint32(0xFF)]
    return crc ^ np.uint32(0xFFFFFFFF)


@compiled
def _scan_records(data, table):
    start, size = np.int64(0), len(data)
    while start < size:
        block_end = start - start % BLOCK_BYTES + BLOCK_BYTES
        if block_end - start < HEADER_BYTES:
            start = block_end
            continue
        if size - start < HEADER_BYTES:
            return -1
        stored = np.uint32(0)
        for place in range(4):
            stored |= np.uint32(data[start + place]) << np.uint32(8 * place)
        length, kind = np.int64(data[start + 4]) | np.int64(data[start + 5]) << 8, data[start + 6]
        if kind == 0 and length == 0 and stored == 0:  # preallocated space
            start = block_end
            continue
        log_number_bytes = LOG_NUMBER_BYTES if FIRST_RECYCLED <= kind <= LAST_RECYCLED else 0
        end = start + HEADER_BYTES + log_number_bytes + length
        if end > size and block_end >= size:
            return -1
        if end > block_end:
            return start
        crc = compute_crc32c(data[start + 6 : end], table)
        masked = np.uint32((crc >> np.uint32(15) | crc << np.uint32(17)) + MASK)
        if masked != stored:
            return start
        start = end
    return -1
