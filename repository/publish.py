"""Publish a generation: build it beside the repository, verify it, rename it in, and replace the ensemble's config last.

    with Staging(repository) as staging:
        ... write artifacts into staging.folder("rank") and StageInfo with staging.generation ...
        staging.seal_stages(specs)          # code, model.py, manifests: the stages in staging.root load now
        ... rehearse with Pipeline.load(staging.root, staging.generation) ...
        staging.seal(facts)
        staging.publish(specs, serving, warmup)

Until `recommend/config.pbtxt` is replaced (one rename), the repository serves the previous generation; a restart at any moment
finds a valid repository. The generation is on the disk before it is renamed in, and its folders before any config names them,
so that this holds after a power cut, too. A crash leaves unreferenced version folders; the next publication takes a higher
number and removes them. `python -m server activate` moves a running server to the new generation.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from repository.applied_rules import compile_current_rules, drop_former_rules
from repository.challenger import read_challengers
from repository.generations import SEALED, list_published_generations, write_pins
from repository.lock import hold_publication_lock
from repository.registry import find_holders, read_acts, record_late
from repository.same_file_system import can_rename, refuse_other_file_system
from repository.triton.code import copy_serving_code, refuse_changed_sources
from repository.triton.config import (
    CONFIG_FILE,
    Serving,
    check_edges,
    compare_tensors,
    list_models,
    make_ensemble_config,
    make_stage_config,
    read_layout,
)
from repository.triton.model_files import forbid_caches, write_live_model, write_model, write_warmup
from repository.triton.models import read_config, refuse_unservable_path, write_config
from serving.contract.artifacts import MANIFEST_FILE, compute_sha256, read_stage, verify_manifest, write_manifest
from serving.contract.durable import make_file_system_durable
from serving.contract.errors import ArtifactError, ConfigError, DependencyError, ExportError
from serving.contract.generations import read_pinned_generation
from serving.contract.locks import is_locked
from serving.contract.rounds import find_staging, find_staging_lock
from serving.contract.tensors import (
    ENSEMBLE,
    LIVE_MODELS,
    STAGES,
    Axes,
    ModelSpec,
    make_ensemble_spec,
    make_live_specs,
    make_stage_specs,
)

log = logging.getLogger(__name__)

PIPELINE = "serving.pipeline"
MOST_NAMED = 5  # foreign folders in a message
# Messages of the system, of copytree and of NumPy about a full disk; those of NumPy have no errno
FULL = re.compile(rf"\[Errno ({errno.ENOSPC}|{errno.EDQUOT}|{errno.EFBIG})\]|\A\d+ requested and \d+ written\Z")

FindHeld = Callable[[Path], set[int] | None]


def hold_nothing(repository: Path) -> set[int]:
    """Return the empty set: no server uses the repository."""
    return set()


class Staging:
    """A folder like the repository, on the same file system, in which the next generation is built; one at a time.

    It is beside the repository, or in `recommend` of one that is a mount of its own: tritonserver sees no model there.

    layout: "ensemble", or "fused" (only `recommend`, with the stages in subfolders of its version)
    find_held: returns the generations that running servers have loaded, which a publication keeps, besides those that models
        hold by a lock; None when a server does not answer
    keep: how many of the newest generations stay, besides those in use
    """

    def __init__(self, repository: Path, layout: str = "ensemble", find_held: FindHeld = hold_nothing, keep: int = 1) -> None:
        self.repository = repository.resolve()  # links are followed, because staging must be on the target's file system
        self.layout, self.models = layout, list_models(layout)
        self.root, self._inside = find_staging(self.repository)
        self.generation = 0
        self._find_held, self._keep = find_held, keep
        self._lock: IO[str] | None = None

    def __enter__(self) -> Staging:
        refuse_changed_sources()
        try:
            self.repository.mkdir(parents=True, exist_ok=True)
            self._lock = find_staging_lock(self.repository).open("w")
        except OSError as error:
            raise ExportError(
                f"No repository can be written at {self.repository}: {error.strerror or error}. "
                "Choose another REPO: a folder, or a new name, below a folder that can be written."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise ExportError(f"Another export is writing {self.repository}. Wait for it, or choose another REPO.") from error
        try:
            self._prepare()
        except BaseException:  # __exit__ does not run when __enter__ fails
            self._clear()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if isinstance(error, OSError):
                refuse_full_disk(error, self.root)
        finally:
            self._clear()

    def _prepare(self) -> None:
        refuse_foreign_folders(self.repository)
        shutil.rmtree(self.root, ignore_errors=True)
        self.generation = 1 + max(list_versions(self.repository), default=0)
        self.root.mkdir()
        shutil.rmtree(self._inside, ignore_errors=True)  # of an interrupted publication
        if self._inside.parent.is_dir() and not can_rename(self.root, self.repository):
            self.root.rmdir()
            self.root = self._inside
            self.root.mkdir()
        refuse_other_file_system(self.root, self.repository)
        for name in (ENSEMBLE, *STAGES, *LIVE_MODELS):
            self.folder(name).mkdir(parents=True)

    def _clear(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def folder(self, model: str) -> Path:
        """Return the staging folder of a stage, or of `recommend`, in this generation."""
        if self.layout == "fused" and model in STAGES:
            return self.folder(ENSEMBLE) / model
        return self.root / model / str(self.generation)

    def check_contract(self, specs: dict[str, ModelSpec]) -> int | None:
        """Return the pinned generation, None without one.

        Raises ExportError when its contract differs from `specs`. Raises ConfigError when nothing can be served from its path,
        or when the record cannot be read, because the record says what must be kept.
        """
        refuse_unservable_path(self.repository)
        read_acts(self.repository)
        previous = find_served_generation(self.repository)
        if previous:
            refuse_other_contract(self.repository, self.layout, specs)
        return previous

    def seal_stages(self, specs: dict[str, ModelSpec]) -> None:
        """Add the serving code and write the stages' manifests. From here on their files do not change, and they can be loaded.

        Raises ExportError when edges between stages do not match.
        """
        check_edges(specs)
        if self.layout == "fused":
            replace(read_stage(self.folder(STAGES[0])), stage=ENSEMBLE, settings={}).write(self.folder(ENSEMBLE))
            write_model(self.folder(ENSEMBLE), STAGES)
        for name in STAGES:
            if self.layout == "ensemble":
                write_model(self.folder(name), (name,))
            write_manifest(self.folder(name), stage=name, generation=self.generation)
        for name in LIVE_MODELS:
            write_live_model(self.folder(name), name)
            write_manifest(self.folder(name), stage=name, generation=self.generation)

    def seal(self, facts: dict[str, Any]) -> None:
        """Write the generation's manifest: `facts`, its stages, and the moment.

        The code of all stages is copied beside it, so that `make check` can answer recorded requests as this generation does.
        """
        copy_serving_code(self.folder(ENSEMBLE), (PIPELINE,))
        forbid_caches(self.folder(ENSEMBLE))
        digests = {name: compute_sha256(self.folder(name) / MANIFEST_FILE) for name in (*STAGES, *LIVE_MODELS)}
        seal_facts = {"generation": self.generation, SEALED: round(time.time(), 3), "stages": digests}
        write_manifest(self.folder(ENSEMBLE), **seal_facts, **facts)

    def publish(
        self,
        specs: dict[str, ModelSpec],
        serving: dict[str, Serving],
        warmup: dict[str, np.ndarray],
        beside: int | None = None,
    ) -> int:
        """Move the sealed generation into the repository and point `recommend` at it.

        serving: settings by model name; warmup: tensors of some recorded rows by tensor name, [rows, *dims]
        beside: generation that must be the pinned one, and stays it; None: the new one is pinned

        Returns the generation. Raises ArtifactError when files changed after they were sealed, ServerError when another
        publication does not end, ExportError where another generation than `beside` is pinned, and what `check_contract`
        raises.
        """
        for name in self.models:
            verify_manifest(self.folder(name))
        with hold_publication_lock(self.repository):
            previous = self.check_contract(specs) or self.generation
            if beside is not None and previous != beside:
                raise ExportError(
                    f"Generation {previous} is pinned in {self.repository} now, and the new one was made beside {beside}. "
                    "Nothing was published. Make it again, so that it is compared with the present one."
                )
            drop_former_rules(self.repository)
            self._place(specs, serving, warmup, previous, self.generation if beside is None else beside)
            if derive_live_specs(specs):
                compile_current_rules(self.repository)
            held_generations = self._find_held(self.repository)
            if held_generations is not None:  # a server that does not answer may hold any: the next publication prunes
                newest = list_published_generations(self.repository)[-self._keep :]
                tagged = find_holders(read_acts(self.repository)).values()
                used_generations = {*held_generations, *find_loaded(self.repository), *read_challengers(self.repository)}
                kept_generations = {self.generation, previous, *newest, *tagged, *used_generations}
                try:
                    record_late(self.repository, list_versions(self.repository) - kept_generations)  # lost with their files
                except DependencyError as error:  # the publication stands, and the next one prunes
                    log.warning("older generations stay: %s", error)
                else:
                    prune(self.repository, kept_generations)
        return self.generation

    def _place(
        self,
        specs: dict[str, ModelSpec],
        serving: dict[str, Serving],
        warmup: dict[str, np.ndarray],
        previous: int,
        pinned: int,
    ) -> None:
        rows = len(warmup["user_id"])
        served_generations = {previous, self.generation, *read_challengers(self.repository)}
        warmed = specs if self.layout == "ensemble" else {ENSEMBLE: make_ensemble_spec(specs)}
        make_file_system_durable(self.root)
        for name in self.models:
            place_version(self.folder(name), self.repository / name)
        for name, spec in warmed.items():
            write_warmup(self.repository / name / "warmup", spec, warmup, rows)
        make_file_system_durable(self.repository)
        for name, spec in derive_live_specs(specs).items():  # no warm-up, because its requests would be events
            config = make_stage_config(spec, serving[name], sorted({previous, self.generation}), warmup_rows=0)
            write_config(self.repository / name / CONFIG_FILE, config)
        for name, spec in warmed.items():
            config = make_stage_config(spec, serving[name], sorted({pinned} if name == ENSEMBLE else served_generations), rows)
            write_config(self.repository / name / CONFIG_FILE, config)
        if self.layout == "ensemble":
            write_config(self.repository / ENSEMBLE / CONFIG_FILE, make_ensemble_config(specs, pinned, serving[ENSEMBLE]))
        write_pins(self.repository, pinned)


def refuse_foreign_folders(repository: Path) -> None:
    """Raise ExportError where a folder in `repository` is no model: tritonserver starts only if it can load every folder.

    A killed publication may have left a folder of ours without its config.
    """
    ours = {ENSEMBLE, *STAGES, *LIVE_MODELS}
    folders = (path for path in repository.iterdir() if path.is_dir() and path.name not in ours)
    if names := sorted(path.name for path in folders if not (path / CONFIG_FILE).is_file()):
        named = ", ".join(names[:MOST_NAMED]) + " …" * (len(names) > MOST_NAMED)
        raise ExportError(
            f"{repository} holds folders that are no models: {named}. tritonserver would load them as models, and not start. "
            "Move them out, or choose another REPO: an empty folder or a new name."
        )


def refuse_full_disk(error: OSError, staging: Path) -> None:
    """Raise ExportError if an error is about a full disk: such errors often name no file. staging: not yet cleared"""
    reason = str(error)
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):  # copytree's (source, target, reason), one per file
        reason = error.args[0][0][2]
    if not FULL.search(reason):
        return
    parent, temporary = staging.parent, Path(tempfile.gettempdir())
    own_mib, temporary_mib = (f"{shutil.disk_usage(folder).free >> 20:,} MiB" for folder in (parent, temporary))
    raise ExportError(
        f"The new generation cannot be written: {reason}. Its files are written into {parent}, where {own_mib} are free, and "
        f"temporary ones into {temporary}, where {temporary_mib} are free without them; expected enough for both. Servers keep "
        "the generation that they serve. Free space, or choose another REPO or TMPDIR, and run the command again."
    ) from error


def derive_live_specs(stages: dict[str, ModelSpec]) -> dict[str, ModelSpec]:
    """Return the specs of the live models. They have the context columns of the first stage."""
    fixed = {tensor.name for tensor in make_stage_specs(Axes())[STAGES[0]].inputs}
    return make_live_specs(tuple(tensor for tensor in stages[STAGES[0]].inputs if tensor.name not in fixed))


def find_served_generation(repository: Path) -> int | None:
    """Return the pinned generation. None when it is incomplete: a publication must be able to repair a damaged repository."""
    try:
        generation = read_pinned_generation(repository)
        return generation if generation in list_published_generations(repository) else None
    except (ConfigError, ArtifactError):
        return None


def list_versions(repository: Path) -> set[int]:
    """Return all version numbers in the repository, of any model."""
    folders = (path for name in (*STAGES, *LIVE_MODELS, ENSEMBLE) for path in (repository / name).glob("*"))
    return {int(path.name) for path in folders if path.is_dir() and path.name.isdecimal()}


def find_loaded(repository: Path) -> set[int]:
    """Return the generations that models hold by a lock (serving/stages/adapter), whoever has started their server here."""
    manifests = (path for path in repository.glob(f"*/*/{MANIFEST_FILE}") if path.parent.name.isdecimal())
    return {int(path.parent.name) for path in manifests if is_locked(path)}


def refuse_other_contract(repository: Path, layout: str, specs: dict[str, ModelSpec]) -> None:
    """Raise ExportError when layout or tensors differ: all versions of a model share one config.pbtxt."""
    present_layout = read_layout(read_config(repository / ENSEMBLE / CONFIG_FILE))
    if present_layout != layout:
        raise ExportError(
            f"{repository} is laid out as {present_layout!r}, this generation as {layout!r}. "
            "Generations of one repository share their layout: export into another REPO, or remove this one first."
        )
    specs = {**specs, **derive_live_specs(specs), ENSEMBLE: make_ensemble_spec(specs)}
    for name in reversed(list_models(layout)):  # `recommend` first, because it is the model that callers know
        if differing := compare_tensors(read_config(repository / name / CONFIG_FILE), specs[name]):
            raise ExportError(
                f"{repository} serves another contract: {differing} of {name} differ. "
                "Generations of one repository share their tensors: export into another REPO, with its live store "
                "(docs/operating.md, Upgrade), or remove this one first."
            )


def place_version(staged: Path, model_folder: Path) -> None:
    """Rename a staged version folder into the folder of its model."""
    model_folder.mkdir(exist_ok=True)
    staged.rename(model_folder / staged.name)


def make_read_only(repository: Path, generation: int) -> None:
    """Make the files of a generation read-only, because servers have them mapped: nothing may change by accident."""
    for folder in repository.glob(f"*/{generation}"):
        for path in folder.rglob("*"):
            if path.is_file():
                path.chmod(path.stat().st_mode & ~0o222)


def prune(repository: Path, kept_generations: set[int]) -> None:
    """Remove all generations but those in `kept_generations`, and the remains of failed publications."""
    removed = list_versions(repository) - kept_generations
    for name in (*STAGES, *LIVE_MODELS, ENSEMBLE):
        for generation in removed:
            shutil.rmtree(repository / name / str(generation), ignore_errors=True)
