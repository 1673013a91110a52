"""A variant serves other settings from the same files; the published repository stays bit for bit."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import faiss
import pytest

from export.settings import Settings, read_served_settings, read_settings
from perf.slo import Bound
from perf.tune import report
from perf.tune.__main__ import main, summarise
from perf.tune.search import FINAL_TURNS, SERVER_THREADS, Outcome, Trial
from perf.tune.variant import make_variant
from repository.challenger import read_challengers, write_challenger
from repository.generations import write_pins
from repository.publish import Staging
from repository.triton.config import LAYOUTS
from repository.triton.models import read_config
from serving.contract.artifacts import MANIFEST_FILE, StageInfo, compute_sha256, find_stage_folder, read_stage, verify_manifest
from serving.contract.errors import ConfigError
from serving.contract.tensors import CHALLENGER, ENSEMBLE, STAGES, make_stage_specs
from serving.stages.rank import RankSettings
from serving.stages.search.search import INDEX_FILE
from tests.unit.perf.conftest import AXES
from training.retrieval.index import extract_inverted_file


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


@pytest.fixture
def repository(tmp_path, layout, choice):
    """Published, with nothing in it but what a variant changes."""
    specs, settings = make_stage_specs(AXES), Settings(serving={"queue_delay_us": 50})
    own = {"rank": asdict(RankSettings((), (), 0.0)), "retrieve": {"index": choice.kind}}
    with Staging(tmp_path / "repository", layout) as staging:
        for name in STAGES:
            StageInfo(name, staging.generation, AXES, settings=own.get(name, {})).write(staging.folder(name))
        faiss.write_index(choice.index, str(staging.folder("retrieve") / INDEX_FILE))
        staging.seal_stages(specs)
        staging.seal({"settings": settings.model_dump(mode="json")})
        tensors = {t.name: t for spec in specs.values() for t in (*spec.input_fields, *spec.output_fields)}
        rows = {name: t.make_filled(4) for name, t in tensors.items()}
        staging.publish(specs, settings.merge_serving(), rows)
    return tmp_path / "repository"


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): compute_sha256(path) for path in folder.rglob("*") if path.is_file()}


def test_a_variant_serves_the_changes_and_the_original_stays(repository, layout, tmp_path):
    before = contents(repository)
    changes = {"preferred_batch_sizes": [4, 16], "recommend": {"instances": 3}, "rank": {"instances": 2, "queue_delay_us": 7}}
    effort = {"rank_threads": 2, "index_effort": 77}
    make_variant(repository, tmp_path / "variant", layout, Settings.model_validate({"serving": changes, "compute": effort}))
    assert contents(repository) == before

    served, instances, delay = ("rank", 2, 7) if layout == "ensemble" else (ENSEMBLE, 3, 0)
    config = read_config(tmp_path / "variant" / served / "config.pbtxt")
    assert [group.count for group in config.instance_group] == [1, instances - 1]
    assert config.dynamic_batching.max_queue_delay_microseconds == delay
    assert list(config.dynamic_batching.preferred_batch_size) == [4, 16]
    assert read_stage(find_stage_folder(tmp_path / "variant", "rank", 1)).settings["threads"] == 2
    index = faiss.read_index(str(find_stage_folder(tmp_path / "variant", "retrieve", 1) / INDEX_FILE))
    assert extract_inverted_file(index).nprobe == 77

    whole = verify_manifest(tmp_path / "variant" / ENSEMBLE / "1")
    for name in STAGES:
        folder = find_stage_folder(tmp_path / "variant", name, 1)
        verify_manifest(folder)
        assert whole["stages"][name] == compute_sha256(folder / MANIFEST_FILE)


def test_the_current_settings_are_the_same_files(repository, layout, tmp_path):
    make_variant(repository, tmp_path / "variant", layout, read_served_settings(repository))
    assert contents(tmp_path / "variant") == contents(repository)
    index = find_stage_folder(repository, "retrieve", 1) / INDEX_FILE
    assert index.samefile(find_stage_folder(tmp_path / "variant", "retrieve", 1) / INDEX_FILE)


def test_a_variant_loads_the_champion_alone_while_an_experiment_runs(repository, layout, tmp_path):
    for folder in list(repository.glob("*/1")):
        shutil.copytree(folder, folder.with_name("2"))
    write_challenger(repository, 2)
    write_pins(repository, 1)
    before = {path: path.read_text() for path in repository.glob("*/config.pbtxt")}
    make_variant(repository, tmp_path / "variant", layout, read_served_settings(repository))
    assert {path: path.read_text() for path in before} == before
    assert CHALLENGER in {path.parent.name for path in before}
    assert read_challengers(tmp_path / "variant") == ()
    for path in (tmp_path / "variant").glob("*/config.pbtxt"):
        assert list(read_config(path).version_policy.specific.versions) == [1], path


def test_files_are_copied_where_links_do_not_reach(repository, layout, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    make_variant(repository, tmp_path / "variant", layout, read_served_settings(repository))
    assert contents(tmp_path / "variant") == contents(repository)


def outcome_of(changes):
    own, now = ({"peak_rate": 220.0},) * FINAL_TURNS, ({"peak_rate": 200.0},) * FINAL_TURNS
    trial = Trial(changes, own, now)
    return Outcome("peak_rate", [[trial]], trial)


def test_the_winner_becomes_an_export_config(tmp_path):
    changes = {
        "serving.rank.instances": 2,
        "serving.preferred_batch_sizes": [4, 8],
        "compute.rank_threads": 2,
        SERVER_THREADS: 2,
    }
    current = Settings.model_validate({"pipeline": {"candidates": 200}, "serving": {"rank": {"queue_delay_us": 5}}})
    report.write_config(tmp_path / "tuned.toml", current, changes, tmp_path / "tuned.json")
    found = read_settings(tmp_path / "tuned.toml")
    assert found.pipeline == current.pipeline
    assert (found.merge_serving()["rank"].instances, found.merge_serving()["rank"].queue_delay_us) == (2, 5)
    assert found.merge_serving()["preprocess"].preferred_batch_sizes == (4, 8)
    assert found.compute.rank_threads == 2
    text = (tmp_path / "tuned.toml").read_text()
    assert "tuned.json" in text
    assert "--threads 2" in text


def test_without_a_winner_the_config_is_the_current_one(tmp_path):
    current = Settings(serving={"rank": {"instances": 2}})
    report.write_config(tmp_path / "tuned.toml", current, {}, tmp_path / "tuned.json")
    assert read_settings(tmp_path / "tuned.toml") == current


def test_the_evidence_holds_every_turn(tmp_path):
    outcome = outcome_of({"compute.rank_threads": 2})
    document = report.make_evidence(outcome, {}, {"perf": "tune"})
    report.save_evidence(tmp_path / "tuned.json", document)
    assert json.loads((tmp_path / "tuned.json").read_text()) == document
    (trial,) = document["rungs"][0]
    assert trial["gain"] == {"median": 1.1, "low": 1.1, "high": 1.1}
    assert len(trial["turns"]) == len(trial["current"]) == FINAL_TURNS
    assert document["winner"] == {"compute.rank_threads": 2}


def test_the_winner_stands_out_in_the_table():
    (row,) = report.make_trial_table(outcome_of({"compute.rank_threads": 2}), {}).rows
    assert row.kept is True
    assert row.cells == ("compute.rank_threads = 2", "220.00", "1.100", "1.100 … 1.100", str(FINAL_TURNS), "kept")


def test_what_was_not_measured_is_named_in_evidence_and_table():
    now = {"peak_rate": 200.0, "p99_ms": 40.0}
    trial = Trial({"compute.rank_threads": 2}, (now, {"peak_rate": 220.0}), (now, now))
    outcome, slo = Outcome("p99_ms", [[trial]]), {"p99_ms": Bound(at_most=50.0)}
    (described,) = report.make_evidence(outcome, slo, {})["rungs"][0]
    assert (described["broken"], described["gain"]) == (["p99_ms"], {"median": 0.5, "low": 0.0, "high": 1.0})
    (row,) = report.make_trial_table(outcome, slo).rows
    assert row.cells[1] == "not measured"
    assert row.cells[-1] == "p99_ms"


def test_the_last_line_names_the_winner_and_what_it_reached():
    facts = summarise(outcome_of({"compute.rank_threads": 2}))
    assert facts["winner"] == {"compute.rank_threads": 2}
    assert facts["gain_median_low_high"] == [1.1, 1.1, 1.1]
    assert facts["peak_rate"] == 220.0
    assert summarise(Outcome("peak_rate"))["winner"] is None


def test_an_unknown_goal_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ConfigError, match=r"no goal 'speed'; these are: peak_rate"):
        main(repo=tmp_path / "nowhere", goal="speed")


@pytest.mark.parametrize("out", ["tuned.json", "nowhere/tuned.toml"])
def test_a_winner_that_could_not_be_written_is_refused_before_anything_is_read(tmp_path, out):
    with pytest.raises(ConfigError, match=r"name of a \.toml file in a folder that exists"):
        main(repo=tmp_path / "nowhere", out=tmp_path / out, goal="peak_rate")
