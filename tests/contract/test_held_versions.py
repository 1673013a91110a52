"""A loaded version is held by a lock, so that no publication on the machine removes it."""

from __future__ import annotations

from pathlib import Path

from serving.contract.artifacts import MANIFEST_FILE
from serving.contract.locks import is_locked
from tests.contract.stages import Echo, quiet_model


def test_a_loaded_version_is_held_until_it_is_unloaded(arguments):
    manifest = Path(arguments["model_repository"]) / arguments["model_version"] / MANIFEST_FILE
    model = quiet_model(Echo)
    assert not is_locked(manifest)
    model.initialize(arguments)
    assert is_locked(manifest)
    model.finalize()
    assert not is_locked(manifest)
