"""`python -m server experiment` where no server of the repository runs. With servers: tests/server/test_challenger.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from repository.challenger import read_challengers, write_challenger
from repository.experiments import end_experiment, find_experiment_folder, refuse_other_shop, start_experiment
from repository.generations import pin
from repository.triton.models import read_config
from server.__main__ import app
from serving.contract.artifacts import find_stage_folder, read_stage
from serving.contract.errors import ConfigError, ServerError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import CHALLENGER
from serving.live.experiment import Experiment, read_experiment
from tests.present import present
from tests.repositories import copy_lean_repository
from tests.triton_double import TritonDouble
from tests.unit.server.shops import begin_experiment, make_shop


@pytest.fixture
def repo(tmp_path) -> Path:
    return copy_lean_repository(tmp_path / "shop")


def run(repo: Path, *words: str) -> str:
    done = CliRunner().invoke(app, ["experiment", *words, "--repo", str(repo)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_an_experiment_whose_server_is_gone_ends_and_the_next_server_loads_the_champion_alone(repo):
    begin_experiment(repo)
    assert "spring: running" in run(repo, "status")
    assert "no server started here serves it" in run(repo, "status")
    said = run(repo, "stop", "--reason", "enough")
    assert said == "experiment spring is over: generation 2 is not loaded, because no server started here runs\n"
    experiment = present(read_experiment(find_experiment_folder(repo)))
    assert (experiment.state, experiment.reason) == ("stopped", "enough")
    assert read_challengers(repo) == ()
    assert read_pinned_generation(repo) == 1
    assert list(read_config(repo / "preprocess" / "config.pbtxt").version_policy.specific.versions) == [1]
    assert run(repo, "stop") == said  # again: nothing is left to do
    assert "still takes memory" not in run(repo, "status")


def test_a_share_that_the_experiment_has_already_changes_nothing(repo):
    """A change would start the comparison again, without the answers until now."""
    begin_experiment(repo)
    before = read_experiment(find_experiment_folder(repo))
    assert run(repo, "share", "0.5") == "experiment spring: generation 2 meets 50.0% of the users already\n"
    assert read_experiment(find_experiment_folder(repo)) == before
    assert "start again" in run(repo, "share", "0.4")
    assert present(read_experiment(find_experiment_folder(repo))).share == 0.4


def test_status_says_when_a_challenger_takes_over(repo):
    start_experiment(repo, Experiment("generation-2", 1, 2, 0.1, promotes=True, days=7))
    assert "takes over once it is better, after 7 days also if it is not worse" in run(repo, "status")
    end_experiment(repo, "no decision within 7 days")
    assert "takes over" not in run(repo, "status")


def test_a_challenger_that_is_loaded_after_its_experiment_is_mentioned(repo):
    begin_experiment(repo)
    end_experiment(repo, "p99 is 90 ms", "rolled back")
    assert "p99 is 90 ms; generation 2 still takes memory: python -m server experiment stop" in run(repo, "status")


def test_a_challenger_without_any_experiment_is_mentioned(repo):
    """As after a `start` that was killed, or where a backup without the experiment was restored."""
    write_challenger(repo, 2)
    assert run(repo, "status").endswith("; generation 2 still takes memory: python -m server experiment stop\n")


def test_an_experiment_needs_a_server_and_a_share_needs_an_experiment(repo):
    with pytest.raises(ServerError, match="No server started here serves"):
        run(repo, "start", "spring", "--challenger", "2")
    with pytest.raises(ConfigError, match="No experiment runs"):
        run(repo, "share", "0.5")
    with pytest.raises(ConfigError, match="so there is none to stop"):
        run(repo, "stop")
    with pytest.raises(ConfigError, match="Users do not see a shadow"):
        run(repo, "start", "spring", "--challenger", "2", "--mode", "shadow", "--promote")
    with pytest.raises(ConfigError, match="With a share of 1, no answer of the champion is left to compare"):
        run(repo, "start", "spring", "--challenger", "2", "--share", "1")
    refused = CliRunner().invoke(app, ["experiment", "start", "spring", "--challenger", "0", "--repo", str(repo)])
    assert refused.exit_code == 2
    assert "greater than or equal to 1" in refused.output
    assert run(repo, "status") == f"no experiment was started on {repo}\n"


@pytest.mark.parametrize(("pinned", "loads"), [(1, True), (2, True), (2, False)])
def test_a_start_that_moves_the_pin_from_a_newer_export_to_the_champion_says_so(sleeping, run_dir, pinned, loads):
    repo = make_shop(run_dir / "shop", generations=2)
    replace(sleeping, repo=repo).save(run_dir)
    double = TritonDouble(repo, sleeping.ports.grpc)
    double.before_load = lambda name: "" if loads or name != CHALLENGER else "it is too large"
    pin(repo, pinned)  # as an export does, which moves no server
    done = CliRunner().invoke(app, ["experiment", "start", "spring", "--challenger", "2", "--repo", str(repo)])
    double.stop()
    said = done.output
    assert ("generation 2 meets 10.0% of the users" in said) == loads
    assert loads or "Generation 2 does not load" in str(done.exception)
    assert ("moved from generation 2 to 1, which answers" in said) == (pinned == 2)
    assert read_pinned_generation(repo) == 1


@pytest.mark.parametrize("mode", ["ab", "interleave", "shadow"])
def test_only_a_shadow_meets_everybody(repo, mode):
    start_experiment(repo, Experiment("spring", 1, 2, 0.5, mode))
    if mode == "shadow":
        assert "meets 100.0% of the users" in run(repo, "share", "1")
        return
    with pytest.raises(ConfigError, match="With a share of 1, no answer of the champion is left to compare"):
        run(repo, "share", "1")
    assert present(read_experiment(find_experiment_folder(repo))).share == 0.5


@pytest.mark.parametrize("share", ["1.5", "-0.1", "150%", "nan"])
def test_a_share_that_is_none_is_refused_and_changes_nothing(repo, share):
    begin_experiment(repo)
    done = CliRunner().invoke(app, ["experiment", "share", "--repo", str(repo), "--", share])
    assert done.exit_code != 0
    assert present(read_experiment(find_experiment_folder(repo))).share == 0.5


def test_a_challenger_of_another_data_set_is_refused(tmp_path):
    """Its answers would name another shop's items, and live events of this one would be missing in them."""
    repo = make_shop(tmp_path / "shop", generations=2)
    refuse_other_shop(repo, 1, 2)
    folder = find_stage_folder(repo, "preprocess", 2)
    replace(read_stage(folder), shop="another").write(folder)
    with pytest.raises(ConfigError, match=r"Generation 2 is of the data set 'another', and generation 1, .* its former name"):
        refuse_other_shop(repo, 1, 2)
