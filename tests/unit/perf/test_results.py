"""Results of a run: its summary and last line, its file, commit and configs."""

import json
import re
from contextlib import nullcontext

import pytest

from perf import answers
from perf.report import results
from perf.report.notes import write_notes
from perf.report.results import find_latest_run, hash_configs, load_run, summarise, to_json_line
from serving.contract.errors import ConfigError
from serving.contract.tensors import STAGES
from tests.unit.perf.conftest import stage_times


def test_the_summary_is_flat_and_complete(run):
    document = summarise(run)
    half = run.find_load("poisson 50 %")
    assert document["peak_rate"] == pytest.approx(282.84, abs=0.01)
    assert document["peak_clients"] == 8
    assert document["p99_ms"] == round(half.latency.p99_ms, 4)
    assert document["p99_over_p50"] == pytest.approx(half.latency.p99_ms / half.latency.p50_ms, abs=1e-3)
    assert document["error_share"] == 0.005
    assert document["memory_mib"] == 100
    assert document["overhead_p50_ms"] == 2.0  # the median of 2, 3 and 1.5
    assert document["throughput_share"] == 0.5  # the median of 0.5, 0.3 and 0.7
    assert document["hit_rates"] == {"tables, l1": 0.9, "tables, l2": 0.5, "cache model=rank": 0.25}
    assert json.loads(to_json_line(document)) == document
    assert "\n" not in to_json_line(document)


def test_what_was_not_measured_is_not_in_the_summary(run):
    bare = run.model_copy(update={"closed": [], "open": [], "yardstick": None, "memory": [], "hit_rates": {}})
    assert {"peak_rate", "p99_ms", "overhead_p50_ms", "memory_mib", "hit_rates"}.isdisjoint(summarise(bare))


def test_a_run_is_read_back_as_written(run, tmp_path):
    run.save(tmp_path)
    assert load_run(tmp_path) == run
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="no readable"):
        load_run(tmp_path)


def test_the_latest_run_is_found(run, tmp_path):
    with pytest.raises(ConfigError, match="make perf"):
        find_latest_run(tmp_path / "results")
    for stamp in ("20260101-000000", "20260102-000000"):
        run.save(tmp_path / "results" / stamp)
    assert find_latest_run(tmp_path / "results").name == "20260102-000000"


def test_runs_of_the_same_second_have_folders_of_their_own(run, tmp_path):
    folders = [results.make_folder(tmp_path / "results") for _ in range(3)]
    assert len(set(folders)) == 3
    for folder in folders:
        run.save(folder)
    assert find_latest_run(tmp_path / "results") == folders[-1]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Free or repair it"):
        results.make_folder(tmp_path / "file")


def test_the_config_hash_tells_settings_apart(tmp_path):
    (tmp_path / "rank").mkdir()
    (tmp_path / "rank" / "config.pbtxt").write_text("a")
    before = hash_configs(tmp_path)
    assert before == hash_configs(tmp_path)
    (tmp_path / "rank" / "config.pbtxt").write_text("b")
    assert hash_configs(tmp_path) != before


def test_an_ensemble_computes_nothing_of_its_own(run):
    level = run.closed[0].model_copy(update={"stages": {"recommend": stage_times(4.0)} | run.closed[0].stages})
    assert tuple(level.computing_models) == STAGES


def test_a_single_load_is_what_its_summary_tells(run):
    one = run.open[-1].model_copy(update={"name": "bursts 40/s", "offered_rate": 68.0})
    document = summarise(run.model_copy(update={"closed": [], "open": [one]}))
    assert (document["offered_rate"], document["p99_ms"]) == (68.0, round(one.latency.p99_ms, 4))
    two = summarise(run.model_copy(update={"open": [one, one.model_copy(update={"name": "poisson 5/s"})]}))
    assert "p99_ms" not in two


def test_ratios_of_unequal_answers_are_no_result(run):
    assert summarise(run)["answers_equal"]
    assert not any("do not count" in note for note in write_notes(run))
    other = run.yardstick.model_copy(update={"differing_answers": "2 of 256 id lists differ"})
    differing = run.model_copy(update={"yardstick": other})
    assert not summarise(differing)["answers_equal"]
    assert any("(2 of 256 id lists differ): the ratios between them do not count" in note for note in write_notes(differing))


def test_answers_under_load_count_too(run):
    assert not any("compared" in note for note in write_notes(run))
    loads = [load.model_copy(update={"compared": 100}) for load in run.open]
    equal = run.model_copy(update={"open": loads, "yardstick": None})
    assert summarise(equal)["answers_equal"]
    assert any(f"{100 * len(loads)} answers under load were compared" in note for note in write_notes(equal))
    loads[1] = loads[1].model_copy(update={"differing_answers": "1 of 100 id lists differ"})
    differing = equal.model_copy(update={"open": loads})
    assert not summarise(differing)["answers_equal"]
    assert any("(a <label>, poisson 50 %: 1 of 100 id lists differ)" in note for note in write_notes(differing))
    unnamed = differing.model_copy(update={"label": ""})
    assert unnamed.differing_answers == "poisson 50 %: 1 of 100 id lists differ"
    nothing = run.model_copy(update={"yardstick": None})
    assert "answers_equal" not in summarise(nothing)


def describe(run, load) -> list[str]:
    """The notes on the only load of a run."""
    return [note for note in write_notes(run.model_copy(update={"open": [load]})) if load.name in note]


def test_what_is_behind_the_latencies_of_a_load_is_told(run):
    load = run.find_load("poisson 50 %")
    on_time = load.send_late.model_copy(update={"p99_ms": 0.01 * load.latency.p99_ms})
    clean = load.model_copy(update={"errors": {}, "send_late": on_time})
    assert describe(run, clean) == []
    errors = {"UNAVAILABLE: gone": 501, "DEADLINE_EXCEEDED: late": 3, "INTERNAL: a": 2, "INTERNAL: b": 1, "INTERNAL: c": 1}
    assert describe(run, clean.model_copy(update={"errors": errors})) == [
        "poisson 50 %: 508 of 906 requests failed, and have no latency: UNAVAILABLE: gone (501); DEADLINE_EXCEEDED: late (3); "
        "INTERNAL: a (2); and 2 other errors."
    ]
    assert describe(run, clean.model_copy(update={"degraded": 7})) == ["poisson 50 %: 7 of 398 answers were degraded."]
    (late,) = describe(run, clean.model_copy(update={"send_late": load.latency}))
    assert f"itself sent late (p99), which is part of the latencies: poisson 50 % ({load.latency.p99_ms:.2f} ms)." in late
    few = clean.model_copy(update={"latency": load.latency.model_copy(update={"count": 30})})
    assert describe(run, few) == ["poisson 50 %: only 30 requests were answered, so p99 is the slowest of them."]


def test_a_load_without_requests_has_no_share_of_errors(run):
    load = run.find_load("poisson 50 %").model_copy(update={"errors": {}, "latency": None, "error_share": 0.0})
    assert "error_share" not in summarise(run.model_copy(update={"open": [load]}))
    assert describe(run, load) == ["poisson 50 %: no request was due. Raise the rate or the duration."]
    refused = load.model_copy(update={"errors": {"UNAVAILABLE: gone": 3}, "error_share": 1.0})
    assert summarise(run.model_copy(update={"open": [refused]}))["error_share"] == 1.0


def test_answers_that_were_not_compared_are_not_called_equal(run):
    updated = run.model_copy(update={"comparable": False})
    assert "answers_equal" not in summarise(updated)
    assert any(note.startswith("No answer was compared") for note in write_notes(updated))


@pytest.mark.parametrize("updates", [None, {"brokers": "kafka:9092"}])
def test_what_compares_answers_refuses_rows_that_are_updated(tmp_path, updates):
    (tmp_path / "recommend").mkdir()
    (tmp_path / "recommend" / "config.pbtxt").write_text("version_policy { specific { versions: 3 } }")
    tables = tmp_path / "rank" / "3" / "tables"
    tables.mkdir(parents=True)
    (tables / "levels.json").write_text(json.dumps({"updates": updates}))
    refused = pytest.raises(ConfigError, match=r"are updated while they are served.*Export one without")
    with refused if updates else nullcontext():
        answers.require_comparable(tmp_path)


def test_commits_are_told(tmp_path):
    assert results.read_commit(tmp_path) == ""
    assert re.fullmatch(r"[0-9a-f]{7,}\+?", results.read_commit())
