"""Answer requests by the code inside a generation, as a server would; it may be older or newer than the checkout.

This needs its own process, because two versions of `serving` cannot be imported together.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from repository import replay_worker
from serving.contract.artifacts import REMEDY
from serving.contract.errors import ArtifactError
from serving.contract.tensors import ENSEMBLE

Arrays = dict[str, np.ndarray]


def replay(repository: Path, generation: int, inputs: Arrays) -> Arrays:
    """Return the ensemble's outputs by name, each [R, *dims]. inputs: likewise. Raises ArtifactError when it cannot run."""
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        asked, answered = Path(folder, "inputs.npz"), Path(folder, "outputs.npz")
        np.savez(asked, **{name: array.astype(bytes) if array.dtype == object else array for name, array in inputs.items()})
        code = code_folder(repository, generation)
        command = [sys.executable, "-I", replay_worker.__file__, repository.resolve(), generation, code, asked, answered]
        ended = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if ended.returncode == replay_worker.REFUSED:
            raise ArtifactError(ended.stdout.strip())
        if ended.returncode:
            said = (ended.stderr.strip().splitlines() or ["it ended without a message"])[-1]
            raise ArtifactError(f"The code in {code} does not run here: {said}. {REMEDY}")
        with np.load(answered, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}


def code_folder(repository: Path, generation: int) -> Path:
    """Return the folder with the published package `serving` of a generation. Raises ArtifactError when there is none."""
    folder = (repository / ENSEMBLE / str(generation)).resolve()
    if not (folder / "serving" / "pipeline.py").is_file():
        raise ArtifactError(f"{folder} holds no code to serve it with (serving/). {REMEDY}")
    return folder
