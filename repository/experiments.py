"""Start, change and end the experiment of a repository. Every change is recorded in the registry too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from repository.owner import copy_owner
from repository.registry import VERDICTS, read_acts, record_act
from serving.contract.artifacts import find_stage_folder, read_stage
from serving.contract.errors import ArtifactError, ConfigError
from serving.contract.generations import read_pinned_generation
from serving.contract.locks import hold_lock
from serving.contract.tensors import STAGES
from serving.live.experiment import EXPERIMENT_FILE, Experiment, FollowedExperiment, State, read_experiment
from serving.live.store import find_live_folder, make_folder

STARTED, STOPPED, NOT_PROMOTED = "experiment started", "experiment stopped", "not promoted"  # acts in the registry


def find_experiment_folder(repository: Path) -> Path:
    """Return the folder of the live store, which holds the experiment. It belongs to the shop, not to one generation."""
    info = read_stage(find_stage_folder(repository, STAGES[0], read_pinned_generation(repository)))
    return find_live_folder(repository, info.live_folder)


def find_running(repository: Path) -> Experiment | None:
    """Return the running experiment, or None."""
    experiment = read_experiment(find_experiment_folder(repository))
    return experiment if experiment and experiment.runs else None


def follow_experiment(repository: Path) -> FollowedExperiment | None:
    """Return a reader that follows changes of the experiment; None for a repository that this project did not export."""
    try:
        return FollowedExperiment(find_experiment_folder(repository))
    except ArtifactError:
        return None


def refuse_other_shop(repository: Path, champion: int, challenger: int) -> None:
    """Raise ConfigError where two generations are of different data sets: equal ids may name different items and users."""
    shop, new_shop = (
        read_stage(find_stage_folder(repository, STAGES[0], generation)).shop for generation in (champion, challenger)
    )
    if shop != new_shop:
        raise ConfigError(
            f"Generation {challenger} is of the data set {new_shop!r}, and generation {champion}, which answers, of {shop!r}; "
            "expected one data set, because equal ids may name different items, and each has live events of its own. If it is "
            "the same shop, export it again with its former name (name in dataset.toml)."
        )


def start_experiment(repository: Path, experiment: Experiment) -> Experiment:
    """Start an experiment. Raises ConfigError while another one runs, or if its name was used for another."""

    def begin(former: Experiment | None) -> Experiment:
        if former and former.runs:
            raise ConfigError(
                f"Experiment {former.name!r} runs already. Stop it first (python -m server experiment stop), or change its "
                "share (python -m server experiment share SHARE)."
            )
        refuse_used_name(repository, experiment, experiment.champion)
        return replace(experiment, started_ms=_read_clock_ms())

    return _change(repository, STARTED, begin)


def refuse_used_name(repository: Path, experiment: Experiment, champion: int) -> None:
    """Raise ConfigError if the record has another experiment of this name: the log would not tell the answers of both apart.

    Each pod of a cluster keeps a live store of its own beside the shared repository, so each starts the same experiment.
    champion: the generation that is served
    """
    name, settings = experiment.name, (experiment.challenger, experiment.mode, champion)
    acts = [act for act in read_acts(repository) if act.facts.get("experiment") == name]
    if any(act.action in VERDICTS for act in acts):
        raise ConfigError(f"There was an experiment {name!r} before, whose answers are logged under this name. Choose another.")
    for act in acts:
        if (act.generation, act.facts["mode"], act.facts["champion"]) != settings:
            raise ConfigError(
                f"Experiment {name!r} was started with generation {act.generation} beside {act.facts['champion']}, mode "
                f"{act.facts['mode']}; expected the same generations and mode on every server. Use them, or another name."
            )


def change_share(repository: Path, share: float) -> Experiment:
    """Change the share of users whom the running experiment enrols. Raises ConfigError when none runs."""
    return _change(repository, "share changed", lambda former: replace(_require_running(former), share=share))


def end_experiment(repository: Path, reason: str, state: State = "stopped", judged: Experiment | None = None) -> Experiment:
    """End the experiment, so that the champion answers everybody.

    Raises ConfigError when no experiment runs, or when it differs from `judged`.

    state: how it ends; after "promoted", the servers' supervisors activate the challenger (server/promotion.py)
    reason: why it ends; judged: the experiment as it was when this was decided; None ends whichever experiment runs
    """

    def end(former: Experiment | None) -> Experiment:
        running = _require_running(former)
        if judged is not None and running != judged:
            raise ConfigError(f"Experiment {judged.name!r} was changed while it was judged. Judge it again.")
        return replace(running, state=state, share=0.0, reason=reason)

    return _change(repository, STOPPED if state == "stopped" else state, end)


def withdraw_promotion(repository: Path, promoted: Experiment, reason: str) -> None:
    """Stop the experiment whose promoted challenger could not take over, and record the reason.

    Raises ConfigError when the experiment was changed meanwhile.
    """

    def withdraw(former: Experiment | None) -> Experiment:
        if former != promoted:
            raise ConfigError(f"Experiment {promoted.name!r} was changed while its challenger was to take over.")
        return replace(promoted, state="stopped", reason=f"{NOT_PROMOTED}: {reason}")

    _change(repository, NOT_PROMOTED, withdraw)


def _require_running(experiment: Experiment | None) -> Experiment:
    if experiment is None or not experiment.runs:
        raise ConfigError("No experiment runs. Start one: python -m server experiment start NAME --challenger GENERATION")
    return experiment


def _change(repository: Path, act: str, make: Callable[[Experiment | None], Experiment]) -> Experiment:
    folder = find_experiment_folder(repository)
    if not folder.exists():
        make_folder(folder)
        copy_owner(folder, repository)
    with hold_lock(lock := folder / ".experiment.lock"):
        copy_owner(lock, folder)
        former = read_experiment(folder)
        changed = make(former)
        changed = replace(changed, version=former.version + 1 if former else 1, changed_ms=_read_clock_ms())
        share = former.share if former and not changed.runs else changed.share  # an ended one has share 0
        description = f"experiment {changed.name}, {changed.mode}, share {share:g}"
        description = f"{description}: {changed.reason}" if changed.reason else description
        facts = {"experiment": changed.name, "mode": changed.mode, "champion": changed.champion}
        record_act(repository, act, changed.challenger, reason=description, facts=facts)
        _write(folder, changed)  # last, so that whoever sees the change finds its record
    return changed


def _write(folder: Path, experiment: Experiment) -> None:
    """Replace the experiment's file by one rename. Running gateways notice at their next request."""
    new = folder / f".{EXPERIMENT_FILE}"
    with new.open("w") as file:
        file.write(experiment.write_text())
        file.flush()
        os.fsync(file.fileno())
    copy_owner(new, folder)
    os.rename(new, folder / EXPERIMENT_FILE)


def _read_clock_ms() -> int:
    return time.time_ns() // 1_000_000
