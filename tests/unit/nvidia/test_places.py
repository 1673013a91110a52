"""Folders that a merlin repository may not replace, and the refusal to lay one out again.

An export replaces the whole folder, so it refuses a folder with anything else in it, before training.
"""

from pathlib import Path

import pytest

from export.profiles import load_profile
from export.relayout import relayout
from export.settings import Settings
from repository.publish import Staging
from serving.contract.errors import ConfigError, ExportError


def refuse_early(repository: Path) -> None:
    load_profile("merlin").refuse_early(repository, Staging(repository), {}, Settings())


@pytest.mark.parametrize("entry", ["photos/one.jpg", "notes.txt", ".git/config", "rank/config.pbtxt"])
def test_a_folder_with_other_things_is_refused(tmp_path, entry):
    path = tmp_path / "home" / entry
    path.parent.mkdir(parents=True)
    path.write_text("dear")
    name = entry.partition("/")[0]
    with pytest.raises(
        ExportError, match=rf"home is no model repository: it holds {name}\. .*choose another REPO, an empty folder"
    ):
        refuse_early(tmp_path / "home")
    assert path.read_text() == "dear"


def test_new_and_empty_folders_are_fine_and_the_one_of_a_checkout(tmp_path):
    refuse_early(tmp_path / "new")
    (tmp_path / "README.md").write_text("`make export` publishes here.")
    refuse_early(tmp_path)


def test_a_merlin_repository_cannot_be_laid_out_again(tmp_path):
    (tmp_path / "merlin" / "rank_dense").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"merlin is of the merlin profile\. Only the cpu profile has layouts"):
        relayout(tmp_path / "merlin", tmp_path / "other", "fused")
    assert not (tmp_path / "other").exists()
