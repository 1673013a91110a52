"""Add a second generation of a repository, next to the pinned one, as the model `challenger`.

    ensemble    challenger/config.pbtxt   the ensemble again, its steps pinned to the challenger's generation
    fused       challenger/<g>            a link to recommend/<g>: the same files, in processes of its own

A request for `challenger` and one for `recommend` share no version of any model, so no answer mixes two generations, and each
generation has its own batches. The steps keep both versions loaded (`write_pins`). The folder exists only while the challenger
is served, because tritonserver loads every folder of a repository.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tritonclient.grpc import model_config_pb2

from repository.owner import copy_owner
from repository.triton.models import read_config, write_config
from serving.contract.tensors import CHALLENGER, ENSEMBLE


def read_challengers(repo: Path) -> tuple[int, ...]:
    """Return the generation of the model `challenger`, as a tuple of one; () without that model."""
    path = repo / CHALLENGER / "config.pbtxt"
    return tuple(read_config(path).version_policy.specific.versions) if path.is_file() else ()


def read_added_ms(repo: Path) -> int:
    """Return when the model `challenger` was added, unix milliseconds; 0 without that model."""
    path = repo / CHALLENGER / "config.pbtxt"
    return path.stat().st_mtime_ns // 1_000_000 if path.is_file() else 0


def write_challenger(repo: Path, generation: int) -> None:
    """Add the model `challenger` by one rename. This loads nothing. The caller must hold the publication lock."""
    config = model_config_pb2.ModelConfig()
    config.CopyFrom(read_config(repo / ENSEMBLE / "config.pbtxt"))
    config.name = CHALLENGER
    config.version_policy.Clear()
    config.version_policy.specific.versions.append(generation)
    for step in config.ensemble_scheduling.step:
        step.model_version = generation
    # In the repository, which may be a mount of its own, but where tritonserver sees no model.
    built = repo / ENSEMBLE / f".{CHALLENGER}"
    shutil.rmtree(built, ignore_errors=True)
    built.mkdir()
    if config.platform == "ensemble":
        (built / str(generation)).mkdir()
    else:
        for name in (str(generation), "warmup"):
            (built / name).symlink_to(Path("..") / ENSEMBLE / name)
    write_config(built / "config.pbtxt", config)
    copy_owner(built, repo)
    remove_challenger(repo)
    built.rename(repo / CHALLENGER)


def remove_challenger(repo: Path) -> None:
    """Remove the model `challenger`. Servers must have unloaded it. The caller must hold the publication lock."""
    shutil.rmtree(repo / CHALLENGER, ignore_errors=True)
