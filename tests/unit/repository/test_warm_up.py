"""Warm-up requests of a model, written whole or not at all."""

from pathlib import Path

import numpy as np
import pytest

from repository.triton.model_files import write_warmup
from serving.contract.tensors import (
    ModelSpec,
    TensorSpec,
)
from tests.unit.repository.publishing import publish_once


def test_warm_up_texts_of_any_length_are_whole(tmp_path):
    spec = ModelSpec("only", (TensorSpec("country", "BYTES", (1,)),), ())
    path = tmp_path / "only" / "warmup" / "country_0"
    path.parent.mkdir(parents=True)
    for stored, kept in ((b"\7\0\0\0Germany", True), (b"\7\0\0\0Ger", False), (b"\7\0", False)):
        path.write_bytes(stored)
        write_warmup(path.parent, spec, {"country": np.array([[b"EIRE"]], np.object_)}, 1)
        assert path.read_bytes() == (stored if kept else b"\4\0\0\0EIRE")


def test_a_warm_up_file_that_does_not_fit_leaves_nothing(tmp_path, monkeypatch):
    write_bytes = Path.write_bytes

    def disk_full(path, content):
        write_bytes(path, content[:1])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", disk_full)
    with pytest.raises(OSError, match="No space"):
        publish_once(tmp_path / "repo")
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size == 1] == []
