"""Read and write HPS's folders of sparse models: `key` (n int64) and `emb_vector` (n rows of D float32) in the same order.

Both are little-endian and without a header. Caches are prefilled from the start of the files, so the hottest keys come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serving.contract.errors import ArtifactError, DataError
from serving.tables.formats.names import check_keys

CHUNK_ROWS = 1 << 18  # rows written at a time: reordering copies them


@dataclass(frozen=True)
class SparseTable:
    """A table on disk, memory-mapped, so that instances share its pages."""

    keys: np.ndarray  # int64 [N], hottest first
    vectors: np.ndarray  # float32 [N, D]


def write_sparse_folder(folder: Path, keys: np.ndarray, vectors: np.ndarray, use_counts: np.ndarray | None = None) -> None:
    """Write one table. keys: int64 [N]; vectors: float32 [N, D]

    use_counts: [N], by which rows are sorted, the most used first; None: rows keep their order, as do those of equal counts
    Raises DataError for reserved or repeated keys, an empty table, and lengths that differ.
    """
    keys = check_keys(keys, str(folder))
    _check_rows(folder, keys, vectors, use_counts)
    order = np.arange(len(keys)) if use_counts is None else np.argsort(-np.asarray(use_counts, np.float64), kind="stable")
    folder.mkdir(parents=True, exist_ok=True)
    keys[order].astype("<i8").tofile(folder / "key")
    with open(folder / "emb_vector", "wb") as file:
        for start in range(0, len(order), CHUNK_ROWS):
            file.write(np.ascontiguousarray(vectors[order[start : start + CHUNK_ROWS]], "<f4").tobytes())


def _check_rows(folder: Path, keys: np.ndarray, vectors: np.ndarray, use_counts: np.ndarray | None) -> None:
    if not len(keys):
        raise DataError(f"{folder}: the table has no rows. HPS refuses empty files. Write at least the padding row.")
    if vectors.ndim != 2 or len(vectors) != len(keys) or vectors.shape[1] < 1:
        raise DataError(
            f"{folder}: {len(keys)} keys and vectors {list(vectors.shape)}. Expected [{len(keys)}, D]. Pass one per key."
        )
    if use_counts is not None and np.shape(use_counts) != (len(keys),):
        raise DataError(
            f"{folder}: {len(keys)} keys and use counts {list(np.shape(use_counts))}. Expected [{len(keys)}]. Count every key."
        )
    repeated = _find_repeated(keys)
    if repeated is not None:
        raise DataError(f"{folder}: key {repeated} occurs more than once. Expected unique keys. Keep one row per key.")


def _find_repeated(keys: np.ndarray) -> int | None:
    in_order = np.sort(keys)
    repeated = np.flatnonzero(in_order[1:] == in_order[:-1])
    return int(in_order[repeated[0]]) if repeated.size else None


def read_sparse_folder(folder: Path, width: int) -> SparseTable:
    """Map one table of `width` values per row. Raises ArtifactError for missing, truncated or mismatched files and bad keys."""
    sizes = {}
    for name in ("key", "emb_vector"):
        path = folder / name
        if not path.is_file() or not path.stat().st_size:
            raise ArtifactError(f"{path} is missing or empty. Expected the table's rows. Export the repository again.")
        sizes[name] = path.stat().st_size
    n_rows = sizes["key"] // 8
    if sizes["key"] % 8 or sizes["emb_vector"] != n_rows * 4 * width:
        raise ArtifactError(
            f"{folder}: key has {sizes['key']} bytes, emb_vector {sizes['emb_vector']}. Expected 8·n and {4 * width}·n "
            f"for width {width}. The files are truncated or have another width: export the repository again."
        )
    keys = np.memmap(folder / "key", "<i8", "r")
    try:
        check_keys(keys, str(folder))
    except DataError as error:
        raise ArtifactError(str(error)) from error
    repeated = _find_repeated(keys)
    if repeated is not None:
        raise ArtifactError(
            f"{folder}: key {repeated} occurs more than once. Expected unique keys. Export the repository again."
        )
    return SparseTable(keys, np.memmap(folder / "emb_vector", "<f4", "r", shape=(n_rows, width)))
