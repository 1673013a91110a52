"""Read and write a stage's version folder, and refuse one that is not as published.

<REPO>/<stage>/<generation>/                one model per stage (the ensemble layout)
<REPO>/recommend/<generation>/<stage>/      all stages in one model (the fused layout), above them one copy of the code
    stage.json      stage, generation, axes, context columns, and the stage's own settings
    manifest.json   SHA-256 and size of every file beside it
    *.npy           arrays, opened read-only by mmap so that all instances share one copy
    *.onnx          networks without their embedding tables
    serving/        the code that serves them: a repository does not need the checkout
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from serving.contract.errors import ArtifactError
from serving.contract.tensors import (
    ENSEMBLE,
    LIVE_MODELS,
    Axes,
    ContextColumn,
    ModelSpec,
    make_ensemble_spec,
    make_live_specs,
    make_stage_specs,
)

STAGE_FILE = "stage.json"
MANIFEST_FILE = "manifest.json"
HASH_BLOCK_BYTES = 1 << 20
_PARSING = threading.Lock()  # numpy parses headers by `ast`, which is not thread-safe in CPython 3.11 (gh-106905)
REMEDY = "Export the repository again (`make export`), or move the server back to an older generation."


@dataclass(frozen=True)
class StageInfo:
    """The contents of `stage.json`. `settings` are those of this stage alone.

    In the fused layout `recommend` has a `stage.json` too, without settings.
    """

    stage: str
    generation: int
    axes: Axes
    context: tuple[ContextColumn, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    live_folder: str = ""  # of the live store; "": beside the repository
    shop: str = ""  # name of the data set, whose live store it must be; "": any
    live_redis: str = ""  # "host:port,…": the Redis cluster in which machines share the users' live state
    live_project: str = ""  # name of the project in Feast's keys

    @property
    def spec(self) -> ModelSpec:
        if self.stage in LIVE_MODELS:
            return make_live_specs(tuple(column.tensor for column in self.context))[self.stage]
        specs = make_stage_specs(self.axes, self.context)
        return make_ensemble_spec(specs) if self.stage == ENSEMBLE else specs[self.stage]

    def write(self, folder: Path) -> None:
        (folder / STAGE_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def find_stage_folder(repository: Path, stage: str, generation: int) -> Path:
    """Return the version folder of a stage, in either layout."""
    fused = repository / ENSEMBLE / str(generation) / stage
    return fused if fused.is_dir() else repository / stage / str(generation)


def read_stage(folder: Path) -> StageInfo:
    """Return the StageInfo of a version folder. Raises ArtifactError when `stage.json` is missing or unreadable."""
    raw = read_json(folder, STAGE_FILE)
    try:
        context = tuple(ContextColumn(**column) for column in raw.pop("context"))
        return StageInfo(axes=Axes(**raw.pop("axes")), context=context, **raw)
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{folder / STAGE_FILE} does not describe a stage ({error}). {REMEDY}") from error


def make_stage_settings(folder: Path, info: StageInfo, kind: type) -> Any:
    """Return `info.settings` as the stage's own dataclass `kind`. Raises ArtifactError when a setting is missing or unknown."""
    try:
        return kind(**info.settings)
    except TypeError as error:
        raise ArtifactError(f"{folder / STAGE_FILE} has other settings than {info.stage} expects: {error}. {REMEDY}") from error


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ArtifactError when the file is missing, unreadable or holds anything else."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{folder / name} cannot be read: {error}. {REMEDY}") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{folder / name} holds no JSON object. {REMEDY}")
    return value


def open_array(folder: Path, name: str, mode: Literal["c", "r"] = "c") -> np.ndarray:
    """Return `<name>.npy`, memory-mapped and not writable. Raises ArtifactError when it is missing, truncated or pickled.

    All processes share its pages. Writes through `view_writable` go to a private copy of a page, never to the file.
    mode: "r" refuses such writes. In exchange the file may be larger than the machine's memory
    """
    path = folder / f"{name}.npy"
    try:
        with _PARSING:
            array = np.load(path, mmap_mode=mode, allow_pickle=False)
            array.flags.writeable = False
            return array
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be opened as an array: {error}. {REMEDY}") from error


def view_writable(array: np.ndarray) -> np.ndarray:
    """Return a writable view of an array from `open_array`. Writes change this process's own copy only."""
    view = array.view()
    view.flags.writeable = True
    return view


def view_read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only view, as `open_array` returns, so that loops are compiled for one array type only."""
    view = array.view()
    view.flags.writeable = False
    return view


def open_checked_array(folder: Path, name: str, dtype: str | np.dtype, *shape: int | None) -> np.ndarray:
    """Return `<name>.npy` as `open_array` does, for compiled loops, which check no bounds. None in `shape` is any length.

    The result is a plain array over the mapped pages, without the cost of np.memmap's indexing. Raises ArtifactError when
    dtype, shape or order differ.
    """
    array = open_array(folder, name).view(np.ndarray)
    fits = len(shape) == array.ndim and all(expected in (None, size) for expected, size in zip(shape, array.shape, strict=True))
    if array.dtype != dtype or not fits or not array.flags.c_contiguous:
        order = "" if array.flags.c_contiguous else ", not in C order"
        shape_text = ", ".join("any" if length is None else str(length) for length in shape)
        raise ArtifactError(
            f"{folder / name}.npy holds {array.dtype} {list(array.shape)}{order}; expected {dtype} [{shape_text}]. {REMEDY}"
        )
    return array


def check_range(name: Path | str, values: np.ndarray, last: int, first: int = 0) -> None:
    """Raise ArtifactError when an integer array has a value outside of first … last: compiled loops check no bounds."""
    if values.size and not first <= values.min() <= values.max() <= last:
        raise ArtifactError(f"{name} holds values from {values.min()} to {values.max()}; expected {first} to {last}. {REMEDY}")


def open_network(folder: Path, name: str, threads: int = 1):
    """Return an ONNX Runtime session of `<name>.onnx` on the CPU. Raises ArtifactError when it cannot be loaded."""
    import onnxruntime as ort

    path = folder / f"{name}.onnx"
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises many types, none of them public
        raise ArtifactError(f"{path} cannot be loaded by ONNX Runtime {ort.__version__}: {error}. {REMEDY}") from error


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def list_published_files(folder: Path) -> list[Path]:
    """Return all files that a manifest lists, relative to `folder`: all but the manifest and Python's caches."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if path.parts[-1] != MANIFEST_FILE and "__pycache__" not in path.parts)


def describe_file(path: Path) -> dict[str, Any]:
    """Return the manifest's entry of a file: its SHA-256 and its size."""
    return {"sha256": compute_sha256(path), "bytes": path.stat().st_size}


def write_manifest(folder: Path, **facts: Any) -> dict[str, Any]:
    """Write `manifest.json` for the files in `folder`, with `facts` (generation, reports, …), and return it."""
    files = {str(path): describe_file(folder / path) for path in list_published_files(folder)}
    manifest = {"schema": 1, **facts, "files": files}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def load_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a version folder. Raises ArtifactError when it cannot be read or does not list files by name."""
    manifest = read_json(folder, MANIFEST_FILE)
    get_section(manifest, "files", folder)
    return manifest


def get_section(manifest: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """Return an object of a manifest by name, such as its files. Raises ArtifactError when there is none."""
    section = manifest.get(name)
    if not isinstance(section, dict):
        raise ArtifactError(f"{folder / MANIFEST_FILE} has no object {name!r}. {REMEDY}")
    return section


def verify_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest. Raises ArtifactError unless exactly its files exist, readable, with their sizes and SHA-256."""
    manifest = load_manifest(folder)
    try:
        _compare_files(folder, manifest["files"])
    except OSError as error:
        raise ArtifactError(
            f"{error.filename or folder} cannot be read: {error.strerror}. Expected files that the server's user may read: "
            f"`chmod -R a+rX {folder}`, or look for a damaged disk."
        ) from error
    return manifest


def _compare_files(folder: Path, manifest_files: dict[str, Any]) -> None:
    present = {str(path) for path in list_published_files(folder)}
    if missing := sorted(manifest_files.keys() - present):
        raise ArtifactError(f"{folder} lacks {', '.join(missing)}, which its manifest lists. {REMEDY}")
    if extra := sorted(present - manifest_files.keys()):
        raise ArtifactError(f"{folder} holds {', '.join(extra)}, which its manifest does not list. Remove them. {REMEDY}")
    for name, fact in manifest_files.items():
        path = folder / name
        if fact != describe_file(path):
            raise ArtifactError(f"{path} is not the file that was published (its SHA-256 differs from the manifest). {REMEDY}")
