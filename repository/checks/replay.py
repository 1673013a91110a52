"""Answer requests with the code inside a generation, as a server would. That code may be older or newer than the checkout's.

It runs in a process of its own, because two versions of `serving` cannot be imported together.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from repository.checks import replay_worker
from serving.contract.artifacts import REMEDY
from serving.contract.errors import ArtifactError
from serving.contract.scratch import hold_scratch
from serving.contract.tensors import ENSEMBLE

Arrays = dict[str, np.ndarray]


def replay(repository: Path, generation: int, inputs: Arrays) -> Arrays:
    """Return the ensemble's outputs for R requests by name, each [R, *dims].

    inputs: the ensemble's inputs by name, each [R, *dims]. Raises ArtifactError when a stage does not load or the code fails.
    """
    with hold_scratch() as scratch:
        inputs_file, outputs_file = scratch / "inputs.npz", scratch / "outputs.npz"
        storable = {name: array.astype(bytes) if array.dtype == object else array for name, array in inputs.items()}
        np.savez(inputs_file, **storable)
        code = find_code_folder(repository, generation)
        command = [sys.executable, "-I", replay_worker.__file__, repository.resolve(), generation, code]
        command += [inputs_file, outputs_file]
        worker = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if worker.returncode == replay_worker.REFUSED:
            raise ArtifactError(worker.stdout.strip())
        if worker.returncode:
            last_line = (worker.stderr.strip().splitlines() or ["it ended without a message"])[-1]
            raise ArtifactError(f"The code in {code} does not run here: {last_line}. {REMEDY}")
        with np.load(outputs_file, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}


def find_code_folder(repository: Path, generation: int) -> Path:
    """Return the folder that contains a generation's published package `serving`. Raises ArtifactError when there is none."""
    folder = (repository / ENSEMBLE / str(generation)).resolve()
    if not (folder / "serving" / "pipeline.py").is_file():
        raise ArtifactError(f"{folder} lacks serving/, the code that answers for this generation. {REMEDY}")
    return folder
