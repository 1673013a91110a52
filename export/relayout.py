"""Publish a cpu repository's models again without training, in another layout and with the current code.

    relayout(Path("model_repository"), Path("fused_repository"), "fused")

Both have the same models, give the same answers (with as many candidates), and can be served side by side.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path

from export.profiles import DEFAULT, find_profile_name
from export.settings import read_exported_settings
from export.steps.rehearsal import make_warmup_tensors, record
from repository.checks.recorded import RECORDED_FILE, read_recorded
from repository.publish import Staging
from repository.registry import REASON
from repository.triton.models import refuse_changed_manifests
from server.control import find_held_generations
from server.start.environment import RUN_DIR
from serving.contract.artifacts import MANIFEST_FILE, STAGE_FILE, find_stage_folder, read_stage, verify_manifest
from serving.contract.errors import ConfigError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, LIVE_MODELS, STAGES, make_stage_specs
from training.retrieval.effort import widen_search

REWRITTEN = ("serving", "model.py", "__pycache__", MANIFEST_FILE, STAGE_FILE, RECORDED_FILE, *STAGES)  # not copied


def relayout(
    source: Path,
    repository: Path,
    layout: str,
    candidates: int | None = None,
    beside: int | None = None,
    keep: int = 1,
    reason: str = "",
) -> int:
    """Publish again and return the generation in `repository`. Raises ConfigError, ArtifactError or ExportError.

    candidates: another C than the export's, for measurements; the search effort is tuned for it
    beside: as in `Staging.publish`; keep: as in `Staging`
    reason: of the publication, for the manifest: the record has it from there if this process is killed before it writes one
    """
    if source.resolve() == repository.resolve():
        raise ConfigError(f"{source} cannot be laid out again into itself. Name another repository.")
    if (profile := find_profile_name(source)) != DEFAULT:
        raise ConfigError(
            f"{source} is of the {profile} profile. Only the {DEFAULT} profile has layouts. Export the data set again."
        )
    generation = read_pinned_generation(source)
    published = source / ENSEMBLE / str(generation)
    facts = verify_manifest(published)
    refuse_changed_manifests(source, generation)
    folders = {name: find_stage_folder(source, name, generation) for name in (*STAGES, *LIVE_MODELS)}
    infos = {name: read_stage(folder) for name, folder in folders.items()}
    first = infos[STAGES[0]]
    axes = replace(first.axes, candidates=candidates or first.axes.candidates)
    specs = make_stage_specs(axes, first.context)
    settings = read_exported_settings(published, facts)
    with Staging(repository, layout, lambda repo: find_held_generations(repo, RUN_DIR), keep) as staging:
        staging.check_contract(specs)
        copy_artifacts(published, staging.folder(ENSEMBLE))
        for name, folder in folders.items():
            verify_manifest(folder)
            copy_artifacts(folder, staging.folder(name))
            replace(infos[name], generation=staging.generation, axes=axes).write(staging.folder(name))
        requests = read_recorded(published / RECORDED_FILE).inputs
        widened = widen_search(staging.folder("preprocess"), staging.folder("retrieve"), requests, fixed=False)
        reports = facts["reports"] | {"index": facts["reports"]["index"] | {"requests": [asdict(trial) for trial in widened]}}
        staging.seal_stages(specs)
        recorded = record(staging, requests)
        kept_facts = {name: facts[name] for name in ("dataset", "log", "settings", "versions") if name in facts}
        staging.seal(kept_facts | {"reports": reports} | ({REASON: reason} if reason else {}))
        return staging.publish(specs, settings.merge_serving(), make_warmup_tensors(staging, recorded), beside)


def copy_artifacts(source: Path, target: Path) -> None:
    """Copy everything that a publication does not write itself."""
    for path in source.iterdir():
        if path.name in REWRITTEN:
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name, copy_function=shutil.copyfile)  # not the mode: it may be read-only
        else:
            shutil.copyfile(path, target / path.name)
