"""Write a model's model.py with the code that it imports, and its warm-up requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from repository.triton.code import copy_serving_code
from repository.triton.config import encode_warmup, holds_row, name_warmup_file
from serving.contract.tensors import ModelSpec, pack_records

ADAPTER, UPDATER = "serving.stages.adapter.triton", "serving.tables.__main__"
LIVE_ADAPTER, LIVE_STAGES = "serving.stages.live.triton", "serving.stages.live.models"
MODEL_PY = '''"""Written by the exporter: serves the code in this folder."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

{imports}

TritonPythonModel = {function}({stages})
'''


def write_model(folder: Path, stages: Sequence[str]) -> None:
    """Write a model.py that runs these stages, and the code that it imports; with `rank`, also that of the updater."""
    updater = [UPDATER] if "rank" in stages else []
    classes = [(f"serving.stages.{name}", name.capitalize()) for name in stages]
    write_model_py(folder, "make_triton_model", ADAPTER, classes, updater)


def write_live_model(folder: Path, name: str) -> None:
    """Write a model.py that runs `observe` or `upsert`, and the code that it imports."""
    write_model_py(folder, "make_live_model", LIVE_ADAPTER, [(LIVE_STAGES, name.capitalize())])


def write_model_py(
    folder: Path, function: str, adapter: str, stages: Sequence[tuple[str, str]], extra_modules: Sequence[str] = ()
) -> None:
    """Write a model.py that serves stages, (module, class) each, and copy the code that it and `extra_modules` import."""
    copy_serving_code(folder, [adapter, *(module for module, _ in stages), *extra_modules])
    imports = sorted((*stages, (adapter, function)))
    text = MODEL_PY.format(
        imports="\n".join(f"from {module} import {name}" for module, name in imports),
        function=function,
        stages=", ".join(name for _, name in stages),
    )
    (folder / "model.py").write_text(text)
    forbid_caches(folder)


def forbid_caches(folder: Path) -> None:
    """Stop Python's caches by an empty *file* in their place: tritonserver reloads a version whose folder changes."""
    for code in {path.parent for path in folder.rglob("*.py")}:
        (code / "__pycache__").touch()


def write_warmup(folder: Path, spec: ModelSpec, recorded: dict[str, np.ndarray], rows: int) -> None:
    """Write warm-up files once per repository, because tritonserver reloads the served version when they change.

    Missing or truncated files (a full disk, a killed export) are written again; otherwise the model does not load.
    """
    folder.mkdir(exist_ok=True)
    for name, values in pack_records(spec.inputs, recorded).items():
        for row in range(rows):
            path = folder / name_warmup_file(name, row)
            if not path.exists() or not holds_row(path.read_bytes(), values[row]):
                replace_warmup(path, encode_warmup(values[row]))


def replace_warmup(path: Path, content: bytes) -> None:
    """Replace a warm-up file atomically, by a draft beside the model folder, as configs are."""
    draft = path.parents[2] / f".{path.parents[1].name}.warmup"
    draft.unlink(missing_ok=True)  # of a killed export, perhaps of another user
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
