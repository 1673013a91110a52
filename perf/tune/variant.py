"""Copy a repository with other serving settings, by hard links to the published files, because copies would take longer.

Changed files are written anew: every config.pbtxt and, for [compute], also stage.json, the index, and their manifests.
The challenger of a running experiment is left out, so that every variant loads one generation.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import faiss

from export.settings import ComputeSettings, Settings
from repository.generations import write_pins
from repository.triton.config import CONFIG_FILE, Serving, list_models, set_instances
from repository.triton.models import read_config, write_config
from serving.contract.artifacts import (
    MANIFEST_FILE,
    STAGE_FILE,
    compute_sha256,
    find_stage_folder,
    read_json,
    read_stage,
    write_manifest,
)
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import CHALLENGER, ENSEMBLE, LIVE_MODELS
from serving.stages.search.search import INDEX_FILE
from training.retrieval.index import extract_inverted_file


def make_variant(source: Path, target: Path, layout: str, settings: Settings) -> None:
    """Write `target`, which must not exist: the generation that `source` answers with, under `settings`."""
    shutil.copytree(source, target, copy_function=_link, ignore=shutil.ignore_patterns(CHALLENGER))
    generation, serving = read_pinned_generation(target), settings.merge_serving()
    write_pins(target, generation)
    for model in list_models(layout):
        path = target / model / CONFIG_FILE
        config = read_config(path)
        if config.platform != "ensemble":
            _apply_serving(config, serving[model])
        write_config(path, config)
    change_rank_threads(target, generation, settings.compute)
    change_effort(target, generation, settings.compute)


def _apply_serving(config, serving: Serving) -> None:
    set_instances(config, serving.instances)
    batching = config.dynamic_batching
    del batching.preferred_batch_size[:]
    batching.preferred_batch_size.extend(size for size in serving.preferred_batch_sizes if size <= config.max_batch_size)
    batching.max_queue_delay_microseconds = serving.queue_delay_us


def change_rank_threads(repository: Path, generation: int, compute: ComputeSettings) -> None:
    folder = find_stage_folder(repository, "rank", generation)
    info = read_stage(folder)
    if info.settings["threads"] == compute.rank_threads:
        return
    (folder / STAGE_FILE).unlink()  # a hard link: writing to it would change the published file
    replace(info, settings={**info.settings, "threads": compute.rank_threads}).write(folder)
    seal_again(repository, generation, "rank")


def change_effort(repository: Path, generation: int, compute: ComputeSettings) -> None:
    """Set the index's effort. Do nothing for 0, or for a catalogue without an index."""
    folder = find_stage_folder(repository, "retrieve", generation)
    path = folder / INDEX_FILE
    if not compute.index_effort or not path.exists():
        return
    index = faiss.read_index(str(path))
    extract_inverted_file(index).nprobe = compute.index_effort
    path.unlink()
    faiss.write_index(index, str(path))
    seal_again(repository, generation, "retrieve")


def seal_again(repository: Path, generation: int, stage: str) -> None:
    """Write new manifests for a changed stage folder and its generation."""
    stage_folder, ensemble_folder = find_stage_folder(repository, stage, generation), repository / ENSEMBLE / str(generation)
    _write_manifest(stage_folder, {})
    stages = read_json(ensemble_folder, MANIFEST_FILE)["stages"]
    _write_manifest(ensemble_folder, {"stages": stages | {stage: compute_sha256(stage_folder / MANIFEST_FILE)}})


def remove_live_models(repository: Path, generation: int) -> None:
    """Remove `observe` and `upsert`, so that the generation is served without live state."""
    for name in LIVE_MODELS:
        shutil.rmtree(repository / name)
    whole = repository / ENSEMBLE / str(generation)
    stages = read_json(whole, MANIFEST_FILE)["stages"]
    _write_manifest(whole, {"stages": {name: digest for name, digest in stages.items() if name not in LIVE_MODELS}})


def _write_manifest(folder: Path, changed: dict[str, object]) -> None:
    facts = {name: fact for name, fact in read_json(folder, MANIFEST_FILE).items() if name not in ("schema", "files")}
    (folder / MANIFEST_FILE).unlink()
    write_manifest(folder, **(facts | changed))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copy2(source, target)
