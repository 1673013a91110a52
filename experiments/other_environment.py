"""Run a script in a Python environment of its own, for packages that cannot live beside the project's pins."""

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


def run_elsewhere(
    name: str, packages: tuple[str, ...], script: Path, arrays: dict[str, np.ndarray], alone: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Run `script ARRAYS.npz` with `packages` installed and return the JSON that it prints.

    The environment is made once, at ENVIRONMENTS/name. Raises RecommenderError when installing or running fails.
    alone: packages that are installed in any case, whatever versions of Python and of other packages they demand
    """
    python = ENVIRONMENTS / name / "bin" / "python"
    stamp = ENVIRONMENTS / name / "packages.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(packages + alone):
        _run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENTS / name)], INSTALL_TIMEOUT_S)
        _run([str(python), "-m", "pip", "install", "--quiet", *packages], INSTALL_TIMEOUT_S)
        if alone:
            forced = ("--quiet", "--no-deps", "--ignore-requires-python", *alone)
            _run([str(python), "-m", "pip", "install", *forced], INSTALL_TIMEOUT_S)
        stamp.write_text("\n".join(packages + alone))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arrays.npz"
        np.savez(path, **arrays)
        return json.loads(_run([str(python), str(script), str(path)], SCRIPT_TIMEOUT_S))


def _run(command: list[str], timeout_s: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RecommenderError(f"`{' '.join(command[:5])} …` failed with exit code {done.returncode}:\n{done.stderr[-2_000:]}")
    return done.stdout
