"""`make check`: a sound repository has no findings; each thing that will fail has one, with a remedy."""

import json
import runpy
import shutil

import pytest
from typer.testing import CliRunner

from export.__main__ import app
from export.check import check_repository
from export.relayout import relayout
from perf.tune.variant import seal_again
from repository.checks import check
from repository.checks.recorded import RECORDED_FILE, read_recorded
from repository.tables import find_tables_settings
from repository.triton.models import read_config, write_config
from serving.contract.artifacts import MANIFEST_FILE, read_json, write_manifest
from serving.contract.errors import ArtifactError
from serving.contract.tensors import ENSEMBLE, LIVE_MODELS, STAGES
from tests.repositories import copy_to_change, small_repository


@pytest.fixture
def repository(tmp_path):
    """A copy to break."""
    return copy_to_change(small_repository(), tmp_path / "repository")


def reseal(repository):
    """Write manifests for the folders as they are now, as if they had been published so."""
    for name in (*STAGES, *LIVE_MODELS):
        seal_again(repository, 1, name)


def errors(repository):
    return [f"{f.where}: {f.fact}. {f.remedy}" for f in check_repository(repository) if f.level == "error"]


def test_a_sound_repository_has_no_findings_nor_has_somebody_elses_model_in_it(repository):
    for folder, name in (("theirs", "theirs"), ("unnamed", "")):
        (repository / folder / "1").mkdir(parents=True)
        (repository / folder / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "python"\n')
    result = CliRunner().invoke(app, ["check", "--repo", str(repository)])
    assert (result.exit_code, result.output.count("0 errors, 0 warnings")) == (0, 1), result.output


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "from serving.contract.errors import ArtifactError\nraise ArtifactError('vectors.npy is of another d. Export.')",
            "another d",
        ),
        ("import absent_library", r"does not run here: ModuleNotFoundError: No module named 'absent_library'. Export"),
        ("import os; os._exit(1)", "it ended without a message"),
    ],
    ids=["refuses", "library", "dies"],
)
def test_code_that_does_not_run_here_is_an_error(repository, code, told):
    pipeline = repository / "recommend" / "1" / "serving" / "pipeline.py"
    pipeline.unlink()
    pipeline.write_text(f"class Pipeline:\n    def load(*_, **__):\n        exec({code!r})\n")
    reseal(repository)
    (message,) = errors(repository)
    assert told in message


def test_a_generation_without_code(repository):
    shutil.rmtree(repository / "recommend" / "1" / "serving")
    reseal(repository)
    (message,) = errors(repository)
    assert "lacks serving/, the code that answers for this generation" in message


def change_an_answer(repository):
    path = repository / ENSEMBLE / "1" / RECORDED_FILE
    recorded = read_recorded(path)
    recorded.outputs["item_ids"][5] = recorded.outputs["item_ids"][5][::-1]
    recorded.write(path)
    reseal(repository)


def update_rows(repository):
    """Name a source of live updates in the settings of the tables."""
    path = find_tables_settings(repository, 1)
    levels = {"updates": {"brokers": "127.0.0.1:9"}, "rocksdb": {"path": str(repository.parent / "rows")}}
    path.write_text(json.dumps(json.loads(path.read_text()) | levels))
    reseal(repository)


def keep_answers(repository):
    path = repository / "recommend" / "config.pbtxt"
    config = read_config(path)
    config.response_cache.enable = True
    write_config(path, config)


def test_answers_that_changed_are_an_error_and_a_ps_json_that_nvidia_would_not_read(repository):
    tables = repository / "rank" / "1" / "tables"
    replace_in(tables / "ps.json", '"gpucacheper"', '"gpucacheshare"')
    change_an_answer(repository)
    found = errors(repository)
    assert any("rank/1/tables/ps.json models[0].gpucacheper" in error for error in found)
    (message,) = (error for error in found if "answered differently" in error)
    assert "answered differently: 1 of 64 id lists differ, first request 5. Compare the library versions" in message


def test_rows_that_are_updated_may_change_answers_and_go_with_no_kept_ones(repository):
    change_an_answer(repository)
    update_rows(repository)
    assert [finding.level for finding in check_repository(repository) if "answered differently" in finding.fact] == ["warning"]
    keep_answers(repository)
    told = "recommend/config.pbtxt: The response cache keeps answers, and the ranker's rows are updated"
    assert [error.startswith(told) for error in errors(repository)].count(True) == 1


def test_a_file_that_is_not_the_published_one_stops_the_checks_behind_it(repository, tmp_path):
    """Nothing runs from a damaged generation: here, its code would leave a file."""
    code = repository / ENSEMBLE / "1" / "serving" / "pipeline.py"
    text = code.read_text()
    code.unlink()  # a link to the file of the shared repository
    code.write_text(f"{text}\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (message,) = errors(repository)
    assert "recommend/1/serving/pipeline.py is not the file that was published" in message
    assert not (tmp_path / "ran").exists()
    runpy.run_path(str(code))
    assert (tmp_path / "ran").exists()


def test_a_repository_that_every_user_may_write_is_a_warning(repository):
    (repository / "rank").chmod(0o777)
    (repository / "recommend" / "config.pbtxt").chmod(0o666)
    (found,) = check_repository(repository)
    assert found.level == "warning"
    assert "Every user of the machine may write" in found.fact
    assert "and 1 more" in found.fact
    assert found.remedy.endswith(f"`chmod -R o-w {repository}`.")


def test_what_a_served_generation_does_without_is_a_warning(repository):
    """Another library, kept answers, and damage of a generation that is kept for a move back."""
    for name in (*STAGES, *LIVE_MODELS, ENSEMBLE):
        copy_to_change(repository / name / "1", repository / name / "2")
    replace_in(repository / "rank" / "2" / "stage.json", "{", "{ ")
    own = repository / ENSEMBLE / "1"
    facts = {key: value for key, value in read_json(own, MANIFEST_FILE).items() if key not in ("schema", "files")}
    write_manifest(own, **facts | {"versions": dict.fromkeys(facts["versions"], "0.0.1")})
    keep_answers(repository)
    found = check_repository(repository)
    assert {finding.level for finding in found} == {"warning"}
    told = {finding.where: finding.fact for finding in found}
    assert len(found) == len(told)
    assert "keeps answers, also those from before an event" in told.pop("recommend/config.pbtxt")
    assert "rank/2/stage.json is not the file that was published" in told.pop("recommend/2")
    assert told.keys() == set(check.SERVING_LIBRARIES)
    assert all("is installed, the export used 0.0.1" in fact for fact in told.values())


def test_a_manifest_that_is_not_the_published_one_is_not_published_again(repository, tmp_path):
    replace_in(repository / "rank" / "1" / MANIFEST_FILE, "{", "{ ")
    with pytest.raises(ArtifactError, match=r"rank/1/manifest\.json is not the manifest that generation 1 was published with"):
        relayout(repository, tmp_path / "again", "fused")


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (lambda r: (r / "rank" / "config.pbtxt").unlink(), "rank/config.pbtxt: The file is missing"),
        (lambda r: (r / "notes").mkdir(), "notes: It is not a model, but tritonserver would load it as one"),
        (lambda r: shutil.copytree(r / "rank", r / "rank.bak"), "rank.bak: Its config names the model 'rank'"),
        (lambda r: (r / "rank" / "warmup" / "candidates_0").unlink(), "candidates_0: The file is missing"),
        (lambda r: replace_in(r / "rank" / "config.pbtxt", 'name: "rank"', 'name: "rung"'), "It names the model 'rung'"),
        (
            lambda r: replace_in(r / "recommend" / "config.pbtxt", 'model_name: "rank"', 'model_name: "rung"'),
            "Step rung is no model of this repository; expected one of",
        ),
        (
            lambda r: replace_in(r / "retrieve" / "config.pbtxt", "dims: 64", "dims: 63"),
            "Edge exclude -> retrieve.exclude: the source is TYPE_INT64 [-1, 64], the input is TYPE_INT64 [-1, 63]",
        ),
        (
            lambda r: replace_in(r / "rank" / "config.pbtxt", "rank_scores FP", "rank_scores INT"),
            "Edge ranked -> rerank.ranked: the source is TYPE_UINT8 [",
        ),
        (
            lambda r: [replace_in(r / m / "config.pbtxt", "rank_scores FP", "rank_scores INT") for m in ("rank", "rerank")],
            "The record ranked has user_id",
        ),
    ],
    ids=["config", "stranger", "copy", "warm-up", "name", "step", "edge", "record", "stage"],
)
def test_what_tritonserver_would_refuse(repository, broken, told):
    broken(repository)
    assert any(told in message for message in errors(repository))


def test_a_generation_of_another_version_is_judged_by_its_own_contract(repository):
    for name in STAGES:
        path = repository / name / "1" / "serving" / "contract" / "tensors.py"
        text = path.read_text()
        path.unlink()  # a hard link to the shared repository's
        path.write_text(f"{text}# of another version\n")
        replace_in(repository / name / "config.pbtxt", "lineage INT64 [7]", "lineage INT64 [2]")
    reseal(repository)
    assert errors(repository) == []


def test_a_path_that_no_model_starts_from(repository, tmp_path, monkeypatch):
    (message,) = errors(repository.rename(tmp_path / "two words"))
    assert "two words' holds ' ', and no model starts from there. Expected" in message
    (tmp_path / "two words").rename(repository)
    monkeypatch.setattr("export.cpu.RUN_DIR", tmp_path / "café" / ".run")
    (message,) = errors(repository)
    assert "café/.run' holds 'é', and no model starts from there. Expected" in message


def test_no_repository(tmp_path):
    (message,) = errors(tmp_path / "absent")
    assert "There is no such folder. Create the repository: make export" in message
    assert CliRunner().invoke(app, ["check", "--repo", str(tmp_path / "absent")]).exit_code == 1


def test_a_folder_without_models_has_one_finding(tmp_path):
    (message,) = errors(tmp_path)
    assert f"{tmp_path}: It holds no model. Fill it: make export REPO={tmp_path}" in message


def replace_in(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_warm_up_file_that_was_cut_off(repository):
    path = next((repository / "rank" / "warmup").iterdir())
    path.write_bytes(b"")
    assert f"rank/config.pbtxt: warmup/{path.name} holds 0 bytes; one row of its tensor takes at least" in errors(repository)[0]


def test_a_stage_that_takes_less_than_the_ensemble_sends(repository):
    path = repository / "rank" / "config.pbtxt"
    path.write_text(path.read_text().replace("max_batch_size: 64", "max_batch_size: 8"))
    assert "recommend/config.pbtxt: It allows batches of 64, but its step rank only of 8" in errors(repository)[0]
