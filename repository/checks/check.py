"""Check a repository without starting anything: find what will fail, and say how to fix it.

Each check yields findings; an error means that tritonserver would refuse the repository or answer wrongly from it.
`export/check.py` runs the checks of a repository's profile.
"""

from __future__ import annotations

import contextlib
import stat
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import model_config_pb2 as pb

from repository.checks.finding import Finding, count_errors, make_finding
from repository.checks.recorded import RECORDED_FILE, compare_answers, read_recorded
from repository.checks.replay import replay
from repository.registry import MANIFEST_SHA256, RECORD_FILE, find_recorded, read_acts
from repository.tables import has_update_source
from repository.triton.config import CONFIG_FILE, list_models, read_layout, read_record_fields
from repository.triton.config_rules import find_ensemble_faults, find_warmup_faults
from repository.triton.models import hash_manifest, read_config, refuse_changed_manifests, refuse_unservable_path
from serving.contract import tensors
from serving.contract.artifacts import (
    MANIFEST_FILE,
    REMEDY,
    find_stage_folder,
    get_section,
    read_json,
    read_stage,
    verify_manifest,
)
from serving.contract.errors import RecommenderError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, LIVE_MODELS, STAGES, ModelSpec

SERVING_LIBRARIES = ("numpy", "onnxruntime", "faiss-cpu")


Check = Callable[[Path], Iterator[Finding]]


def run_checks(repository: Path, checks: Sequence[Check], decisive: Container[Check]) -> list[Finding]:
    """Return all findings, errors first. Stop after a decisive check if there was any error so far."""
    findings: list[Finding] = []
    for check in checks:
        findings += run_check(check, repository)
        if count_errors(findings) and check in decisive:
            break
    return sorted(findings, key=lambda finding: finding.level)


def run_check(check: Check, repository: Path) -> list[Finding]:
    """Return the findings of one check; an unreadable artifact is a finding too."""
    findings: list[Finding] = []
    try:
        findings += check(repository)  # keeps those before an error
    except RecommenderError as error:
        findings.append(make_finding("error", str(repository), str(error)))
    return findings


def list_models_in(repository: Path) -> tuple[str, ...]:
    """Return the names of a repository's models, by the layout that the config of `recommend` has (default: ensemble)."""
    path = repository / ENSEMBLE / CONFIG_FILE
    return list_models(read_layout(read_config(path)) if path.is_file() else "ensemble")


def check_layout(repository: Path) -> Iterator[Finding]:
    """Check that folders and configs exist, and that each config belongs to its folder."""
    if not repository.is_dir():
        remedy = f"Create the repository: make export REPO={repository}"
        yield Finding("error", str(repository), "There is no such folder", remedy)
        return
    models = list_models_in(repository)
    if not any((repository / name / CONFIG_FILE).is_file() for name in models):
        yield Finding("error", str(repository), "It holds no model", f"Fill it: make export REPO={repository}")
        return
    yield from check_names(repository, models)
    yield from check_other_folders(repository, models)


def check_names(repository: Path, models: Iterable[str]) -> Iterator[Finding]:
    """Check that each model has a config that names it."""
    for name in models:
        path, remedy = repository / name / CONFIG_FILE, "Export the repository again."
        if not path.is_file():
            yield Finding("error", f"{name}/{CONFIG_FILE}", "The file is missing", remedy)
        elif (config := read_config(path)).name != name:
            yield Finding("error", f"{name}/{CONFIG_FILE}", f"It names the model {config.name!r}, expected {name!r}", remedy)


def check_other_folders(repository: Path, models: Sequence[str]) -> Iterator[Finding]:
    """Check folders that are not models of ours: tritonserver loads every folder as a model, and starts only if all load."""
    entries = sorted(repository.iterdir()) if (repository / ENSEMBLE).is_dir() else []
    remedy = "Move it out of the repository."
    for path in entries:
        if not path.is_dir() or path.name in models:
            continue
        if not (path / CONFIG_FILE).is_file():
            yield Finding("error", path.name, "It is not a model, but tritonserver would load it as one", remedy)
        elif (name := read_config(path / CONFIG_FILE).name) not in ("", path.name):
            fact = f"Its config names the model {name!r}, and tritonserver expects the folder's name"
            yield Finding("error", path.name, fact, remedy)


def check_path(repository: Path) -> Iterator[Finding]:
    """Check the repository's path itself: models do not start from some paths."""
    refuse_unservable_path(repository)
    yield from ()


def check_writers(repository: Path) -> Iterator[Finding]:
    """Check that other users may write nothing: what is in a repository runs with the rights of its server."""
    writable = []
    for path in (repository, *repository.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # an export may remove a generation meanwhile
            mode = path.lstat().st_mode
            if mode & stat.S_IWOTH and not stat.S_ISLNK(mode):
                writable.append(path)
    if writable:
        more = f" and {len(writable) - 1:,} more" if len(writable) > 1 else ""
        fact = f"Every user of the machine may write {writable[0]}{more}, and so run code as the server"
        remedy = f"Look for files that are not yours, and run `chmod -R o-w {repository}`."
        yield Finding("warning", str(repository), fact, remedy)


def check_edges(repository: Path) -> Iterator[Finding]:
    """Check that both ends of each ensemble edge agree in type, dims and fields of records, and that steps take its batches."""
    configs = {name: read_config(repository / name / CONFIG_FILE) for name in list_models_in(repository)}
    for fact in find_ensemble_faults(configs[ENSEMBLE], configs, read_pinned_generation(repository)):
        yield Finding("error", f"{ENSEMBLE}/{CONFIG_FILE}", fact, "Export the repository again.")


def check_versions(repository: Path) -> Iterator[Finding]:
    """Check that every model has the pinned generation, and that its files are as published."""
    generation = read_pinned_generation(repository)
    for folder, manifest in _verify_files(repository, generation):
        if manifest.get("generation") != generation:
            fact = f"Folder {generation} holds generation {manifest.get('generation')}"
            yield Finding("error", str(folder.relative_to(repository)), fact, "Folders were moved by hand; export again.")


def check_other_generations(repository: Path) -> Iterator[Finding]:
    """Check the files of the generations that are kept for `activate`, as they were published."""
    pinned = read_pinned_generation(repository)
    kept_generations = {int(folder.name) for folder in (repository / ENSEMBLE).iterdir() if folder.name.isdecimal()}
    for generation in sorted(kept_generations - {pinned}):
        try:
            list(_verify_files(repository, generation))
        except RecommenderError as error:
            reason = str(error).removesuffix(REMEDY).rstrip(" .")
            fact = f"Generation {generation} cannot be served in place of {pinned}: {reason}"
            remedy = "Move no server there. The next export removes it, unless a server holds it."
            yield Finding("warning", f"{ENSEMBLE}/{generation}", fact, remedy)


def _verify_files(repository: Path, generation: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the version folders of a generation, each with its manifest. Raises ArtifactError unless all is as published."""
    ensemble_folder = repository / ENSEMBLE / str(generation)
    for folder in (ensemble_folder, *(find_stage_folder(repository, name, generation) for name in (*STAGES, *LIVE_MODELS))):
        yield folder, verify_manifest(folder)
    get_section(read_json(ensemble_folder, MANIFEST_FILE), "stages", ensemble_folder)
    refuse_changed_manifests(repository, generation)


def check_record(repository: Path) -> Iterator[Finding]:
    """Compare each generation's own manifest, whose digest is in no other file of the generation, with the record."""
    remedy = "Put it back as it was published, or export the repository again: servers trust the digests in it."
    try:
        recorded_acts = find_recorded(read_acts(repository))
    except (RecommenderError, OSError) as error:  # no server needs it
        yield make_finding("warning", RECORD_FILE, str(error))
        return
    for generation, act in recorded_acts.items():
        recorded_digest, digest = act.facts.get(MANIFEST_SHA256), hash_manifest(repository, generation)
        if recorded_digest and digest and digest != recorded_digest:
            fact = "It is not the manifest whose SHA-256 was recorded when the generation was published"
            yield Finding("warning", f"{ENSEMBLE}/{generation}/{MANIFEST_FILE}", fact, remedy)


def check_libraries(repository: Path) -> Iterator[Finding]:
    """Compare installed library versions with those of the export."""
    generation = read_pinned_generation(repository)
    exported_with = read_json(repository / ENSEMBLE / str(generation), MANIFEST_FILE).get("versions", {})
    for library in SERVING_LIBRARIES:
        try:
            installed = metadata.version(library)
        except metadata.PackageNotFoundError:
            yield Finding("error", library, "The library is not installed here", "Run `make setup`.")
            continue
        if installed != exported_with.get(library, installed):
            fact = f"Version {installed} is installed, the export used {exported_with[library]}"
            yield Finding("warning", library, fact, "Install the pinned version (`make setup`), or export again.")
    if int(np.__version__.split(".")[0]) >= 2:
        fact = f"Version {np.__version__} makes this server's Python stub return empty tensors"
        yield Finding("error", "numpy", fact, "Install numpy 1.26.4 (`make setup`).")
    if sys.version_info[:2] not in {(3, minor) for minor in range(8, 14)}:
        yield Finding("error", "python", f"No Triton stub for {sys.version.split()[0]}", "Use CPython 3.8 to 3.13.")


def check_warmup(repository: Path) -> Iterator[Finding]:
    """Check warm-up requests and their files; with a fault in them their models do not load."""
    for name in list_models_in(repository):
        for fact in find_warmup_faults(read_config(repository / name / CONFIG_FILE), repository / name / "warmup"):
            yield Finding("error", f"{name}/{CONFIG_FILE}", fact, "Export again.")


def check_stages(repository: Path) -> Iterator[Finding]:
    """Check that each stage's settings belong to the generation of its folder, and that its records match config.pbtxt."""
    generation = read_pinned_generation(repository)
    for name in (*STAGES, *LIVE_MODELS):
        folder = find_stage_folder(repository, name, generation)
        info = read_stage(folder)
        if info.generation != generation:
            yield Finding("error", f"{name}/{generation}", "stage.json states another generation", "Export again.")
        if (repository / name).is_dir() and shares_contract(folder):
            config = read_config(repository / name / CONFIG_FILE)
            for fact in find_record_faults(config, info.spec):
                yield Finding("error", f"{name}/{CONFIG_FILE}", fact, "Export again.")


def shares_contract(folder: Path) -> bool:
    """Return whether a stage was published with the contract of this checkout. By another one it may have other records."""
    path = folder / "serving" / "contract" / "tensors.py"
    return path.is_file() and path.read_bytes() == Path(tensors.__file__).read_bytes()


def find_record_faults(config: pb.ModelConfig, spec: ModelSpec) -> Iterator[str]:
    """Yield the records whose fields differ between config.pbtxt and the stage. The stage would then refuse to load."""
    tensor_names = {tensor.name for tensor in (*config.input, *config.output)}
    for record in spec.records:
        if record.name in tensor_names:
            config_fields = read_record_fields(config, record.name) or "nothing"
            if config_fields != record.stated_fields:
                yield f"The record {record.name} has {config_fields} in config.pbtxt, and {record.stated_fields} by stage.json"


def check_answers(repository: Path) -> Iterator[Finding]:
    """Check that every stage loads on this machine, and that recorded requests get their recorded answers.

    The generation's own code answers, as in a server, because the checkout's code may behave differently.
    """
    generation = read_pinned_generation(repository)
    recorded = read_recorded(repository / ENSEMBLE / str(generation) / RECORDED_FILE)
    answers = replay(repository, generation, recorded.inputs)
    if difference := compare_answers(answers, recorded.outputs):
        remedy = "Compare the library versions in the manifest with this machine's; export again here."
        level, fact = "error", f"Recorded requests are answered differently: {difference}"
        if has_update_source(repository, generation):
            level, fact = "warning", f"{fact}; rows that were updated since the export may cause that"
        yield Finding(level, f"{ENSEMBLE}/{generation}", fact, remedy)


def check_batching(repository: Path) -> Iterator[Finding]:
    """Check batch sizes that tritonserver refuses, and settings that delay its batcher (docs/serving.md)."""
    for name in list_models_in(repository):
        config = read_config(repository / name / CONFIG_FILE)
        batching, where = config.dynamic_batching, f"{name}/{CONFIG_FILE}"
        if config.max_batch_size < max(batching.preferred_batch_size, default=0):
            fact = f"max_batch_size is {config.max_batch_size}, below a preferred size"
            yield Finding("error", where, fact, "Set it at least as large ([serving] of the export's settings).")
        if batching.priority_levels or batching.HasField("default_queue_policy"):
            fact = "Priorities or a queue policy: some requests wait up to 500 ms for the batcher of tritonserver 2.51"
            yield Finding("warning", f"{name}/{CONFIG_FILE}", fact, "Leave both out ([serving] of the export's settings).")


def check_response_cache(repository: Path) -> Iterator[Finding]:
    """Check that the response cache is off where answers change: its entries never expire."""
    models = list(list_models_in(repository))
    cached = [f"{name}/{CONFIG_FILE}" for name in models if read_config(repository / name / CONFIG_FILE).response_cache.enable]
    cache_hint = "The client's cache (docs/caching.md) keeps answers for a while."
    if has_update_source(repository, read_pinned_generation(repository)):
        fact = "The response cache keeps answers, and the ranker's rows are updated while they are served"
        remedy = f"Leave response_cache out ([serving]), or the brokers ([tables]). {cache_hint}"
        yield from (Finding("error", where, fact, remedy) for where in cached)
    elif set(LIVE_MODELS) & set(models):
        fact = "The response cache keeps answers, also those from before an event or a change of a rule"
        remedy = f"Leave response_cache out ([serving]) unless nobody posts events. {cache_hint}"
        yield from (Finding("warning", where, fact, remedy) for where in cached)
