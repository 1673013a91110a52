"""Find the generations of a repository, and pin its configs to one.

Generation g is version g of every model. Two settings in the configs on disk select the served generation:

    recommend/config.pbtxt      every step pinned to model_version g;  version_policy specific [g]
    <step>/config.pbtxt         version_policy specific [g]

`server/generations/activation.py` moves a running server to another generation.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from repository.challenger import read_challengers, remove_challenger
from repository.lock import hold_publication_lock
from repository.triton.models import Model, read_repository, write_config
from serving.contract.artifacts import MANIFEST_FILE, read_json
from serving.contract.errors import ArtifactError, ConfigError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, LIVE_MODELS

SEALED = "sealed_s"  # key of a generation's manifest: when it was written, just before the publication, unix seconds


def list_published_generations(repo: Path) -> tuple[int, ...]:
    """Return the generations for which every model has a version folder, ascending. Raises ConfigError."""
    models = order_models(read_repository(repo, with_challenger=False))
    return tuple(sorted(set.intersection(*(set(model.versions_on_disk) for model in models))))


def find_newest(repo: Path) -> tuple[int, float] | None:
    """Return the newest generation and when it was published, unix seconds; None where there is none.

    Reads no config, because metrics ask every few seconds.
    """
    folders = {int(path.name): path for path in (repo / ENSEMBLE).glob("*") if path.name.isdecimal()}
    try:
        newest = max(folders)
        return newest, read_published_s(folders[newest])
    except (ValueError, FileNotFoundError):  # without a generation, or while its folder is removed
        return None


def read_published_s(folder: Path) -> float:
    """Return when a generation was published, unix seconds. folder: its version folder of the ensemble

    The manifest states it. If an older version wrote the manifest, or it cannot be read, this is the time of the file, which a
    copy or a restored backup may have changed. Raises FileNotFoundError.
    """
    with suppress(ArtifactError):
        if isinstance(published_s := read_json(folder, MANIFEST_FILE).get(SEALED), int | float):
            return published_s
    return (folder / MANIFEST_FILE).stat().st_mtime


def pin(repo: Path, generation: int) -> None:
    """Pin the repository to one of its generations. Only `activate` moves a running server. Raises ConfigError."""
    with hold_publication_lock(repo):
        require_published(repo, generation)
        write_pins(repo, generation)


def drop_challenger(repo: Path) -> None:
    """Remove the challenger from the configs, so that the next server loads only the pinned generation.

    Running servers must have unloaded the challenger. Raises ConfigError or ArtifactError, and ServerError if another process
    holds the publication lock.
    """
    with hold_publication_lock(repo):
        remove_challenger(repo)
        write_pins(repo, read_pinned_generation(repo))


def write_pins(repo: Path, generation: int, keep: tuple[int, ...] = ()) -> None:
    """Write configs that pin `generation`. The steps also load the generations in `keep` and the challenger's.

    This only writes files: a running server loads nothing. The caller must hold the publication lock.
    """
    for model in read_pinned_to(repo, generation, keep):
        write_config(model.folder / "config.pbtxt", model.config)


def read_pinned_to(repo: Path, generation: int, keep: tuple[int, ...] = ()) -> list[Model]:
    """Return the models in the order in which they must load, with the configs of `write_pins`. Nothing is written."""
    models = order_models(read_repository(repo))
    for model in models:
        config = model.config
        challenger = () if model.name in LIVE_MODELS else read_challengers(repo)  # only the served generation takes events
        versions = {generation} if model.name == ENSEMBLE else {generation, *keep, *challenger}
        config.version_policy.Clear()
        config.version_policy.specific.versions.extend(sorted(versions))
        for step in config.ensemble_scheduling.step:
            step.model_version = generation
    return models


def require_published(repo: Path, generation: int) -> tuple[int, ...]:
    """Return the published generations. Raises ConfigError unless `generation` is one of them."""
    published = list_published_generations(repo)
    if generation not in published:
        raise ConfigError(
            f"Generation {generation} is not in {repo}, which holds {list(published)}. Name one of these, or publish another "
            "with `make export`."
        )
    return published


def order_models(models: list[Model]) -> list[Model]:
    """Return the ensemble's steps, the live models and the ensemble, in the order in which they must load.

    Raises ConfigError when the ensemble or one of its steps is missing.
    """
    by_name = {model.name: model for model in models}
    if ENSEMBLE not in by_name:
        raise ConfigError(f"The repository has no model {ENSEMBLE}; it has {sorted(by_name)}.")
    names = [step.model_name for step in by_name[ENSEMBLE].config.ensemble_scheduling.step]
    if missing := [name for name in names if name not in by_name]:
        raise ConfigError(f"{ENSEMBLE} has steps {missing}, which are not in the repository; it has {sorted(by_name)}.")
    live = [name for name in LIVE_MODELS if name in by_name]
    return [by_name[name] for name in (*dict.fromkeys(names), *live, ENSEMBLE)]
