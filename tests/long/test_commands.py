"""The commands of `python -m export`, and what they write to a repository."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from export.__main__ import app
from export.continuous.continued import continue_log
from export.relayout import relayout
from live.erase import erase_user
from repository.registry import LATE, read_acts, read_manifest
from repository.rounds import EndedRound, read_round, read_running
from serving.contract.artifacts import MANIFEST_FILE, find_stage_folder, write_manifest
from serving.contract.errors import ArtifactError, ConfigError, run_program
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, OBSERVE
from serving.stages.live.models import Observe
from tests.interrupting import called_on_return
from tests.repositories import copy_to_change, small_repository
from tests.unit.small_shops import few_resamples

DATA = small_repository().parent / "data"
SETTINGS = """
[pipeline]
recorded_requests = 64
[ranker]
compression = "none"
"""  # settings of a fast export


@pytest.fixture(autouse=True, scope="module")
def rough_bounds() -> Iterator[None]:
    with few_resamples():
        yield


@pytest.fixture
def repo(tmp_path) -> Path:
    return copy_to_change(small_repository(), tmp_path / "repository")


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(SETTINGS)
    return path


def read_ended(repo: Path) -> EndedRound:
    """Return what is recorded of the round that ended last."""
    ended = read_round(repo)
    assert ended is not None
    return ended


def run(*words: object) -> str:
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False).output


def test_an_export_is_read_only_and_every_move_of_the_pin_is_recorded(repo, config):
    run("build", "--data", DATA, "--repo", repo, "--config", config)
    files = [path for path in repo.glob("*/2/**/*") if path.is_file()]
    assert files
    assert not [path for path in files if path.stat().st_mode & 0o222]
    run("relayout", small_repository(), repo, "--layout", "ensemble")
    run("pin", 2, "--repo", repo)
    assert read_pinned_generation(repo) == 2
    acts = [(act.action, act.generation, act.reason) for act in read_acts(repo)]
    assert acts == [
        ("published", 2, f"exported from {DATA}"),
        ("published", 1, LATE),  # the fixture's, whose files are removed now
        ("published", 3, f"laid out again from {small_repository()}"),
        ("pinned", 2, ""),
    ]


def test_an_export_during_which_a_user_is_erased_says_that_it_may_have_learned_from_the_user(repo, config):
    observe = Observe.load(find_stage_folder(repo, OBSERVE, 1))
    with closing(observe), called_on_return(lambda: erase_user(observe.writer, 7), continue_log):
        said = run("build", "--data", DATA, "--repo", repo, "--config", config)
    assert "generation 2 may have learned from that user's events. Export again." in " ".join(said.split())


def test_a_publication_that_was_killed_before_its_record_keeps_its_verdict(repo):
    assert relayout(small_repository(), repo, "ensemble", beside=1, reason="NDCG@10 0.2 against 0.1: published") == 2
    assert read_acts(repo) == []  # the process died here
    relayout(small_repository(), repo, "ensemble", beside=1)
    assert [(act.generation, act.reason) for act in read_acts(repo)] == [(2, f"NDCG@10 0.2 against 0.1: published; {LATE}")]


def test_follow_refuses_the_data_of_another_shop(repo):
    with pytest.raises(ConfigError, match="learned from the data set 'small', and --data names 'synthetic:tiny'"):
        run("follow", "--once", "--data", "synthetic:tiny", "--repo", repo)


def test_follow_without_a_config_reads_the_settings_of_what_serves(repo, config):
    follow = "follow", "--once", "--data", DATA, "--repo", repo
    assert "waits: 0 events are newer than generation 1" in run(*follow)
    assert read_ended(repo).outcome == "waits"
    folder = repo / ENSEMBLE / "1"
    manifest = read_manifest(repo, 1)
    manifest["settings"]["ranker"]["an_old_key"] = True
    write_manifest(folder, **{key: value for key, value in manifest.items() if key not in ("schema", "files")})
    with pytest.raises(ArtifactError, match="an_old_key"):
        run(*follow)
    failed = read_ended(repo)
    assert failed.outcome == "failed"
    assert "an_old_key" in failed.report
    assert "waits: 0 events are newer than generation 1" in run(*follow, "--config", config)


def rewrite_data_set(repo: Path, **dataset: object) -> None:
    """Replace what the manifest of generation 1 says of its data set. Nothing given: remove it, which no code expects."""
    facts = {key: value for key, value in read_manifest(repo, 1).items() if key not in ("schema", "files", "dataset")}
    write_manifest(repo / ENSEMBLE / "1", **facts, **({"dataset": dataset} if dataset else {}))


def test_follow_records_an_error_that_nobody_expected_and_raises_it_again(repo):
    rewrite_data_set(repo)
    with pytest.raises(KeyError):
        run("follow", "--once", "--data", DATA, "--repo", repo)
    assert (read_ended(repo).outcome, read_ended(repo).report) == ("failed", "KeyError: 'dataset'")
    assert read_running(repo) is None


def test_follow_goes_on_after_an_error_that_nobody_expected(repo, monkeypatch):
    manifest = (repo / ENSEMBLE / "1" / MANIFEST_FILE).read_text()
    rewrite_data_set(repo)
    ended = list[EndedRound]()

    def mend_or_end(seconds: float) -> None:
        ended.append(read_ended(repo))
        if len(ended) == 2:
            raise KeyboardInterrupt
        (repo / ENSEMBLE / "1" / MANIFEST_FILE).write_text(manifest)

    monkeypatch.setattr(time, "sleep", mend_or_end)
    done = CliRunner().invoke(app, ["follow", "--data", str(DATA), "--repo", str(repo)], catch_exceptions=False)
    assert [each.outcome for each in ended] == ["failed", "waits"]
    assert "error: KeyError: 'dataset'" in done.stdout
    assert "Traceback" in done.stderr


def test_follow_of_a_repository_that_is_not_there_says_so_once(repo, monkeypatch, capfd):
    words = ["export", "follow", "--once", "--data", str(DATA), "--repo", str(repo.parent / "nowhere")]
    monkeypatch.setattr(sys, "argv", words)
    said = r"error: .*/nowhere/recommend/config\.pbtxt cannot be read: .* Create a repository with `make export REPO=.*`\."
    with pytest.raises(SystemExit, match=f"^{said}$"):  # Python prints it, and ends with 1
        run_program(app)
    assert capfd.readouterr() == ("", "")
