"""A file that is opened for writing: its lease says so before it changes, and the writer waits."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.generations.leases import Leases, wait_until_closed

CONTENT = b"published"
WRITES = "import sys, time; file = open(sys.argv[1], 'r+b'); file.write(b'changed!!'); file.flush(); time.sleep(0.3)"


@pytest.fixture
def told() -> Iterator[threading.Event]:
    """Set when the kernel sends SIGIO."""
    told = threading.Event()
    before = signal.signal(signal.SIGIO, lambda *_: told.set())
    yield told
    signal.signal(signal.SIGIO, before)


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "vectors.npy"
    path.write_bytes(CONTENT)
    return path


def test_a_writer_waits_until_the_lease_is_released(path, told):
    leases = Leases([path])
    writer = subprocess.Popen([sys.executable, "-c", WRITES, str(path)])
    assert told.wait(30)
    assert leases.find_opened() == path
    assert path.read_bytes() == CONTENT
    leases.release()
    wait_until_closed(path, timeout_s=30)
    assert path.read_bytes() == b"changed!!"
    assert writer.wait(30) == 0


def test_reading_and_replacing_a_file_need_no_release(path, told):
    leases = Leases([path, path.with_name("missing.npy")])
    assert path.read_bytes() == CONTENT
    other = path.with_name("other.npy")
    other.write_bytes(b"changed!!")
    other.replace(path)
    assert not told.wait(0.1)
    assert leases.find_opened() is None
    leases.release()
