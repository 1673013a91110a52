"""Continuous training: live events become a generation, which is activated if it is as good on the newest events."""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from export.continuous import follow
from export.continuous.follow import Round, Terms, choose_judged, follow_once, publish_candidate
from export.continuous.prequential import Upserted, answer_live, make_change_inputs, make_event_inputs, split_blocks
from export.continuous.verdict import LEAST_QUESTIONS, Verdict
from export.relayout import relayout
from export.settings import Settings
from repository.applied_rules import apply_rules
from repository.experiments import start_experiment
from repository.generations import list_published_generations, pin
from repository.registry import read_acts, read_manifest
from repository.rounds import read_running
from server.start.ports import find_free_ports
from server.state import ServerState, make_state_path, read_state
from serving.contract.errors import ConfigError, ExportError
from serving.contract.generations import read_pinned_generation
from serving.contract.rounds import make_scratch_prefix
from serving.contract.tensors import OBSERVE, UPSERT
from serving.live.experiment import Experiment
from serving.live.reader import Reader
from serving.live.store import LEARNED, find_live_folder
from serving.pipeline import Pipeline
from serving.stages.live.models import Observe, Upsert
from tests.long.rounds.shop import EARLY, EVERYTHING, QUIET, observe
from tests.present import present
from tests.repositories import FOLLOWED_SETTINGS
from tests.tags import draw_tag

N_SOLD_OUT = 60  # of the last purchases: their items
SETTINGS = Settings.model_validate(FOLLOWED_SETTINGS)


class Meddling(io.StringIO):
    """The output of a round, at whose first line somebody does something."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.acts = [act]

    def write(self, text: str) -> int:
        if self.acts:
            self.acts.pop()()
        return super().write(text)


@pytest.fixture(scope="module")
def round_done(exported, whole, past, tmp_path_factory) -> tuple[Path, Round, str, int]:
    """Return a repository whose live events a round has learned, what the round did, and what somebody saw meanwhile.

    That is the report of a round beside it, and the process that is recorded to train.

    Many of the items that users bought last are sold out by then, which the candidate learns from the catalogue.
    """
    repo = Path(shutil.copytree(exported, tmp_path_factory.mktemp("round") / "model_repository"))
    observe(repo, whole, np.arange(EARLY, EVERYTHING))
    last_bought = whole.interactions["item_id"].to_numpy()[EVERYTHING - N_SOLD_OUT :]
    sold_out = [Upserted("item", item_id, {"available": False}) for item_id in last_bought.tolist()]
    with closing(Upsert.load(repo / UPSERT / "1")) as model:
        model(make_change_inputs(sold_out))
    abandon_round(repo)
    seen = list[tuple[str, int]]()
    look = Meddling(lambda: seen.append((follow_once(past, repo, None, 1_000, QUIET).report, present(read_running(repo)).pid)))
    done = follow_once(past, repo, None, 1_000, Console(file=look))
    return repo, done, *seen[0]


@pytest.fixture
def followed(round_done, tmp_path) -> Path:
    """A copy of the repository of `round_done` with its live store."""
    repo = round_done[0]
    return shutil.copytree(repo.parent, tmp_path / "followed") / repo.name


def abandon_round(repo: Path) -> None:
    """Leave what a killed round leaves."""
    scratch = Path(tempfile.mkdtemp(dir=repo.parent, prefix=make_scratch_prefix(repo)))
    (scratch / "store").mkdir()
    (scratch / "store" / "data.mdb").write_bytes(b"events")


def test_without_live_events_a_round_waits(repo, past):
    done = follow_once(past, repo, SETTINGS, 1_000, QUIET)
    assert "waits: 0 events are newer than generation 1, of 1,000" in done.report


def test_a_generation_with_the_live_events_is_published(round_done, followed, past):
    _, done, beside, process_id = round_done
    repo = followed
    assert beside == "waits: another round trains for this repository"
    assert process_id == os.getpid()
    assert read_running(repo) is None
    assert done.verdict is not None
    assert re.fullmatch("generation 2. .*: published. All models from scratch", done.report)
    assert done.generation == 2, done.report
    assert list_published_generations(repo) == (1, 2)
    assert read_pinned_generation(repo) == 2
    assert read_manifest(repo, 2)["reason"] == str(done.verdict)
    last = read_acts(repo)[-1]
    assert (last.action, last.generation, last.reason) == ("published", 2, str(done.verdict))
    manifest = read_manifest(repo, 2)
    assert EARLY + 1_000 < manifest["log"]["events"] < EVERYTHING  # the newest events judged it
    assert Settings.model_validate(manifest["settings"]) == SETTINGS  # the serving generation's
    assert not list(repo.parent.glob("*follow*"))
    with closing(Reader(find_live_folder(repo))) as reader, reader.snapshot() as snapshot:
        assert (
            snapshot.read_progress().last_sequence == EVERYTHING - EARLY + N_SOLD_OUT
        )  # the measurement added nothing to the shop's own log
    with closing(Reader(find_live_folder(repo))) as reader, closing(Pipeline.load(repo, live=reader)) as pipeline:
        assert set(pipeline.recommend([1, 2, 3])["generation"].ravel().tolist()) == {2}
    assert "waits" in follow_once(past, repo, SETTINGS, 1_000, QUIET).report
    with pytest.raises(ConfigError, match="No server started here serves"):
        follow_once(past, repo, SETTINGS, 1, QUIET, Terms(0.1))
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    for share in (0.1, 1.0):  # the champion of an experiment is not replaced either
        done = follow_once(past, repo, SETTINGS, 1, QUIET, Terms(share))
        assert "waits: experiment spring runs" in done.report


def test_a_round_starts_from_the_weights_of_the_round_before_and_publishes_nothing_worse(followed, whole, past):
    rows, log = np.arange(EARLY, EARLY + 1_000), whole.interactions.copy()
    log.loc[rows, "user_id"] = np.roll(log.loc[rows, "user_id"], 100)
    log.loc[rows, "timestamp"] += int(log["timestamp"].max() - log.loc[EARLY, "timestamp"]) + 1
    observe(followed, replace(whole, interactions=log), rows)
    blocked = {"rules": {"blocked_items": whole.items["item_id"].tolist()[:100]}}
    done = follow_once(past, followed, Settings.model_validate(FOLLOWED_SETTINGS | blocked), 1_000, QUIET)
    said = "generation 2 stays. .*not published, because.*. Started from the weights of generation 2: the ranker"
    assert re.fullmatch(said, done.report)
    assert done.generation == 0
    assert list_published_generations(followed) == (1, 2)
    assert read_acts(followed)[-1].action == "not published"
    assert {path.name for path in (find_live_folder(followed) / LEARNED / "2").iterdir()} == {"ranker.npz"}


def test_a_log_that_was_cut_off_is_not_learned(repo, whole, past):
    observe(repo, whole, np.arange(EARLY, EVERYTHING))
    with pytest.raises(ExportError, match=r"The log of followed has 1,2\d\d events; generation 1 of .* learned from 3,000"):
        follow_once(replace(past, interactions=past.interactions.head(20)), repo, None, 1_000, QUIET)
    assert list_published_generations(repo) == (1,)


def test_a_candidate_with_other_tensors_is_refused_before_it_is_trained(repo, whole, past):
    observe(repo, whole, np.arange(EARLY, EVERYTHING))
    shown, other = io.StringIO(), {"pipeline": FOLLOWED_SETTINGS["pipeline"] | {"items_returned": 30}}
    settings = Settings.model_validate(FOLLOWED_SETTINGS | other)
    with pytest.raises(ExportError, match=r"serves another contract: .*item_ids INT64 .* differ"):
        follow_once(past, repo, settings, 1_000, Console(file=shown))
    assert "features" in shown.getvalue()
    assert "sources" not in shown.getvalue()


def test_what_upsert_set_in_columns_that_a_generation_does_not_have_changes_none_of_its_answers(exported, whole, tmp_path):
    asked, item_id = np.arange(EARLY, EARLY + 3), int(whole.interactions["item_id"][EARLY])
    changes = [Upserted("item", item_id, {"dropped": "x", "price": "cheap"}), Upserted("user", 1, {"dropped": 1.0})]
    answers, expected = (answer_live(exported, whole, asked, EARLY, tmp_path / "store", upserted) for upserted in (changes, ()))
    np.testing.assert_array_equal(answers.items, expected.items)


def test_rules_in_effect_judge_both_generations_and_weights_of_a_removed_repository_start_none(
    followed, repo, exported, whole, past
):
    """An export by hand may have the number of the generation that the weights belong to."""
    shown = whole.items["item_id"].to_numpy()[-30:]
    assert relayout(exported, repo, "fused") == 2
    observe(repo, whole, np.arange(EARLY, EVERYTHING))
    shutil.copytree(find_live_folder(followed) / LEARNED, find_live_folder(repo) / LEARNED)
    apply_rules(repo, {"blocked_items": np.setdiff1d(whole.items["item_id"], shown).tolist()})
    done = follow_once(past, repo, None, 1_000, QUIET)
    assert present(done.verdict).coverage == 1  # both show the 30 items that are not blocked
    assert done.report.endswith(". All models from scratch")


def test_events_that_a_list_led_to_judge_only_where_others_are_too_few(repo, whole, past):
    rows = np.arange(EARLY, EVERYTHING)
    log = whole.interactions
    with closing(Observe.load(repo / OBSERVE / str(read_pinned_generation(repo)))) as model:
        for part in split_blocks(rows, 500):
            prompted = np.array([b"r1" if row % 2 else b"" for row in part.tolist()], object)
            model(make_event_inputs(whole, part) | {"request_id": prompted[:, None]})
    folder = find_live_folder(repo)
    judged = choose_judged(log, folder, EARLY, filter_seen=True)
    assert len(judged) >= LEAST_QUESTIONS
    assert (judged % 2 == 0).all()
    last = EVERYTHING - LEAST_QUESTIONS  # too few of the last events followed no list
    assert set(choose_judged(log, folder, last, filter_seen=True) % 2) == {0, 1}


@pytest.mark.parametrize("repeated", [False, True], ids=["few questions", "none"])
def test_with_too_few_questions_nothing_is_trained(repo, whole, past, repeated):
    log, rows = whole.interactions.copy(), np.arange(EARLY, EARLY + 50)
    if repeated:  # of items that their users had before, which are no questions
        pair = ["user_id", "item_id"]
        log.loc[rows, pair] = log.loc[: len(rows) - 1, pair].to_numpy()
    observe(repo, replace(whole, interactions=log), rows)
    done = follow_once(past, repo, SETTINGS, 10, QUIET)
    assert done.report.startswith("waits: the newest events hold ")
    assert list_published_generations(repo) == (1,)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(1, "waits: the new events are all of one second"), (2, r"waits: the newest events hold [1-9]\d* questions")],
    ids=["all", "half of them"],
)
def test_events_within_one_second_are_not_split(repo, whole, past, seconds, said):
    log, rows = whole.interactions.copy(), np.arange(EARLY, EARLY + 100)
    log.loc[rows, "timestamp"] = log.loc[EARLY, "timestamp"] + 3_600 + rows % seconds
    log = log.sort_values("timestamp", kind="stable", ignore_index=True)
    observe(repo, replace(whole, interactions=log), np.flatnonzero(log["timestamp"].isin(log.loc[rows, "timestamp"])))
    assert re.match(said, follow_once(past, repo, SETTINGS, 10, QUIET).report)


def test_a_log_that_is_newer_than_its_live_events_judges_nothing(repo, whole, past):
    observe(repo, whole, np.arange(EARLY, EARLY + 500))
    done = follow_once(whole, repo, SETTINGS, 100, QUIET)
    assert done.report.startswith(
        "waits: no live event is newer than the data set's own log, which ends at 2023-12-31 23:58 UTC"
    )


def test_a_generation_whose_log_ends_in_the_future_says_until_when(repo, past, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: float(past.interactions["timestamp"].max()) - 3_600)
    told = follow_once(past, repo, None, 1_000, QUIET).report
    assert re.fullmatch("waits: 0 events are newer than generation 1, of 1,000, which learned events until 2023-.* UTC", told)


def test_a_server_that_is_down_while_a_round_publishes_comes_back_with_its_generation(repo, exported, tmp_path, monkeypatch):
    """Its supervisor starts it with the generation that is saved for it."""
    monkeypatch.setattr(follow, "RUN_DIR", tmp_path)
    state = ServerState(1, draw_tag(), repo, tmp_path / "log", find_free_ports(), generation=1)
    state.save(tmp_path)
    assert publish_candidate(exported, repo, "fused", 1, Terms(), Verdict(0, "")) == 2
    assert present(read_state(make_state_path(tmp_path, state.ports.grpc))).generation == 2
    assert read_pinned_generation(repo) == 2


def test_a_candidate_is_not_published_where_a_person_moved_to_another_generation_meanwhile(repo, exported):
    assert relayout(exported, repo, "fused", beside=1) == 2
    pin(repo, 2)
    with pytest.raises(ExportError, match=r"Generation 2 is pinned in .* now, and the new one was made beside 1"):
        publish_candidate(exported, repo, "fused", 1, Terms(), Verdict(0, ""))
    assert (list_published_generations(repo), read_pinned_generation(repo)) == ((1, 2), 2)


def test_a_candidate_is_not_published_where_an_experiment_was_started_meanwhile(repo, exported):
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    told = publish_candidate(exported, repo, "fused", 1, Terms(), Verdict(0, ""))
    assert told == "experiment spring was started meanwhile, and its verdict comes first"
    assert list_published_generations(repo) == (1,)


def test_a_repository_without_live_events_is_refused(repo, past):
    shutil.rmtree(repo / OBSERVE)
    with pytest.raises(ConfigError, match="no model `observe`"):
        follow_once(past, repo, SETTINGS, 1, QUIET)


def test_a_folder_that_cannot_be_written_is_refused_before_there_are_events(repo, past, monkeypatch):
    """A round would fail otherwise only once it had enough events, and name a folder that it could not make."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != repo.resolve().parent)
    with pytest.raises(ConfigError, match=f"cannot write {repo.resolve().parent}"):
        follow_once(past, repo, SETTINGS, 1, QUIET)


def test_a_config_with_another_live_store_than_the_servers_is_refused(repo, past, tmp_path):
    settings = Settings.model_validate(FOLLOWED_SETTINGS | {"live": {"folder": str(tmp_path / "other")}})
    with pytest.raises(ConfigError, match=r'--config names .*other as the live store.* set \[live\] folder = ""'):
        follow_once(past, repo, settings, 1_000, QUIET)
