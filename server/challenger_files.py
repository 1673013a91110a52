"""Roll back the experiment of a challenger whose files are not as published. The champion goes on answering."""

from __future__ import annotations

from repository.experiments import end_experiment, follow_experiment
from server.integrity import ArtifactCheck
from server.state import ServerState
from serving.contract.artifacts import find_stage_folder
from serving.contract.errors import ConfigError
from serving.contract.tensors import ENSEMBLE


class ChallengerFiles:
    """Follows the experiment of one server's repository."""

    def __init__(self, state: ServerState) -> None:
        self._repo = state.repo
        self._followed = follow_experiment(state.repo)
        self._check: ArtifactCheck | None = None

    def look(self) -> str:
        """Look at the challenger's files while an experiment runs. Return what was done, "" for nothing.

        A generation that was never there is the guard's business: its challenger fails at once.
        """
        experiment = self._followed.read_current() if self._followed else None
        if experiment is None or not experiment.runs:
            self._check = None
            return ""
        if self._check is None or self._check.generation != experiment.challenger:
            if not find_stage_folder(self._repo, ENSEMBLE, experiment.challenger).is_dir():
                return ""
            self._check = ArtifactCheck(self._repo, experiment.challenger)
        if damage := self._check.look():
            try:
                end_experiment(self._repo, damage, state="rolled back", judged=experiment)
            except ConfigError as changed:  # by a person, or rolled back by the supervisor of another server
                return str(changed)
            return f"experiment {experiment.name} is rolled back: {damage}"
        return ""
