"""Find out whether the file of an LMDB environment is damaged: overwritten, or cut short, as by a copy that broke off.

LMDB maps the file and trusts its size: reading a page beyond the end would end the process (SIGBUS) without a message. So this
reads the file itself, and never the map. A file may end before the last page that its header counts if all missing pages are
free, because LMDB does not write a page that was taken and freed in one transaction.

    header (pages 0 and 1; the one of the later transaction counts): root of the tree of free pages, number of the last page
    page of that tree: 16 bytes, offsets of its nodes (2 bytes each), …, nodes
    node: 4 bytes, flags and size of the key (2 bytes each), key, value
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

MAGIC = 0xBEEFC0DE
HEADER = struct.Struct("<16xII16xIHHQQQQQ48xQQ")  # magic, version, the tree of free pages, last page, transaction
PAGE = struct.Struct("<QHHHH")  # number, -, flags, end of the offsets, start of the nodes
NODE = struct.Struct("<HHHH")  # low and high half of the value's size, flags, size of the key
BRANCH, IS_LARGE = 1, 1  # flag of a page; flag of a node whose value is on pages of its own
NO_ROOT = (1 << 64) - 1


class Header(NamedTuple):
    """The newest header of an environment. root: page of the tree of free pages, NO_ROOT if it is empty"""

    transaction: int
    last_page: int
    root: int
    page_bytes: int


def find_damage(path: Path) -> str:
    """Return how an environment's file is damaged, in words, "" if it is not.

    A file that cannot be opened, or is empty, as if its writer was killed when it began, is not judged: opening it says more.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        while True:
            header, n_bytes = read_header(file), os.fstat(file).st_size
            if header is None:
                return "is not in the format of LMDB" if n_bytes else ""
            if (header.last_page + 1) * header.page_bytes <= n_bytes:
                return ""
            is_lost = are_pages_lost(file, header, n_bytes // header.page_bytes)
            if header == read_header(file):  # else a writer committed meanwhile
                return "lacks its end, as after a copy that broke off" if is_lost else ""
    finally:
        os.close(file)


def read_header(file: int) -> Header | None:
    """Return the header of the latest transaction, None if the file is no environment."""
    headers, offset = [], 0
    for _ in range(2):
        data = os.pread(file, HEADER.size, offset)
        if len(data) < HEADER.size:
            break
        magic, _, page_bytes, _, _, _, _, _, _, root, last_page, transaction = HEADER.unpack(data)
        if magic != MAGIC or not page_bytes:
            break
        headers.append(Header(transaction, last_page, root, page_bytes))
        offset = page_bytes
    return max(headers, default=None)


def are_pages_lost(file: int, header: Header, n_pages: int) -> bool:
    """Return whether any page from `n_pages` on, the first that is missing, is not free."""
    try:
        free = np.unique(np.concatenate([np.empty(0, np.uint64), *read_free_pages(file, header)]))
    except (EOFError, struct.error, ValueError):  # a page is missing, or holds something else
        return True
    n_free = int(((free >= n_pages) & (free <= header.last_page)).sum())
    return n_free < header.last_page + 1 - n_pages


def read_free_pages(file: int, header: Header) -> Iterator[np.ndarray]:
    """Yield the numbers of the free pages, uint64 [N].

    Raises EOFError if a page of the tree is missing, ValueError or struct.error if one holds something else.
    """
    waiting, seen = [] if header.root == NO_ROOT else [header.root], set[int]()
    while waiting:
        if (place := waiting.pop()) in seen:
            raise ValueError(f"page {place} has two parents")
        seen.add(place)
        page = read_page(file, place, header.page_bytes)
        _, _, page_flags, end, _ = PAGE.unpack_from(page)
        for offset in struct.unpack_from(f"<{(end - PAGE.size) // 2}H", page, PAGE.size):
            low, high, flags, key_bytes = NODE.unpack_from(page, offset)
            value = offset + NODE.size + key_bytes
            if page_flags & BRANCH:
                waiting.append(low | high << 16 | flags << 32)
            elif flags & IS_LARGE:
                n_bytes, number = low | high << 16, struct.unpack_from("<Q", page, value)[0]
                yield read_numbers(read_page(file, number, header.page_bytes, PAGE.size + n_bytes), PAGE.size)
            else:
                yield read_numbers(page, value)


def read_numbers(page: bytes, offset: int) -> np.ndarray:
    """Return the numbers of a list that begins with their count. Raises ValueError if they are not there."""
    (count,) = struct.unpack_from("<Q", page, offset)
    return np.frombuffer(page, "<u8", offset=offset + 8, count=min(count, len(page)))  # fewer bytes than that are a ValueError


def read_page(file: int, number: int, page_bytes: int, n_bytes: int = 0) -> bytes:
    """Return a page, or the `n_bytes` from its start on. Raises EOFError if they are not there."""
    n_bytes, start = n_bytes or page_bytes, number * page_bytes
    if start + n_bytes > os.fstat(file).st_size:
        raise EOFError(f"page {number} is missing")
    return os.pread(file, n_bytes, start)
