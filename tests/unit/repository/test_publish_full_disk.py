"""A publication that finds no space names the folders that it writes into, whatever words the library has for it."""

from __future__ import annotations

import errno
import resource
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from repository.publish import Staging
from serving.contract.errors import ExportError
from serving.contract.generations import read_pinned_generation
from tests.unit.repository.publishing import publish_once

ROOM = 10_000  # bytes that a file may have in `small_files`


@pytest.fixture
def small_files():
    """Let no file of this process grow beyond ROOM, which stands for a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_bytes(folder: Path) -> None:
    with open("/dev/full", "wb") as file:
        file.write(b"a file of the generation")


def save_array(folder: Path) -> None:
    np.save(folder / "rows.npy", np.zeros(ROOM))


def copy_files(folder: Path) -> None:
    (folder / "source").mkdir()
    (folder / "source" / "file").symlink_to("/dev/zero")
    shutil.copytree(folder / "source", folder / "copy")


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (write_bytes, r"\[Errno 28\] No space left on device"),
        (save_array, r"\d+ requested and \d+ written"),
        (copy_files, r"\[Errno 27\] File too large"),
    ],
)
@pytest.mark.usefixtures("small_files")
def test_a_full_disk_is_named_with_a_remedy(tmp_path, write, reason):
    folders = rf"written into {tmp_path}, where [\d,]+ MiB are free, and temporary ones into {tempfile.gettempdir()}, where"
    with (
        pytest.raises(ExportError, match=rf"cannot be written: {reason}.* {folders} .* Free space, or choose another REPO"),
        Staging(tmp_path / "repo") as staging,
    ):
        write(staging.folder("rank"))
    assert not list(tmp_path.glob(".*.staging"))


def test_other_errors_stay_what_they_are(tmp_path):
    publish_once(tmp_path / "repo")
    with pytest.raises(OSError, match="Input/output error"), Staging(tmp_path / "repo"):
        raise OSError(errno.EIO, "Input/output error")
    assert read_pinned_generation(tmp_path / "repo") == 1


def test_a_file_that_cannot_be_copied_for_another_reason_is_no_full_disk(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").symlink_to("nowhere")
    with pytest.raises(shutil.Error, match="No such file"), Staging(tmp_path / "repo"):
        shutil.copytree(tmp_path / "source", tmp_path / "copy")
