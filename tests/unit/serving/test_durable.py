"""Tests that files are written as a whole or not at all."""

import fcntl
import resource
import threading
from contextlib import contextmanager

import pytest

from serving.contract.durable import append_durably, replace_durably


@contextmanager
def files_of_at_most(n_bytes):
    """Let no file of this process grow beyond a size, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def list_names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_as_a_whole_and_is_its_owners_alone(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with replace_durably(path) as file:
        file.write(b"after")
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"after"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list_names(tmp_path) == ["file"]


def test_a_full_disk_leaves_the_former_file_and_no_draft(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with files_of_at_most(100), pytest.raises(OSError, match="File too large"), replace_durably(path) as file:
        file.write(b"x" * 200)
    assert path.read_bytes() == b"before"
    assert list_names(tmp_path) == ["file"]


def test_lines_are_appended_to_a_file_of_their_own_mode(tmp_path):
    path = tmp_path / "file"
    append_durably(path, "one\n")
    append_durably(path, "two\n")
    assert path.read_text() == "one\ntwo\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_leaves_no_half_of_a_line(tmp_path):
    path = tmp_path / "file"
    append_durably(path, "one\n")
    with files_of_at_most(10), pytest.raises(OSError, match="No space left"):
        append_durably(path, "a line of more than ten bytes\n")
    assert path.read_text() == "one\n"


def test_lines_that_another_process_is_adding_are_waited_for(tmp_path):
    """A failure cuts the file to the size that it had: lines that came in between would be lost."""
    path = tmp_path / "file"
    append_durably(path, "first\n")
    adding = threading.Thread(target=append_durably, args=(path, "third\n"))
    with path.open("ab", buffering=0) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        adding.start()
        adding.join(0.3)
        other.write(b"second\n")
    adding.join(10)
    assert path.read_text() == "first\nsecond\nthird\n"
