"""Slow readers and writers of the HPS layouts, from the formats alone: struct and loops, nothing of the code under test."""

from __future__ import annotations

import struct
from collections import OrderedDict
from pathlib import Path

import numpy as np

MASK = 2**64 - 1


def mix(key: int) -> int:
    def ror(x: int, bits: int) -> int:
        return ((x >> bits) | (x << (64 - bits))) & MASK

    x = key & MASK
    x ^= ror(x, 25) ^ ror(x, 50)
    x = x * 0xA24BAED4963EE407 & MASK
    x ^= ror(x, 24) ^ ror(x, 49)
    x = x * 0x9FB21C651E98DF25 & MASK
    return x ^ (x >> 28)


def message(rows: list[tuple[int, list[float]]], width: int) -> bytes:
    body = b"".join(struct.pack(f"<q{width}f", key, *vector) for key, vector in rows)
    return b"HCTR" + struct.pack("<I", 4 * width) + body


def read_message(payload: bytes) -> list[tuple[int, tuple[float, ...]]]:
    width = struct.unpack("<I", payload[4:8])[0] // 4
    size = 8 + 4 * width
    rows = [payload[start : start + size] for start in range(8, len(payload), size)]
    return [(struct.unpack("<q", row[:8])[0], struct.unpack(f"<{width}f", row[8:])) for row in rows]


def read_sparse(folder: Path, width: int) -> list[tuple[int, tuple[float, ...]]]:
    keys = (folder / "key").read_bytes()
    vectors = (folder / "emb_vector").read_bytes()
    n_rows = len(keys) // 8
    assert len(vectors) == n_rows * width * 4
    return [
        (struct.unpack_from("<q", keys, 8 * row)[0], struct.unpack_from(f"<{width}f", vectors, 4 * width * row))
        for row in range(n_rows)
    ]


class Lru:
    """A cache of `rows` keys, one operation at a time."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.held: OrderedDict[int, None] = OrderedDict()

    def use(self, key: int) -> bool:
        hit = key in self.held
        self.held[key] = None
        self.held.move_to_end(key)
        if len(self.held) > self.rows:
            self.held.popitem(last=False)
        return hit


def simulate(keys: np.ndarray, l1_rows: int, l2_rows: int, instances: int) -> list[int]:
    """Level that answers each use: 1, 2 or 3."""
    l1, l2 = [Lru(l1_rows) for _ in range(instances)], Lru(l2_rows)
    levels = []
    for i, key in enumerate(keys.tolist()):
        levels.append(1 if l1[i % instances].use(key) else 2 if l2.use(key) else 3)
    return levels
