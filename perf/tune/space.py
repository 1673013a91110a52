"""What is searched: settings by dotted key, as the export config spells them.

serving.preprocess.queue_delay_us = 300        [serving.preprocess] queue_delay_us = 300
compute.rank_threads = 2                       [compute] rank_threads = 2
server.threads = 2                             no setting of an export: `python -m server start --threads 2`
"""

from __future__ import annotations

from typing import Any

import numpy as np

from export.settings import Settings
from serving.contract.tensors import ENSEMBLE, STAGES

Changes = dict[str, Any]  # dotted key -> value: how a candidate differs from the current settings; {} = not at all
Space = dict[str, tuple[Any, ...]]  # dotted key -> values worth a try

SERVER_THREADS = "server.threads"
QUEUE_DELAYS_US = (0, 100, 300, 1_000)
PREFERRED_BATCHES = ([], [16], [8, 32], [4, 8, 16, 32], [32, 64])
COMBINED = 3  # settings that a combination changes at most
DRAWS_PER_CANDIDATE = 100  # before a space counts as exhausted


def search_space(settings: Settings, layout: str, efforts: tuple[int, ...], cores: int) -> Space:
    """-> the values of each setting other than the current one. efforts: of the index, all of which find enough."""
    first = STAGES[0] if layout == "ensemble" else ENSEMBLE
    many = ("retrieve", "rank") if layout == "ensemble" else (ENSEMBLE,)
    all_models = "serving" if layout == "ensemble" else f"serving.{ENSEMBLE}"
    counts = tuple(range(1, cores + 1))
    space = {
        f"serving.{first}.queue_delay_us": QUEUE_DELAYS_US,
        f"{all_models}.preferred_batch_sizes": PREFERRED_BATCHES,
        **{f"serving.{model}.instances": counts for model in many},
        "compute.rank_threads": counts,
        SERVER_THREADS: counts,
        "compute.index_effort": efforts,
    }
    return {key: others for key, values in space.items() if (others := without(values, current(settings, key)))}


def without(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    return tuple(other for other in values if other != value)


def current(settings: Settings, key: str) -> Any:
    """-> what a setting is now; 1 for the server's threads, which it starts with unless told otherwise."""
    if key == SERVER_THREADS:
        return 1
    section, *path = key.split(".")
    if section == "compute":
        return getattr(settings.compute, path[0])
    model = path[0] if len(path) == 2 else STAGES[0]  # of all stages
    value = getattr(settings.serving_of()[model], path[-1])
    return list(value) if isinstance(value, tuple) else value


def candidates(space: Space, count: int, rng: np.random.Generator) -> list[Changes]:
    """-> at most `count`, all different: every setting changed alone, as many as fit, then combinations drawn at random."""
    alone: list[Changes] = [{key: value} for key, values in space.items() for value in values]
    chosen = [alone[i] for i in sorted(rng.permutation(len(alone))[:count])]
    for _ in range(DRAWS_PER_CANDIDATE * count):
        if len(chosen) == count or len(space) < 2:
            break
        keys = rng.permutation(list(space))[: int(rng.integers(2, COMBINED + 1))]
        drawn = {str(key): space[key][int(rng.integers(len(space[key])))] for key in sorted(keys)}
        if drawn not in chosen:
            chosen.append(drawn)
    return chosen


def with_changes(document: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """-> an export config (parsed TOML) with the changes in place, the server's own settings left out."""
    changed = {name: with_changes(value, {}) if isinstance(value, dict) else value for name, value in document.items()}
    for key, value in changes.items():
        if key == SERVER_THREADS:
            continue
        *sections, name = key.split(".")
        table = changed
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return changed


def in_words(changes: Changes) -> str:
    return ", ".join(f"{key} = {value}" for key, value in changes.items()) or "current settings"
