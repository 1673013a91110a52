"""Files that are not as published are found: at once where their size or times changed, otherwise by reading in turn."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from repository.registry import RECORD_FILE
from server.generations.integrity import ArtifactCheck, find_other_intact, is_intact
from serving.contract.artifacts import MANIFEST_FILE, compute_sha256, write_manifest
from tests.repositories import copy_generation, copy_lean_repository


@pytest.fixture
def repo(tmp_path):
    repo = tmp_path / "repository"
    for model in ("rank", "recommend"):
        folder = repo / model / "3"
        folder.mkdir(parents=True)
        (folder / "array.npy").write_bytes(b"a" + os.urandom(3_000_000))
        (folder / "stage.json").write_text("{}")
        write_manifest(folder)
    return repo


def collect_faults(check: ArtifactCheck, count: int) -> list[str]:
    return [fault for _ in range(count) if (fault := check.look())]


def test_an_untouched_generation_has_no_fault(repo):
    check = ArtifactCheck(repo, 3)
    assert collect_faults(check, 50) == []
    os.utime(repo / "rank" / "3" / "array.npy")
    assert collect_faults(check, 50) == []
    assert is_intact(repo, 3)
    assert collect_faults(ArtifactCheck(repo, 0), 3) == []  # of a repository that is not ours


@pytest.mark.parametrize("damage", ["change", "truncate", "remove", "manifest"])
def test_damage_is_found_at_the_next_look(repo, damage):
    check, path = ArtifactCheck(repo, 3), repo / "rank" / "3" / "array.npy"
    if damage == "change":
        with path.open("r+b") as file:
            file.write(b"x")
    elif damage == "truncate":
        os.truncate(path, 10)
    elif damage == "remove":
        path.unlink()
    else:
        path = repo / "rank" / "3" / "manifest.json"
        path.write_text("{")
    assert str(path) in check.look()
    assert check.has_changed()
    assert not is_intact(repo, 3)


def test_a_file_that_was_changed_with_its_manifest_is_found(repo):
    """Also by a check that begins later: the generation's manifest states the digests of the others."""
    folder = repo / "rank" / "3"
    write_manifest(repo / "recommend" / "3", stages={"rank": compute_sha256(folder / MANIFEST_FILE)})
    assert is_intact(repo, 3)
    (folder / "array.npy").write_bytes(b"another")
    write_manifest(folder)
    assert not is_intact(repo, 3)
    assert str(folder / MANIFEST_FILE) in collect_faults(ArtifactCheck(repo, 3), 50)[0]


@pytest.mark.parametrize("missing", ["", MANIFEST_FILE])
def test_a_stage_that_was_removed_before_the_check_begins_is_a_fault_until_it_is_back(repo, missing):
    folder = repo / "rank" / "3"
    write_manifest(repo / "recommend" / "3", stages={"rank": compute_sha256(folder / MANIFEST_FILE)})
    removed = (folder / missing).rename(repo.parent / "removed")
    check = ArtifactCheck(repo, 3)
    assert str(folder / MANIFEST_FILE) in check.read_all()
    assert not check.has_changed()
    removed.rename(folder / missing)
    assert check.has_changed()
    assert is_intact(repo, 3)


@pytest.mark.parametrize("files", [["array.npy"], {"array.npy": {}}, {"array.npy": None}, {"array.npy": {"sha": "0"}}])
def test_a_manifest_without_digests_is_a_fault(repo, files):
    (repo / "rank" / "3" / "manifest.json").write_text(json.dumps({"files": files}))
    assert str(repo / "rank" / "3") in ArtifactCheck(repo, 3).read_all()


@pytest.mark.parametrize("damage", ["repository removed", "manifest damaged"])
def test_files_that_cannot_be_listed_are_a_fault_until_they_are_back(repo, damage):
    backup = shutil.copytree(repo, repo.parent / "backup")
    if damage == "repository removed":
        shutil.rmtree(repo)
    else:
        (repo / "rank" / "3" / "manifest.json").write_text("{")
    check = ArtifactCheck(repo, 3)
    assert str(repo) in check.look()
    shutil.copytree(backup, repo, dirs_exist_ok=True)
    assert check.has_changed()
    assert is_intact(repo, 3)


def test_a_generation_that_is_removed_while_its_files_are_listed_is_a_fault(repo):
    """Its manifests go first, so that no file is listed, then its folders."""
    for manifest in repo.glob(f"*/3/{MANIFEST_FILE}"):
        manifest.unlink()
    check = ArtifactCheck(repo, 3)
    shutil.rmtree(repo)
    assert "its files were removed" in check.look()
    assert "its files were removed" in check.read_all()
    assert check.has_changed()


def test_damage_that_leaves_no_trace_is_found_by_reading(repo):
    path = repo / "recommend" / "3" / "array.npy"
    content = path.read_bytes()
    path.write_bytes(b"x" + content[1:])
    check = ArtifactCheck(repo, 3)  # created after the damage: as if size and times had been restored
    found = collect_faults(check, 20)
    assert found
    assert str(path) in found[0]


def test_a_record_that_cannot_be_read_keeps_no_generation_from_being_chosen(tmp_path):
    repo = copy_lean_repository(tmp_path / "repo")
    copy_generation(repo)
    (repo / RECORD_FILE).write_bytes(b"\xff\n")
    assert find_other_intact(repo, 1) == 2
