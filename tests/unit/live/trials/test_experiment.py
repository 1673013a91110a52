"""Who meets the challenger: the same users everywhere, in the stated share, and more of them when it grows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from repository.experiments import change_share, end_experiment, find_experiment_folder, start_experiment
from repository.registry import read_acts
from serving.contract.errors import ArtifactError, ConfigError
from serving.live.experiment import EXPERIMENT_FILE, Experiment, FollowedExperiment, hash_share, read_experiment
from tests.present import present
from tests.repositories import copy_lean_repository

USERS = range(20_000)
PLACES = {7: 0.7489131948, 17850: 0.6972319672, -5: 0.4027470453}  # of experiment "spring": vectors for other languages


def spring(**settings) -> Experiment:
    usual: dict[str, Any] = {"name": "spring", "champion": 1, "challenger": 2, "share": 0.5}
    return Experiment(**usual | settings)


@pytest.mark.parametrize(("user", "place"), PLACES.items())
def test_a_users_place_is_what_the_vectors_say(user, place):
    assert hash_share(f"spring/{user}") == pytest.approx(place, abs=1e-9)
    assert not spring(share=place - 1e-6).enrols(user)
    assert spring(share=place + 1e-6).enrols(user)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_the_enrolled_are_the_stated_share_of_the_users(share):
    enrolled = sum(spring(share=share).enrols(user) for user in USERS)
    assert abs(enrolled - share * len(USERS)) <= 4 * np.sqrt(len(USERS) * share * (1 - share))


def test_a_larger_share_keeps_whom_the_smaller_one_enrolled():
    small, large = ({user for user in USERS if spring(share=share).enrols(user)} for share in (0.1, 0.4))
    assert small < large


def test_two_experiments_assign_independently():
    one, other = ({user for user in USERS if spring(name=name).enrols(user)} for name in ("spring", "autumn"))
    assert abs(len(one & other) - 5_000) < 300


@pytest.mark.parametrize(
    ("settings", "arms"),
    [
        ({"mode": "ab"}, {"champion", "challenger"}),
        ({"mode": "shadow"}, {"champion"}),
        ({"mode": "interleave"}, {"champion", "interleaved"}),
        ({"state": "stopped", "share": 1.0}, {""}),
        ({"state": "rolled back", "share": 1.0}, {""}),
    ],
)
def test_arms_follow_from_the_mode_until_the_experiment_ends(settings, arms):
    assert {spring(**settings).find_arm(user) for user in range(100)} == arms


@pytest.mark.parametrize("wrong", [{"share": 1.5}, {"mode": "abc"}, {"state": "on"}, {"challenger": 1}, {"days": -1}])
def test_what_is_no_experiment_is_refused(wrong):
    with pytest.raises(ArtifactError, match=f"The experiment's {next(iter(wrong))} is"):
        spring(**wrong)


@pytest.fixture
def repo(tmp_path) -> Path:
    return copy_lean_repository(tmp_path / "shop")


def test_a_share_is_followed_without_a_restart_and_every_change_is_recorded(repo):
    followed = FollowedExperiment(find_experiment_folder(repo))
    assert followed.read_current() is None
    begun = start_experiment(repo, spring(share=0.1))
    assert followed.read_current() == begun == read_experiment(find_experiment_folder(repo))
    assert change_share(repo, 0.4).version == begun.version + 1
    assert present(followed.read_current()).share == 0.4
    ended = end_experiment(repo, "p99 is 90 ms", state="rolled back")
    assert followed.read_current() == ended
    assert (ended.state, ended.share, ended.reason) == ("rolled back", 0.0, "p99 is 90 ms")
    acts = read_acts(repo)
    assert [act.action for act in acts] == ["experiment started", "share changed", "rolled back"]
    assert acts[-1].generation == 2
    assert "p99 is 90 ms" in acts[-1].reason
    with pytest.raises(ConfigError, match="No experiment runs"):
        change_share(repo, 0.2)


def test_the_name_of_an_experiment_that_ended_is_not_used_again(repo):
    start_experiment(repo, spring())
    ended = end_experiment(repo, "p99 is 90 ms", state="rolled back")
    with pytest.raises(ConfigError, match=r"There was an experiment 'spring' before, .* Choose another"):
        start_experiment(repo, spring(challenger=3))
    assert read_experiment(find_experiment_folder(repo)) == ended
    start_experiment(repo, spring(name="spring 2"))
    end_experiment(repo, "enough")
    with pytest.raises(ConfigError, match="'spring' before"):  # not only the last one
        start_experiment(repo, spring())


def test_every_pod_of_a_cluster_starts_the_same_experiment_until_it_ends(repo):
    file = find_experiment_folder(repo) / EXPERIMENT_FILE
    start_experiment(repo, spring(share=0.1))
    change_share(repo, 0.2)
    file.unlink()  # the next pod has a live store of its own
    for other in ({"champion": 3}, {"challenger": 3}, {"mode": "interleave"}):
        with pytest.raises(ConfigError, match="was started with generation 2 beside 1, mode ab; expected the same"):
            start_experiment(repo, spring(**other))
    assert start_experiment(repo, spring(share=0.2)).runs
    end_experiment(repo, "p99 is 90 ms", state="rolled back")
    file.unlink()
    with pytest.raises(ConfigError, match="There was an experiment 'spring' before"):
        start_experiment(repo, spring(share=0.2))


def test_what_was_changed_while_it_was_judged_goes_on(repo):
    judged = start_experiment(repo, spring(share=0.1))
    changed = change_share(repo, 0.2)
    with pytest.raises(ConfigError, match="was changed while it was judged"):
        end_experiment(repo, "better", state="promoted", judged=judged)
    assert read_experiment(find_experiment_folder(repo)) == changed
    assert end_experiment(repo, "better", state="promoted", judged=changed).state == "promoted"


def test_a_file_of_a_newer_version_is_read(tmp_path):
    folder = tmp_path / "live"
    folder.mkdir()
    (folder / EXPERIMENT_FILE).write_text(spring().write_text().replace("{", '{"colour": "red",', 1))
    assert read_experiment(folder) == spring()


def test_two_experiments_do_not_run_at_once(repo):
    begun = start_experiment(repo, spring())
    for other in (spring(name="autumn"), spring(mode="interleave"), spring()):
        with pytest.raises(ConfigError, match="'spring' runs already"):
            start_experiment(repo, other)
    assert read_experiment(find_experiment_folder(repo)) == begun


@pytest.mark.parametrize("is_folder", [True, False], ids=["an unreadable file", "a file in place of the folder"])
def test_what_cannot_be_read_is_told_once_and_enrols_nobody_until_it_is_replaced(tmp_path, is_folder):
    folder = tmp_path / "live"
    if is_folder:
        folder.mkdir()
        (folder / EXPERIMENT_FILE).write_text("{")
    else:
        folder.touch()
    followed = FollowedExperiment(folder)
    with pytest.raises(ArtifactError, match="cannot be read"):
        followed.read_current()
    assert followed.read_current() is None
    if not is_folder:
        folder.unlink()
        folder.mkdir()
    (folder / "new").write_text(json.dumps(vars(spring())))
    (folder / "new").rename(folder / EXPERIMENT_FILE)
    assert followed.read_current() == spring()


@pytest.mark.parametrize("text", ["{", '{"name": "spring", "champion": 1, "challenger": 2, "share": 7}'])
def test_an_unreadable_file_stops_every_change_and_must_be_moved_away(tmp_path, text):
    (tmp_path / EXPERIMENT_FILE).write_text(text)
    with pytest.raises(ArtifactError, match=rf"{EXPERIMENT_FILE} cannot be read: .*[^.]\. Move the file away, and start"):
        read_experiment(tmp_path)


@pytest.mark.parametrize("name", ["", "caf\udce9", "spring\n", "\x1b[31mspring"])
def test_a_name_that_logs_and_gateways_cannot_use_is_refused(name):
    """The second one is what a Latin-1 terminal makes of café: no gateway could hash it, and every request would fail."""
    with pytest.raises(ArtifactError, match=r"name is .*; expected a printable text in UTF-8"):
        Experiment(name, 1, 2, 0.1)
    assert Experiment("café / spring", 1, 2, 1.0).enrols(7)
