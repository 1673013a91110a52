import numpy as np
import pytest

from serving.contract.errors import ArtifactError, DataError
from serving.tables.formats import sparse_folder
from serving.tables.formats.sparse_folder import read_sparse_folder, write_sparse_folder
from tests.unit.hps.oracle import read_sparse

KEYS = np.array([7, -5, 2**40, 0])
VECTORS = np.arange(12, dtype=np.float32).reshape(4, 3)


def test_hottest_first_byte_for_byte(tmp_path):
    write_sparse_folder(tmp_path / "t.model", KEYS, VECTORS, np.array([1, 5, 5, 9]))
    expected = [(0, (9, 10, 11)), (-5, (3, 4, 5)), (2**40, (6, 7, 8)), (7, (0, 1, 2))]  # ties keep their order
    assert read_sparse(tmp_path / "t.model", 3) == expected
    assert sorted(path.name for path in (tmp_path / "t.model").iterdir()) == ["emb_vector", "key"]


def test_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(sparse_folder, "CHUNK_ROWS", 3)
    write_sparse_folder(tmp_path, KEYS, VECTORS)
    assert read_sparse(tmp_path, 3) == list(zip(KEYS.tolist(), map(tuple, VECTORS.tolist()), strict=True))


def test_read_back_as_shared_pages(tmp_path):
    write_sparse_folder(tmp_path, KEYS, VECTORS.astype(np.float64))
    table = read_sparse_folder(tmp_path, 3)
    np.testing.assert_array_equal(table.keys, KEYS)
    np.testing.assert_array_equal(table.vectors, VECTORS)
    assert isinstance(table.keys, np.memmap)
    assert isinstance(table.vectors, np.memmap)


@pytest.mark.parametrize(
    ("keys", "vectors", "counts", "message"),
    [
        ([], np.zeros((0, 3)), None, "the table has no rows"),
        ([1, -1], np.zeros((2, 3)), None, "row 1 has key -1"),
        ([2**63 - 1], np.zeros((1, 3)), None, "has key 9223372036854775807"),
        ([4, 5, 4], np.zeros((3, 3)), None, "key 4 occurs more than once"),
        ([4, 5], np.zeros((3, 3)), None, r"2 keys and vectors \[3, 3\]"),
        ([4, 5], np.zeros(2), None, r"Expected \[2, D\]"),
        ([4, 5], np.zeros((2, 3)), np.ones(3), r"use counts \[3\]. Expected \[2\]"),
    ],
)
def test_tables_that_are_refused(tmp_path, keys, vectors, counts, message):
    with pytest.raises(DataError, match=message):
        write_sparse_folder(tmp_path / "t", np.array(keys, np.int64), vectors, counts)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("name", ["key", "emb_vector"])
def test_missing_and_empty_files(tmp_path, name):
    write_sparse_folder(tmp_path, KEYS, VECTORS)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ArtifactError, match=f"{name} is missing or empty"):
        read_sparse_folder(tmp_path, 3)
    (tmp_path / name).unlink()
    with pytest.raises(ArtifactError, match=f"{name} is missing or empty"):
        read_sparse_folder(tmp_path, 3)


@pytest.mark.parametrize(("name", "kept"), [("key", 31), ("key", 24), ("emb_vector", 47), ("emb_vector", 36)])
def test_cut_files(tmp_path, name, kept):
    write_sparse_folder(tmp_path, KEYS, VECTORS)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:kept])
    with pytest.raises(ArtifactError, match=r"The files are truncated or have another width"):
        read_sparse_folder(tmp_path, 3)


def test_another_width(tmp_path):
    write_sparse_folder(tmp_path, KEYS, VECTORS)
    with pytest.raises(ArtifactError, match=r"Expected 8·n and 16·n for width 4"):
        read_sparse_folder(tmp_path, 4)


@pytest.mark.parametrize(("keys", "message"), [([1, -1], "row 1 has key -1"), ([3, 3], "key 3 occurs more than once")])
def test_bad_keys_on_disk(tmp_path, keys, message):
    np.array(keys, "<i8").tofile(tmp_path / "key")
    np.zeros(6, "<f4").tofile(tmp_path / "emb_vector")
    with pytest.raises(ArtifactError, match=message):
        read_sparse_folder(tmp_path, 3)
