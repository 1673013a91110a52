"""Move the servers of a repository to a challenger that the guard of its experiment has promoted (trials/guard.py)."""

from __future__ import annotations

from pathlib import Path

from repository.experiments import experiment_folder
from repository.registry import read_acts
from server.challenger import unload_challenger
from server.launcher import activate, running_servers
from serving.contract.errors import ArtifactError
from serving.live.experiment import Experiment, FollowedExperiment


class Promotion:
    """Follows the experiment of one repository; its servers are those in `run_dir`."""

    def __init__(self, repo: Path, run_dir: Path) -> None:
        self._repo, self._run_dir = repo.resolve(), run_dir
        self._settled: Experiment | None = None
        try:
            self._followed: FollowedExperiment | None = FollowedExperiment(experiment_folder(repo))
        except ArtifactError:  # not one of our repositories: it has no experiments
            self._followed = None

    def look(self) -> str:
        """Move the servers, once for each promotion. Return what was done, "" for nothing.

        Raises ServerError, once, where the challenger cannot take over: the champion then answers as before.
        """
        experiment = self._followed.current() if self._followed else None
        if experiment is None or experiment.state != "promoted" or experiment is self._settled:
            return ""
        self._settled = experiment
        if not awaits_move(self._repo, experiment):
            return ""
        for state in running_servers(self._run_dir):
            if state.repo == self._repo:
                unload_challenger(state.grpc_url, state.repo)
                activate(state, experiment.challenger, self._run_dir)
        return f"experiment {experiment.name}: generation {experiment.challenger} is promoted, because {experiment.reason}"


def awaits_move(repo: Path, experiment: Experiment) -> bool:
    """Return whether no server was moved since the promotion, by this supervisor, another one or a person."""
    actions = [act.action for act in read_acts(repo) if act.time_s >= experiment.changed_ms // 1_000]
    return "activated" not in actions[actions.index("promoted") :] if "promoted" in actions else False
