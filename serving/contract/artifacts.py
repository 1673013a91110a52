"""What lies in a stage's version folder, and the refusal to use it when it is not what was published.

<REPO>/<stage>/<generation>/                one model per stage (the ensemble layout)
<REPO>/recommend/<generation>/<stage>/      all stages in one model (the fused layout); the code lies once above them
    stage.json      which stage, generation, axes, context columns, and the stage's own settings
    manifest.json   SHA-256 and size of every file beside it
    *.npy           arrays, opened read-only by mmap so that all instances share one copy
    *.onnx          networks without their embedding tables
    serving/        the code that serves them: a repository needs nothing of the checkout
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from serving.contract.errors import ArtifactError
from serving.contract.tensors import (
    ENSEMBLE,
    LIVE_MODELS,
    Axes,
    ContextColumn,
    ModelSpec,
    ensemble_spec,
    live_specs,
    stage_specs,
)

STAGE_FILE = "stage.json"
MANIFEST_FILE = "manifest.json"
HASH_BLOCK_BYTES = 1 << 20
_PARSING = threading.Lock()  # numpy reads a header by `ast`, which two threads at once break (CPython 3.11, gh-106905)
REMEDY = "Export the repository again (`make export`), or move the server back to an older generation."


@dataclass(frozen=True)
class StageInfo:
    """`stage.json`: what every stage knows of itself. `settings` belongs to the one stage.

    In the fused layout `recommend` has one too, without settings.
    """

    stage: str
    generation: int
    axes: Axes
    context: tuple[ContextColumn, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    live_folder: str = ""  # of the live store; "": beside the repository

    @property
    def spec(self) -> ModelSpec:
        if self.stage in LIVE_MODELS:
            return live_specs(tuple(column.tensor() for column in self.context))[self.stage]
        specs = stage_specs(self.axes, self.context)
        return ensemble_spec(specs) if self.stage == ENSEMBLE else specs[self.stage]

    def write(self, folder: Path) -> None:
        (folder / STAGE_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def stage_folder(repository: Path, stage: str, generation: int) -> Path:
    """-> where a stage of a generation lies, in either layout."""
    fused = repository / ENSEMBLE / str(generation) / stage
    return fused if fused.is_dir() else repository / stage / str(generation)


def read_stage(folder: Path) -> StageInfo:
    """-> the StageInfo of a version folder. Raises ArtifactError when `stage.json` is missing or unreadable."""
    raw = read_json(folder, STAGE_FILE)
    try:
        context = tuple(ContextColumn(**column) for column in raw.pop("context"))
        return StageInfo(axes=Axes(**raw.pop("axes")), context=context, **raw)
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{folder / STAGE_FILE} does not describe a stage ({error}). {REMEDY}") from error


def stage_settings(folder: Path, info: StageInfo, kind: type) -> Any:
    """-> `info.settings` as the stage's own dataclass `kind`. Raises ArtifactError when a setting is missing or unknown."""
    try:
        return kind(**info.settings)
    except TypeError as error:
        raise ArtifactError(f"{folder / STAGE_FILE} lacks a setting of {info.stage}: {error}. {REMEDY}") from error


def read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{folder / name} cannot be read: {error}. {REMEDY}") from error


def open_array(folder: Path, name: str) -> np.ndarray:
    """-> `<name>.npy`, memory-mapped read-only. Raises ArtifactError when it is missing, truncated or pickled."""
    path = folder / f"{name}.npy"
    try:
        with _PARSING:
            return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be opened as an array: {error}. {REMEDY}") from error


def open_form(folder: Path, name: str, dtype: str, *shape: int | None) -> np.ndarray:
    """`open_array` of what compiled loops read: they check no bounds. None in `shape`: of any length.

    -> the mapped pages, without the cost of np.memmap's own indexing. Raises ArtifactError when the array is of another form.
    """
    array = open_array(folder, name).view(np.ndarray)
    fits = len(shape) == array.ndim and all(wanted in (None, found) for wanted, found in zip(shape, array.shape, strict=True))
    if array.dtype != dtype or not fits or not array.flags.c_contiguous:
        order = "" if array.flags.c_contiguous else ", not row by row"
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise ArtifactError(
            f"{folder / name}.npy holds {array.dtype} {list(array.shape)}{order}; expected {dtype} [{wanted}]. {REMEDY}"
        )
    return array


def check_range(where: Path | str, values: np.ndarray, last: int, first: int = 0) -> None:
    """Raises ArtifactError when an integer array holds anything outside of first … last: compiled loops look nowhere else."""
    if values.size and not first <= values.min() <= values.max() <= last:
        raise ArtifactError(f"{where} holds values from {values.min()} to {values.max()}; expected {first} to {last}. {REMEDY}")


def open_network(folder: Path, name: str, threads: int = 1):
    """-> an ONNX Runtime session of `<name>.onnx` on the CPU. Raises ArtifactError."""
    import onnxruntime as ort

    path = folder / f"{name}.onnx"
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises many types, none of them public
        raise ArtifactError(f"{path} cannot be loaded by ONNX Runtime {ort.__version__}: {error}. {REMEDY}") from error


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def published_files(folder: Path) -> list[Path]:
    """All files a manifest speaks of, relative to `folder`: everything but the manifest itself and Python's caches."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if path.parts[-1] != MANIFEST_FILE and "__pycache__" not in path.parts)


def write_manifest(folder: Path, **facts: Any) -> dict[str, Any]:
    """Write `manifest.json` for what lies in `folder` now; `facts` (generation, reports, …) are kept beside the files."""
    files = {
        str(path): {"sha256": sha256_of(folder / path), "bytes": (folder / path).stat().st_size}
        for path in published_files(folder)
    }
    manifest = {"schema": 1, **facts, "files": files}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def verify_manifest(folder: Path) -> dict[str, Any]:
    """-> the manifest, after every file was found present, of the stated size and SHA-256. Raises ArtifactError."""
    manifest = read_json(folder, MANIFEST_FILE)
    stated: dict[str, Any] = manifest.get("files", {})
    present = {str(path) for path in published_files(folder)}
    if missing := sorted(stated.keys() - present):
        raise ArtifactError(f"{folder} lacks {', '.join(missing)}, which its manifest lists. {REMEDY}")
    if extra := sorted(present - stated.keys()):
        raise ArtifactError(f"{folder} holds {', '.join(extra)}, which its manifest does not list. Remove them. {REMEDY}")
    for name, fact in stated.items():
        path = folder / name
        if path.stat().st_size != fact["bytes"] or sha256_of(path) != fact["sha256"]:
            raise ArtifactError(f"{path} is not the file that was published (its SHA-256 differs from the manifest). {REMEDY}")
    return manifest
