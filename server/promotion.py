"""Move a server to the challenger that the guard of its experiment has promoted (trials/guard.py)."""

from __future__ import annotations

from pathlib import Path

from repository.experiments import NOT_PROMOTED, follow_experiment, withdraw_promotion
from repository.registry import CHOSEN, read_acts, record_act
from server.control import activate
from server.generations.challenger import unload_challenger
from server.start.lock import hold_start_lock
from server.state import ServerState, make_state_path, read_state
from serving.contract.errors import ConfigError, RecommenderError
from serving.live.experiment import Experiment


class Promotion:
    """Follows the experiment of one server's repository. run_dir: the server's run folder"""

    def __init__(self, state: ServerState, run_dir: Path) -> None:
        self._state, self._run_dir = state, run_dir
        self._followed = follow_experiment(state.repo)

    def look(self) -> str:
        """Move the server from the champion to a promoted challenger. Return what was done, "" for nothing.

        This is tried once: if the challenger cannot take over, the champion stays, and registry and experiment say why.
        """
        experiment = self._followed.read_current() if self._followed else None
        if experiment is None or not awaits_move(self._state, experiment):
            return ""
        with hold_start_lock(self._run_dir, self._state.ports.grpc):
            saved = read_state(make_state_path(self._run_dir, self._state.ports.grpc))
            if saved is not None and saved.generation != self._state.generation:
                return ""  # a command has moved the server while this waited
            return self._move(experiment)

    def _move(self, experiment: Experiment) -> str:
        promoted = f"experiment {experiment.name}: generation {experiment.challenger} is promoted, because {experiment.reason}"
        try:
            unload_challenger(self._state.grpc_url, self._state.repo)
            activate(self._state, experiment.challenger, self._run_dir)
        except RecommenderError as error:
            saved = read_state(make_state_path(self._run_dir, self._state.ports.grpc))
            if saved is not None and (saved.tag, saved.generation) == (self._state.tag, experiment.challenger):
                return f"{promoted} and answers, but: {error}"  # only what follows the move failed
            self._withdraw(experiment, str(error))
            return f"{promoted}; generation {experiment.champion} stays, because {error}"
        return promoted

    def _withdraw(self, experiment: Experiment, reason: str) -> None:
        try:
            withdraw_promotion(self._state.repo, experiment, reason)
        except ConfigError:  # changed meanwhile: the file describes another experiment
            record_act(self._state.repo, NOT_PROMOTED, experiment.challenger, reason=reason)


def awaits_move(state: ServerState, experiment: Experiment) -> bool:
    """Return whether a server still serves the champion of an experiment whose challenger was promoted.

    False if the registry says that the promotion failed, or that somebody activated or pinned the champion since.
    """
    if experiment.state != "promoted" or state.generation != experiment.champion:
        return False
    later = [act for act in read_acts(state.repo) if act.time_s >= experiment.changed_ms // 1_000]
    since = next((place for place, act in enumerate(later) if act.action == "promoted"), len(later))
    decided = {(action, experiment.champion) for action in CHOSEN} | {(NOT_PROMOTED, experiment.challenger)}
    return not any((act.action, act.generation) in decided for act in later[since:])
