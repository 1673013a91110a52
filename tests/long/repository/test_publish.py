"""Publication: whole or not at all, one at a time, the previous generation kept, the contract of a repository never changed."""

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from export.relayout import relayout
from repository.challenger import read_challengers, write_challenger
from repository.generations import pin
from repository.lock import hold_publication_lock
from repository.publish import Staging, find_served_generation, list_versions
from repository.triton.config import CONFIG_FILE, LAYOUTS, WARMUP_BATCH
from repository.triton.models import read_config, read_repository
from serving.contract.artifacts import (
    MANIFEST_FILE,
    StageInfo,
    compute_sha256,
    find_stage_folder,
    read_stage,
    verify_manifest,
    write_manifest,
)
from serving.contract.errors import ArtifactError, ConfigError, ExportError, ServerError
from serving.contract.locks import hold_shared_lock
from serving.contract.tensors import (
    ENSEMBLE,
    LIVE_MODELS,
    STAGES,
    Axes,
    make_ensemble_spec,
    make_stage_specs,
)
from tests.clocks import PatientClock
from tests.repositories import copy_lean_repository, copy_to_change
from tests.unit.repository.publishing import AXES, SERVING, publish_once, recorded


@pytest.fixture(scope="module")
def first_generations(tmp_path_factory):
    """Layout -> a repository with one generation, to be copied."""
    folder = tmp_path_factory.mktemp("first")
    for layout in LAYOUTS:
        publish_once(folder / layout, layout=layout)
    return {layout: folder / layout for layout in LAYOUTS}


@pytest.fixture
def published(first_generations, tmp_path):
    """published(layout) -> a repository of its own with one generation."""
    return lambda layout="fused": copy_to_change(first_generations[layout], tmp_path / "repo")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_generation_that_a_model_of_any_checkout_has_loaded_is_not_removed(published, layout):
    repository = published(layout)
    version = repository / (ENSEMBLE if layout == "fused" else "rank") / "1"
    with hold_shared_lock(version / MANIFEST_FILE), hold_shared_lock(version / MANIFEST_FILE):  # as two instances do
        for _ in range(3):
            newest = publish_once(repository, layout=layout)
        assert list_versions(repository) == {1, newest - 1, newest}
    assert publish_once(repository, layout=layout) == newest + 1
    assert list_versions(repository) == {newest, newest + 1}


def test_a_generation_is_whole_and_verified(tmp_path):
    repository = tmp_path / "repo"
    assert publish_once(repository, layout="ensemble") == 1
    assert find_served_generation(repository) == 1
    facts = verify_manifest(repository / ENSEMBLE / "1")
    assert facts["dataset"] == "none"
    assert facts["stages"].keys() == {*STAGES, *LIVE_MODELS}
    assert facts["sealed_s"] == pytest.approx(time.time(), abs=60)
    for name in STAGES:
        manifest = verify_manifest(repository / name / "1")
        assert "model.py" in manifest["files"]
        assert "serving/contract/tensors.py" in manifest["files"]
        assert {w.batch_size for w in read_config(repository / name / CONFIG_FILE).model_warmup} == {1, WARMUP_BATCH}
        first = make_stage_specs(AXES)[name].inputs[0]
        size = int(np.prod(first.dims)) * first.numpy_dtype.itemsize
        assert [len((repository / name / "warmup" / f"{first.name}_{row}").read_bytes()) for row in range(4)] == [size] * 4
    assert [path.name for path in tmp_path.glob(".repo.staging")] == []


def test_only_what_serves_is_published(published):
    repository = published("ensemble")
    files_of = {name: set(verify_manifest(repository / name / "1")["files"]) for name in STAGES}
    for name, files in files_of.items():
        assert {stage for stage in STAGES if f"serving/stages/{stage}.py" in files} == {name}
        assert not {path for path in files if "/updates/publisher" in path or "/stages/parts/" in path}
    for name in ("preprocess", "retrieve"):  # they read users, whose state may be in Redis
        assert "serving/live/shared/redis_state.py" in files_of[name]
    assert "serving/tables/updates/updater.py" in files_of["rank"]  # runs beside the server from this folder
    assert not {path for path in files_of["preprocess"] | files_of["rerank"] if "serving/tables/" in path}


def test_a_path_that_no_model_starts_from_is_refused_before_training(tmp_path):
    with (
        Staging(tmp_path / "two words" / "repo") as staging,
        pytest.raises(ConfigError, match="no model starts from there"),
    ):
        staging.check_contract(make_stage_specs(AXES))


def test_the_fused_layout_is_one_model_with_the_stages_inside(tmp_path):
    repository = tmp_path / "repo"
    publish_once(repository, layout="fused")
    assert {model.name for model in read_repository(repository)} == {ENSEMBLE, *LIVE_MODELS}
    version = repository / ENSEMBLE / "1"
    assert read_stage(version).spec == make_ensemble_spec(make_stage_specs(AXES))
    facts = verify_manifest(version)
    assert {f"{name}/stage.json" for name in STAGES} | {"model.py", "serving/contract/tensors.py"} <= facts["files"].keys()
    for name in STAGES:
        assert compute_sha256(find_stage_folder(repository, name, 1) / MANIFEST_FILE) == facts["stages"][name]
        verify_manifest(version / name)
    assert {path.name for path in (repository / ENSEMBLE / "warmup").iterdir()} >= {"user_id_0", "exclude_3"}


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("[]", "holds no JSON object"),
        ('{"files": ["array.npy"]}', "has no object 'files'"),
        ('{"files": {"array.npy": 3}}', "array.npy is not the file that was published"),
    ],
)
def test_a_manifest_of_another_form_is_refused(tmp_path, manifest, message):
    (tmp_path / "array.npy").write_bytes(b"x")
    (tmp_path / MANIFEST_FILE).write_text(manifest)
    with pytest.raises(ArtifactError, match=message):
        verify_manifest(tmp_path)


def test_a_file_that_may_not_be_read_is_named_with_a_remedy(tmp_path, monkeypatch):
    """Root may read every file, so the refusal is made up here."""
    (tmp_path / "array.npy").write_bytes(b"x")
    write_manifest(tmp_path)
    open_file = Path.open

    def refuse(path: Path, *args: Any, **options: Any) -> IO:
        if path.name == "array.npy":
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ArtifactError, match=r"array\.npy cannot be read: Permission denied.*`chmod -R a\+rX .*`"):
        verify_manifest(tmp_path)


@pytest.mark.parametrize("name", ["file", "file/repo"])
def test_a_place_where_no_repository_can_be_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match=rf"No repository can be written at {tmp_path / name}: .*another REPO"):
        publish_once(tmp_path / name)


def test_a_parent_that_cannot_be_written_is_refused():
    with pytest.raises(ExportError, match=r"No repository can be written at /proc/foo: No such file.*another REPO"):
        publish_once(Path("/proc/foo"))


def test_a_link_is_followed_and_what_is_staged_lies_beside_where_it_leads(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "repo")
    with Staging(tmp_path / "link") as staging:
        assert staging.root.parent == tmp_path / "disk"
    assert publish_once(tmp_path / "link") == 1
    assert find_served_generation(tmp_path / "disk" / "repo") == 1
    assert (tmp_path / "link").is_symlink()


def make_mount(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be renamed from elsewhere into the repository."""
    rename = Path.rename

    def across(path, target):
        if repository in target.parents and repository not in path.parents:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", across)


def test_a_new_repository_on_another_file_system_is_refused_before_training(tmp_path, monkeypatch):
    repository = tmp_path / "repo"
    make_mount(repository, monkeypatch)
    with pytest.raises(ExportError, match=rf"into {repository}, which is another file system.*choose a REPO inside"):
        Staging(repository).__enter__()
    monkeypatch.undo()
    assert not (tmp_path / ".repo.staging").exists()
    assert publish_once(repository) == 1  # nothing is left locked
    assert [path.name for path in repository.glob("*probe*")] == []


def test_a_repository_that_is_a_mount_gets_further_generations_and_a_challenger(tmp_path, monkeypatch):
    repository = tmp_path / "repo"
    assert publish_once(repository) == 1
    make_mount(repository, monkeypatch)
    (repository / ENSEMBLE / ".staging" / "1").mkdir(parents=True)  # of an interrupted publication
    assert publish_once(repository) == 2
    write_challenger(repository, 1)
    assert read_challengers(repository) == (1,)
    assert sorted(path.name for path in (repository / ENSEMBLE).iterdir()) == ["1", "2", CONFIG_FILE, "warmup"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["repo"]


def test_a_repository_that_cannot_be_written_is_refused_before_training(tmp_path, monkeypatch):
    def refuse(path, target):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(ExportError, match=r"written into .*repo: Permission denied\. Make it writable"):
        Staging(tmp_path / "repo").__enter__()


def test_another_layout_is_refused(published):
    repository = published("fused")
    with pytest.raises(ExportError, match=r"laid out as 'fused', this generation as 'ensemble'.*another REPO"):
        publish_once(repository, layout="ensemble")
    assert find_served_generation(repository) == 1


def test_the_published_code_imports_without_the_checkout_and_leaves_its_folder_as_it_was(published):
    folder = published("ensemble") / "rank" / "1"
    code = "import serving.contract.tensors, serving.tables; print(serving.contract.tensors.__file__)"
    output = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert output.startswith(str(folder))
    assert not [path for path in folder.rglob("__pycache__") if path.is_dir()]
    verify_manifest(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_previous_generation_stays_and_older_ones_go(published, layout):
    repository = published(layout)
    assert [publish_once(repository, layout=layout) for _ in range(2)] == [2, 3]
    assert list_versions(repository) == {2, 3}
    assert find_served_generation(repository) == 3


def test_going_back_and_publishing_again_keeps_the_generation_that_answers(published):
    repository = published()
    publish_once(repository)
    pin(repository, 1)
    assert find_served_generation(repository) == 1
    assert publish_once(repository) == 3
    assert list_versions(repository) == {1, 3}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failure_before_the_last_rename_changes_nothing_that_answers(published, layout, monkeypatch):
    repository, replace_file = published(layout), Path.replace

    def disk_full(draft, target):
        if target == repository / ENSEMBLE / CONFIG_FILE:
            raise OSError("No space left on device")
        return replace_file(draft, target)

    monkeypatch.setattr(Path, "replace", disk_full)
    with pytest.raises(OSError, match="No space"):
        publish_once(repository, layout=layout)
    assert find_served_generation(repository) == 1
    assert all(1 in model.versions_loaded for model in read_repository(repository))
    monkeypatch.undo()
    assert publish_once(repository, layout=layout) == 3
    assert list_versions(repository) == {1, 3}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_generation_is_on_the_disk_before_anything_names_it(published, layout, monkeypatch):
    repository, rename, done = published(layout), os.rename, list[str | Path]()

    class Libc:
        def syncfs(self, descriptor: int) -> int:
            done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            return 0

    def note(source, target):
        done.append(Path(target))
        rename(source, target)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc())
    monkeypatch.setattr(os, "rename", note)
    monkeypatch.setattr(os, "replace", note)
    publish_once(repository, layout=layout)
    placed = [place for place, target in enumerate(done) if isinstance(target, Path) and target.name == "2"]
    configs = [place for place, target in enumerate(done) if isinstance(target, Path) and target.name == CONFIG_FILE]
    assert len(placed) == len(read_repository(repository))
    assert str(repository.parent / f".{repository.name}.staging") in done[: min(placed)]
    assert str(repository) in done[max(placed) : min(configs)]


def test_a_generation_that_the_disk_did_not_take_is_not_published(published, monkeypatch):
    class Libc:
        def syncfs(self, descriptor: int) -> int:
            ctypes.set_errno(errno.EIO)
            return -1

    repository = published()
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc())
    with pytest.raises(OSError, match="Input/output error"):
        publish_once(repository)
    assert list_versions(repository) == {1}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_changed_after_sealing_is_refused(tmp_path, layout):
    specs = make_stage_specs(AXES)
    with Staging(tmp_path / "repo", layout) as staging:
        for name in STAGES:
            StageInfo(name, staging.generation, AXES).write(staging.folder(name))
        staging.seal_stages(specs)
        staging.seal({})
        (staging.folder("rank") / "stage.json").write_text(json.dumps({}))
        with pytest.raises(ArtifactError, match="SHA-256"):
            staging.publish(specs, SERVING, recorded(specs))
    assert find_served_generation(tmp_path / "repo") is None


def test_two_exports_into_one_repository_do_not_mix(tmp_path):
    with Staging(tmp_path / "repo"), pytest.raises(ExportError, match="Another export is writing"), Staging(tmp_path / "repo"):
        pass


def test_a_publication_waits_for_a_move_and_gives_up_rather_than_interleave(published, monkeypatch):
    repository = published()
    monkeypatch.setattr("repository.lock.time", PatientClock())
    with hold_publication_lock(repository), pytest.raises(ServerError, match="Another publication or move has held"):
        publish_once(repository)
    assert (find_served_generation(repository), list_versions(repository)) == (1, {1})
    assert publish_once(repository) == 2


def test_another_contract_is_refused(published):
    repository = published("ensemble")
    with pytest.raises(ExportError, match="serves another contract"):
        publish_once(
            repository,
            Axes(candidates=9, history=3, exclusions=2, items_returned=2, user_categorical=2, user_continuous=1),
            "ensemble",
        )
    assert find_served_generation(repository) == 1


def test_records_of_as_many_bytes_with_other_fields_are_another_contract(published):
    repository = published("ensemble")
    other = replace(AXES, user_categorical=1, user_continuous=3)
    first, second = (make_stage_specs(axes)["retrieve"].inputs[0].dims for axes in (AXES, other))
    assert first == second
    with pytest.raises(ExportError, match=r"user UINT8 \[\d+\] .*user_categorical INT64 \[1\].* of rank differ"):
        publish_once(repository, other, "ensemble")
    assert find_served_generation(repository) == 1


def test_publishing_mends_a_damaged_repository(published):
    repository = published("ensemble")
    shutil.rmtree(repository / "rank")
    assert find_served_generation(repository) is None
    assert publish_once(repository, layout="ensemble") == 2
    assert find_served_generation(repository) == 2


def test_warm_up_files_that_are_not_whole_are_written_again_and_no_other(published):
    repository = published("ensemble")
    broken = {f"candidates_{row}": content for row, content in enumerate([b"", b"\0", b"\0" * 999])}
    whole = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in repository.glob("*/warmup/*")}
    for name, content in broken.items():
        (repository / "rank" / "warmup" / name).write_bytes(content)
    publish_once(repository, layout="ensemble")
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in repository.glob("*/warmup/*")}
    assert {path for path in whole if after[path] != whole[path]} == {repository / "rank" / "warmup" / name for name in broken}
    assert {path: content for path, (content, _) in after.items()} == {path: content for path, (content, _) in whole.items()}


def test_files_that_were_changed_with_their_manifest_are_not_published_again(tmp_path):
    source = copy_lean_repository(tmp_path / "source")
    folder = source / "rank" / "1"
    (folder / MANIFEST_FILE).chmod(0o644)
    (folder / "stage.json").chmod(0o644)
    (folder / "stage.json").write_text((folder / "stage.json").read_text() + "\n")
    write_manifest(folder, stage="rank", generation=1)
    with pytest.raises(ArtifactError, match=r"rank/1/manifest\.json is not the manifest that generation 1 was published with"):
        relayout(source, tmp_path / "target", "fused")
    assert not (tmp_path / "target").exists()
