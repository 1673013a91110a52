"""What tritonserver costs by itself: the models, tensors and settings of a `cpu` repository, with kernels that compute nothing.

    empty_kernels(Path("model_repository"), Path("scratch/empty"))

None of the stages' code runs in it, the adapter's neither. What it takes is the least that this server, its Python backend and
the load generator take on this machine, whatever the stages do.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from repository.config import CONFIG_FILE
from repository.models import read_repository, write_config

EMPTY_MODEL = Path(__file__).with_name("empty_model.py")


def empty_kernels(repo: Path, copy: Path) -> None:
    """Write `copy`: every model of `repo` by name, version, tensors, batching and instances, with nothing to compute."""
    for model in read_repository(repo):
        config = model.config
        config.ClearField("model_warmup")  # of recorded requests, which stay behind
        for version in model.versions_loaded:
            folder = copy / model.name / str(version)
            folder.mkdir(parents=True)
            if not model.is_ensemble:
                shutil.copyfile(EMPTY_MODEL, folder / "model.py")
        write_config(copy / model.name / CONFIG_FILE, config)
