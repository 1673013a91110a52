"""Unload the challenger of an experiment that is over: the guard (trials/guard.py) only ends the experiment."""

from __future__ import annotations

from repository.challenger import read_challengers
from repository.experiments import follow_experiment
from server.generations.challenger import find_loaded_challengers, unload_challenger
from server.state import ServerState
from serving.contract.errors import RecommenderError


class Release:
    """Follows the experiment of one server's repository."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._followed = follow_experiment(state.repo)
        self._tried = 0  # version of the experiment whose challenger was to be unloaded

    def look(self) -> str:
        """Unload the challenger of an experiment that ended without a promotion. Return what was done, "" for nothing.

        This is tried once an experiment. A challenger that was loaded since is left to another, which may not have begun yet.
        """
        experiment = self._followed.read_current() if self._followed else None
        if experiment is None or experiment.state in ("running", "promoted") or experiment.version == self._tried:
            return ""
        self._tried = experiment.version
        repo, url = self._state.repo, self._state.grpc_url
        over = f"experiment {experiment.name} is over: generation {experiment.challenger}"
        try:
            if experiment.challenger not in (read_challengers(repo) or find_loaded_challengers(url)):
                return ""
            unloaded = unload_challenger(url, repo, experiment.changed_ms)
        except RecommenderError as error:
            return f"{over} stays loaded, because {error}"
        return f"{over} is unloaded" if unloaded else ""
