"""Run a script in a Python environment of its own, for packages that conflict with the project's pins."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from serving.contract.errors import RecommenderError

ENVIRONMENTS = Path(".run/environments")
INSTALL_TIMEOUT_S, SCRIPT_TIMEOUT_S = 1_800, 600


def run_in_environment(
    name: str,
    packages: tuple[str, ...],
    script: Path,
    arrays: dict[str, np.ndarray],
    without_dependencies: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run `script ARRAYS.npz` with `packages` installed and return the JSON that it prints.

    Raises RecommenderError when installing or running fails. without_dependencies: as of `make_environment`
    """
    python = make_environment(name, packages, without_dependencies)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arrays.npz"
        np.savez(path, **arrays)
        return json.loads(_run([str(python), str(script), str(path)], SCRIPT_TIMEOUT_S))


def make_environment(name: str, packages: tuple[str, ...], without_dependencies: tuple[str, ...] = ()) -> Path:
    """Return the interpreter of an environment with `packages`, made once, at ENVIRONMENTS/name.

    Raises RecommenderError when installing fails.
    without_dependencies: packages installed without their dependencies, even if they require another version of Python
    """
    python = ENVIRONMENTS / name / "bin" / "python"
    stamp = ENVIRONMENTS / name / "packages.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(packages + without_dependencies):
        _run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENTS / name)], INSTALL_TIMEOUT_S)
        _run([str(python), "-m", "pip", "install", "--quiet", *packages], INSTALL_TIMEOUT_S)
        if without_dependencies:
            forced = ("--quiet", "--no-deps", "--ignore-requires-python", *without_dependencies)
            _run([str(python), "-m", "pip", "install", *forced], INSTALL_TIMEOUT_S)
        stamp.write_text("\n".join(packages + without_dependencies))
    return python


def _run(command: list[str], timeout_s: float) -> str:
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if run.returncode:
        raise RecommenderError(f"`{' '.join(command[:5])} …` failed with exit code {run.returncode}:\n{run.stderr[-2_000:]}")
    return run.stdout
