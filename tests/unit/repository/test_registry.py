"""The generations of a repository, what differs between them, and the record of what was done."""

import json
import os
import re
import shutil
import time

import pytest
from typer.testing import CliRunner

from repository.__main__ import app
from repository.checks.check import check_record
from repository.experiments import end_experiment, start_experiment
from repository.registry import (
    RECORD_FILE,
    diff_generations,
    find_unaccepted,
    list_generations,
    read_acts,
    read_manifest,
    record_act,
    record_publication,
)
from serving.contract.artifacts import MANIFEST_FILE
from serving.contract.errors import ArtifactError, ConfigError, DependencyError
from serving.contract.tensors import ENSEMBLE, LIVE_MODELS, STAGES
from serving.live.experiment import Experiment
from tests.repositories import copy_generation, copy_lean_repository


@pytest.fixture
def repo(tmp_path):
    """Two generations, of which the second says that it was made with another seed."""
    repo = copy_lean_repository(tmp_path / "shop")
    copy_generation(repo)
    path = repo / ENSEMBLE / "2" / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    manifest["settings"]["pipeline"]["seed"] = 7
    path.chmod(0o644)
    path.write_text(json.dumps(manifest))
    return repo


def run(repo, *words):
    return CliRunner().invoke(app, [*words, "--repo", str(repo)], catch_exceptions=False)


def test_generations_are_listed_with_what_answers_and_their_log(repo):
    first, second = list_generations(repo)
    assert (first.generation, first.pinned, second.generation, second.pinned) == (1, True, 2, False)
    assert first.log["events"] > 0
    assert first.log["first"] <= first.log["last"]
    listed = json.loads(run(repo, "list", "--json").stdout)
    assert [entry["generation"] for entry in listed] == [1, 2]
    table = CliRunner().invoke(app, ["list", "--repo", str(repo)], env={"COLUMNS": "200"}).stdout
    assert first.log["first"] != first.log["last"]
    assert table.count(first.log["first"]) == table.count(first.log["last"]) == 2
    narrow = CliRunner().invoke(app, ["list", "--repo", str(repo)], env={"COLUMNS": "80"}).stdout
    assert "(pinned)" in narrow
    assert narrow.count(first.log["first"]) == narrow.count(first.log["last"]) == 2
    assert "…" not in narrow


def test_a_copied_repository_shows_when_its_generations_were_published(repo):
    published_s = [entry.published_s for entry in list_generations(repo)]
    paths = [repo / ENSEMBLE / generation / MANIFEST_FILE for generation in ("1", "2")]
    for path in paths:
        os.utime(path, (1_000, 1_000))
    assert [entry.published_s for entry in list_generations(repo)] == published_s
    assert min(published_s) > 1_700_000_000
    manifest = json.loads(paths[0].read_text())
    del manifest["sealed_s"]  # as an older version wrote it
    paths[0].write_text(json.dumps(manifest))
    os.utime(paths[0], (2_000, 2_000))
    assert list_generations(repo)[0].published_s == 2_000


def test_a_challenger_counts_as_accepted_once_somebody_chooses_it(repo):
    def record(action: str, generation: int, author: str = "", experiment: str = "") -> set[int]:
        record_act(repo, action, generation, author=author, facts={"experiment": experiment} if experiment else {})
        return find_unaccepted(read_acts(repo))

    assert record("published", 2) == set()
    assert record("experiment started", 2, experiment="spring") == {2}
    assert record("rolled back", 2, experiment="spring") == {2}
    assert record("pinned", 2, author="server") == {2}  # in place of damaged files
    assert record("activated", 2) == set()
    assert record("experiment started", 3, experiment="summer") == {3}
    assert record("promoted", 3, experiment="summer") == set()
    assert record("not promoted", 3) == {3}


def test_tables_in_a_file_or_a_pipe_keep_every_cell_in_one_piece(repo):
    name = "a-data-set-whose-name-alone-takes-more-than-half-of-eighty-characters"
    path = repo / ENSEMBLE / "2" / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    manifest["dataset"]["name"] = name
    path.write_text(json.dumps(manifest))
    for words in (["list"], ["diff", "1", "2"]):
        table = CliRunner().invoke(app, [*words, "--repo", str(repo)], env={"COLUMNS": None}, catch_exceptions=False).stdout
        assert table.count(name) == 1


def test_the_list_has_changed_settings_drift_and_experiments(repo):
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    end_experiment(repo, "12.0% fewer of its answers are clicked", "rolled back")
    record_act(repo, "replaced", 1, reason="by 2: drifted: price (PSI 0.4, by chance 0.02)")
    first, second = list_generations(repo)
    assert (first.settings, first.verdicts, second.settings, second.drift) == ({}, (), {"pipeline.seed": 7}, "")
    assert first.drift == "by 2: drifted: price (PSI 0.4, by chance 0.02)"
    assert second.verdicts == ("rolled back: experiment spring, ab, share 0.5: 12.0% fewer of its answers are clicked",)
    assert run(repo, "list").stdout.splitlines()[-3:] == [
        f"generation 1, replaced: {first.drift}",
        "generation 2, settings: pipeline.seed = 7",
        f"generation 2, experiment: {second.verdicts[0]}",
    ]
    assert json.loads(run(repo, "list", "--json").stdout)[1]["verdicts"] == list(second.verdicts)


def test_a_manifest_says_why_models_were_not_tried(repo):
    reports = read_manifest(repo, 1)["reports"]
    for name, why in (("sequence", "60 positive events; it needs 20,000"), ("graph", "the log leaves .* validation questions")):
        source = reports["sources"][name]
        assert (source["weight"], source["validation"]) == (0.0, {})
        assert re.match(why, source["not_tried"])
    assert reports["validation"]["ranker"]["teachers_not_tried"] == '[training] teachers = "one"'


def test_only_what_differs_is_shown(repo):
    assert diff_generations(repo, 1, 2) == {"settings.pipeline.seed": (0, 7)}
    assert diff_generations(repo, 1, 1) == {}
    assert "settings.pipeline.seed" in run(repo, "diff", "1", "2").stdout
    assert run(repo, "diff", "1", "1").stdout == "Generations 1 and 1 do not differ.\n"
    with pytest.raises(ConfigError, match=r"Generation 3 is not in .*\[1, 2\]"):
        diff_generations(repo, 1, 3)


def test_a_generation_is_shown_with_its_tags_and_what_the_record_says_of_it(repo):
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    end_experiment(repo, "its items are clicked more", "promoted")
    record_act(repo, "activated", 2, reason="in place of 1")
    record_act(repo, "tagged", 2, "champion")
    record_act(repo, "tagged", 1, "safe")
    first, second = (json.loads(run(repo, "show", generation).stdout) for generation in ("1", "2"))
    assert (first["tags"], second["tags"]) == (["safe"], ["champion"])
    assert [act["action"] for act in first["acts"]] == ["tagged"]
    assert [act["action"] for act in second["acts"]] == ["experiment started", "promoted", "activated", "tagged"]
    assert second["acts"][1]["reason"].endswith("its items are clicked more")
    assert "files" not in second
    assert second["settings"]["pipeline"]["seed"] == 7


def test_a_manifest_that_changed_since_its_publication_is_found(repo):
    """Even by what no other file depends on: the seed of the settings."""
    for generation in (1, 2):
        record_publication(repo, generation, "exported from a log")
    assert list(check_record(repo)) == []
    path = repo / ENSEMBLE / "2" / MANIFEST_FILE
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 8'))
    (finding,) = check_record(repo)
    assert (finding.level, finding.where) == ("warning", "recommend/2/manifest.json")
    path.unlink()
    record_act(repo, "published", 1, facts={"schema": 1})  # as an older version recorded it
    assert list(check_record(repo)) == []
    for damage in (b"\xff\n", b"{}\n"):
        (repo / RECORD_FILE).write_bytes(damage)
        (finding,) = check_record(repo)
        assert (finding.level, finding.where) == ("warning", RECORD_FILE)


@pytest.fixture
def removed(repo):
    """The repository of `repo`, whose second generation was published by a round, and removed since. It says what it was."""
    record_publication(repo, 1, "exported from a log")
    record_publication(repo, 2, "NDCG@10 0.2 against 0.1: published")
    for model in (*STAGES, *LIVE_MODELS, ENSEMBLE):
        shutil.rmtree(repo / model / "2")
    return repo


def test_a_removed_generation_is_listed_as_it_was_recorded(removed):
    first, second = list_generations(removed)
    assert (first.removed, second.removed) == (False, True)
    assert second.published_s == pytest.approx(time.time(), abs=60)
    assert (second.dataset, second.log, second.quality) == (first.dataset, first.log, first.quality)
    assert first.quality["ndcg_at_10"] >= 0
    assert second.settings == {"pipeline.seed": 7}
    assert "2 (removed)" not in run(removed, "list").stdout
    listed = run(removed, "list", "--removed").stdout
    assert listed.count("2 (removed)") == 1
    assert "generation 2, settings: pipeline.seed = 7" in listed
    assert json.loads(run(removed, "list", "--removed", "--json").stdout)[1]["removed"] is True


def test_a_removed_generation_is_shown_and_compared_as_it_was_recorded(removed):
    first, second = (json.loads(run(removed, "show", generation).stdout) for generation in ("1", "2"))
    assert (first["removed"], second["removed"]) == (False, True)
    assert second["settings"]["pipeline"]["seed"] == 7
    assert first["reports"] == second["reports"]
    assert [(act["action"], act["reason"]) for act in second["acts"]] == [("published", "NDCG@10 0.2 against 0.1: published")]
    assert "facts" not in second["acts"][0]
    assert "files" not in second
    assert diff_generations(removed, 1, 2) == {"removed": (False, True), "settings.pipeline.seed": (0, 7)}


def test_a_removed_generation_gets_no_tag(removed):
    with pytest.raises(ConfigError, match=r"Generation 2 is not in .*\[1\]"):
        run(removed, "tag", "2", "champion")


def test_the_list_has_the_verdicts_by_which_rounds_published_or_not(removed):
    record_act(removed, "not published", 1, reason="NDCG@10 0.1 against 0.2: not published, because it is worse")
    first, second = list_generations(removed)
    refused = "not published: NDCG@10 0.1 against 0.2: not published, because it is worse"
    assert first.gate == ("published: exported from a log", refused)
    assert second.gate == ("published: NDCG@10 0.2 against 0.1: published",)
    listed = run(removed, "list", "--removed").stdout
    assert f"generation 1, {refused}\n" in listed
    assert "generation 2, published: NDCG@10 0.2 against 0.1: published\n" in listed


def test_a_damaged_generation_hides_no_other_one_and_is_listed_as_it_was_recorded(repo, caplog):
    record_publication(repo, 2, "exported")
    expected = list_generations(repo)
    for generation in (1, 2):
        path = repo / ENSEMBLE / str(generation) / MANIFEST_FILE
        path.chmod(0o644)
        path.write_text("{")
    first, second = list_generations(repo)
    assert (first.generation, first.log, first.dataset) == (1, {}, "")
    assert (second.generation, second.log, second.quality) == (2, expected[1].log, expected[1].quality)
    assert [record.message[:24] for record in caplog.records] == ["generation 1 is damaged:", "generation 2 is damaged:"]
    assert run(repo, "list").exit_code == 0


def test_a_record_of_a_newer_version_is_read(repo):
    record_act(repo, "tagged", 1, "safe")
    path = repo / RECORD_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_later": 1}) + "\n")
    assert [act.tag for act in read_acts(repo)] == ["safe"]


def test_tags_move_and_the_record_keeps_every_act(repo):
    for words in (("tag", "1", "champion"), ("tag", "2", "champion", "--reason", "sold more"), ("tag", "1", "safe")):
        assert run(repo, *words).exit_code == 0
    assert [entry.tags for entry in list_generations(repo)] == [("safe",), ("champion",)]
    run(repo, "untag", "1", "safe")
    assert [entry.tags for entry in list_generations(repo)] == [(), ("champion",)]
    acts = read_acts(repo)
    assert [(act.action, act.generation, act.tag, act.reason) for act in acts] == [
        ("tagged", 1, "champion", ""),
        ("tagged", 2, "champion", "sold more"),
        ("tagged", 1, "safe", ""),
        ("untagged", 1, "safe", ""),
    ]
    assert all(act.author for act in acts)
    assert "sold more" in run(repo, "record").stdout


def test_a_tag_that_is_empty_or_of_another_generation_is_refused(repo):
    run(repo, "tag", "2", "champion")
    with pytest.raises(ConfigError, match=r"The tag is 'a\\nb'; expected a name of one printable line"):
        run(repo, "tag", "1", "a\nb")
    with pytest.raises(ConfigError, match="The tag is ' '; expected a name"):
        run(repo, "tag", "2", " ")
    with pytest.raises(ConfigError, match="Generation 1 has no tag 'champion'; it has none"):
        run(repo, "untag", "1", "champion")
    with pytest.raises(ConfigError, match="Generation 2 has no tag 'champ'; it has champion"):
        run(repo, "untag", "2", "champ")
    assert [act.action for act in read_acts(repo)] == ["tagged"]
    assert list_generations(repo)[1].tags == ("champion",)


def test_a_tag_is_shown_as_it_was_given(repo):
    run(repo, "tag", "1", "[/b]")
    assert "[/b]" in run(repo, "list").stdout


def test_an_act_of_a_user_without_a_name_is_recorded(tmp_path, monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # of nobody in /etc/passwd
    record_act(tmp_path, "activated", 2)
    assert read_acts(tmp_path)[-1].author == "uid 2147483641"


def test_a_record_that_was_cut_short_anywhere_is_skipped_and_keeps_all_others(tmp_path, caplog):
    path = tmp_path / RECORD_FILE
    facts = {"é": [True, False, None, -1.5e-07, 2.5, 1e22, float("inf"), -float("inf"), "\\"], "seed": {"n": -7}, "none": {}}
    acts = [record_act(tmp_path, "tagged", 1, "ménage", 'says "ü\\"', facts), record_act(tmp_path, "activated", 2)]
    first, second = path.read_text().splitlines(keepends=True)
    for length in range(1, len(first) - 1):
        path.write_text(second + first[:length])
        assert read_acts(tmp_path) == acts[1:], first[:length]
        added = record_act(tmp_path, "activated", 3)
        assert read_acts(tmp_path) == [acts[1], added], first[:length]
    assert "registry.jsonl, line 2 was cut short" in caplog.text
    path.write_text(second + first[:-1])  # the end of the line alone is missing
    assert read_acts(tmp_path) == [acts[1], acts[0]]
    assert read_acts(tmp_path)[:2] == [acts[1], acts[0]] != [record_act(tmp_path, "activated", 3)]
    assert len(read_acts(tmp_path)) == 3


def test_an_act_that_does_not_fit_on_the_disk_is_reported(tmp_path):
    """/dev/full refuses every byte, as a full disk does."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / RECORD_FILE).symlink_to("/dev/full")
    with pytest.raises(DependencyError, match=r"registry\.jsonl cannot be written: No space left .* 'activated' of"):
        record_act(tmp_path / "full", "activated", 2)


def test_a_repository_that_is_not_there_is_an_error_and_no_empty_record(repo):
    for words in (["list"], ["show", "1"], ["diff", "1", "2"], ["record"], ["tag", "1", "x"], ["untag", "1", "x"]):
        with pytest.raises((ConfigError, ArtifactError), match=r"make export"):
            run(repo.parent / "nowhere", *words)


def test_a_folder_that_is_no_repository_has_no_record(tmp_path):
    with pytest.raises(ArtifactError, match=r"Create a repository with `make export REPO="):
        run(tmp_path, "record")


@pytest.mark.parametrize("line", [b"{broken", bytes(40), b"\xff\xfe"])
def test_a_broken_record_is_named_by_its_line(line, repo):
    """A power cut may leave zeros. Without the whole file, the next publication would remove generations that have a tag."""
    record_act(repo, "activated", 2)
    with (repo / RECORD_FILE).open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ConfigError, match=r"line 2 is no record: .* Remove that line; without the file, no tag keeps"):
        read_acts(repo)
    [finding] = check_record(repo)
    assert "line 2 is no record" in finding.fact
    assert finding.remedy == "Remove that line; without the file, no tag keeps a generation."
