"""Roll back the experiment of a challenger whose files change. The champion goes on answering.

Its arrays are leased (leases.py): while a writer waits, the experiment is rolled back and the challenger answers its last
requests. Other changes are found afterwards (integrity.py).
"""

from __future__ import annotations

from pathlib import Path

from repository.challenger import read_added_ms, read_challengers
from repository.experiments import end_experiment, find_running, follow_experiment
from repository.generations import drop_challenger
from server.generations.challenger import find_loaded_challengers, stop_challenger
from server.generations.integrity import ArtifactCheck
from server.generations.leases import Leases
from serving.contract.artifacts import find_stage_folder
from serving.contract.errors import ConfigError, RecommenderError, ServerError
from serving.contract.tensors import ENSEMBLE
from serving.live.experiment import Experiment


def drop_damaged_challenger(repo: Path) -> str:
    """Keep a challenger with damaged or missing files out of the next start, which would fail, and roll its experiment back.

    Return what was done, "" for nothing. Raises RecommenderError or OSError where the repository cannot be written.
    """
    challengers = read_challengers(repo)
    if not challengers or not (reason := _find_damage(repo, generation := challengers[0])):
        return ""
    try:
        experiment = find_running(repo)
        if experiment and experiment.challenger == generation:
            end_experiment(repo, reason, state="rolled back", judged=experiment)
            ended = f" Its experiment {experiment.name} is rolled back."
        else:
            ended = ""
    except (RecommenderError, OSError) as error:  # such as damage of the champion, too; the challenger must not load
        ended = f" Its experiment is not rolled back: {str(error).rstrip('.')}."
    drop_challenger(repo)
    return (
        f"{reason}. So the challenger, generation {generation}, is left out.{ended} To test it again, put its files back as "
        "they were published, and start another experiment"
    )


def end_without_champion(repo: Path, generation: int, damage: str) -> str:
    """Stop a running experiment whose champion is left for another generation. Return what was done, "" for nothing.

    generation: the one that answers from now on; damage: why the champion is left. Raises RecommenderError or OSError.
    """
    experiment = find_running(repo)
    if experiment is None or experiment.champion == generation:
        return ""
    reason = f"generation {generation} answers in place of the champion, {experiment.champion}: {damage}"
    end_experiment(repo, reason, judged=experiment)
    return f"experiment {experiment.name} is stopped: {reason}"


def _find_damage(repo: Path, generation: int) -> str:
    folder = find_stage_folder(repo, ENSEMBLE, generation)
    return ArtifactCheck(repo, generation).read_all() if folder.is_dir() else f"{folder} is missing"


class ChallengerFiles:
    """Follows the experiment of a repository."""

    def __init__(self, repo: Path) -> None:
        self._repo = repo
        self._followed = follow_experiment(repo)
        self._check: ArtifactCheck | None = None
        self._leases = Leases(())

    def end_before_change(self, grpc_url: str) -> str:
        """Roll the experiment back and stop the challenger if an array of it is opened for writing, before the array changes.

        Return what was done, "" for nothing.
        """
        path = self._leases.find_opened()
        if path is None or self._check is None:
            return ""
        try:
            action = self._roll_back(f"{path} was opened for writing")
        except (RecommenderError, OSError) as error:  # also on a full disk, the challenger must not answer
            action = f"the experiment is not rolled back: {error}"
        try:
            stop_challenger(grpc_url, self._check.generation)
        except ServerError as error:
            action = f"{action}; {error}"
        finally:
            self._leases.release()
        return action

    def prepare_start(self, read_all: bool) -> str:
        """Keep a damaged challenger, or one whose experiment is over, out of the next start. A promoted one is `Promotion`'s.

        read_all: whether to read every file, because one may have failed a start
        Return what was done, "" for nothing. Raises RecommenderError or OSError.
        """
        action, experiment = "", self._read_running()
        if experiment and experiment.challenger in read_challengers(self._repo):  # otherwise the start does not load it
            folder = find_stage_folder(self._repo, ENSEMBLE, experiment.challenger)
            action = self._look_at(experiment, read_all) if folder.is_dir() else self._end(experiment, f"{folder} is missing")
        experiment = self._followed.read_current() if self._followed else None
        if experiment is None or experiment.state in ("running", "promoted"):
            return action
        # One that was added later belongs to an experiment that has not begun yet.
        if read_challengers(self._repo) == (experiment.challenger,) and read_added_ms(self._repo) <= experiment.changed_ms:
            drop_challenger(self._repo)
        return action

    def look(self, grpc_url: str) -> str:
        """Look at the challenger's files while an experiment runs. Return what was done, "" for nothing.

        Afterwards, keep the leases until the server has unloaded the challenger. A generation that was never there is the
        guard's business: its challenger fails at once.
        """
        experiment = self._read_running()
        if experiment:
            return self._look_at(experiment, read_all=False)
        if self._check and not self._is_loaded(grpc_url):
            self._check = None
            self._leases.release()
        return ""

    def release(self) -> None:
        """Let writers go on. Nothing can be looked at afterwards."""
        self._leases.release()

    def _read_running(self) -> Experiment | None:
        self._followed = self._followed or follow_experiment(self._repo)
        experiment = self._followed.read_current() if self._followed else None
        return experiment if experiment and experiment.runs else None

    def _look_at(self, experiment: Experiment, read_all: bool) -> str:
        """Look at the files of a running experiment. Return what was done, "" for nothing."""
        if self._check is None or self._check.generation != experiment.challenger:
            if not find_stage_folder(self._repo, ENSEMBLE, experiment.challenger).is_dir():
                return ""
            self._leases.release()
            self._check = ArtifactCheck(self._repo, experiment.challenger)
            self._leases = Leases(self._check.mapped)
        damage = self._check.read_all() if read_all else self._check.look()
        return self._roll_back(damage) if damage else ""

    def _is_loaded(self, grpc_url: str) -> bool:
        """Return whether the server still answers as the challenger that is checked; True where it does not say."""
        assert self._check is not None
        try:
            return self._check.generation in find_loaded_challengers(grpc_url)
        except ServerError:  # it is paused, or gone
            return True

    def _roll_back(self, reason: str) -> str:
        """Roll back the experiment of the generation that is checked. Return what was done."""
        experiment = self._read_running()
        if experiment is None or self._check is None or experiment.challenger != self._check.generation:
            return f"{reason}, and its experiment was over already"
        return self._end(experiment, reason)

    def _end(self, experiment: Experiment, reason: str) -> str:
        try:
            end_experiment(self._repo, reason, state="rolled back", judged=experiment)
        except ConfigError as changed:  # by a person, or rolled back by the supervisor of another server
            return str(changed)
        return f"experiment {experiment.name} is rolled back: {reason}"
