"""Check, before tritonserver starts, that this image can serve the repository. Print a line with a remedy per fault.

    python3 preflight.py --repository /models

The exit code is 1 if there is a fault. Needs Python 3.8 and no packages. `make check`, on the exporting machine, checks much
more; this checks what depends on the serving image.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PACKAGES = {  # module -> what pip installs
    "numpy": "numpy<2",
    "numba": "numba<0.60",
    "onnxruntime": "onnxruntime",
    "faiss": "faiss-gpu-cu12==1.12.0",
    "lmdb": "lmdb",
}
TABLE_PACKAGES = {"rocksdict": "rocksdict"}  # needed where our own levels serve the tables, and not the hps backend
LIVE_PACKAGES = {"redis": "redis", "mmh3": "mmh3", "google.protobuf": "protobuf>=4.22"}  # where users are in Redis
WORKFLOW_PACKAGES = {"nvtabular": "nvtabular==23.8.0", "merlin.systems": "merlin-systems==23.8.0"}
COMPILED_PREPROCESS = '[merlin] preprocess = "compiled"'  # the export setting that needs no NVTabular
HPS_MAJORS = (7, 8, 9)  # compute capabilities that HPS in merlin-hugectr:24.06 is compiled for: 7.0, 7.5, 8.0, 9.0, without PTX
COMPUTE_CAPABILITY_MAJOR = 75  # of CUdevice_attribute
PINNED = re.compile(r"\bversion_policy\s*:?\s*\{\s*specific\s*:?\s*\{\s*versions:\s*\[?\s*(\d+)")
BACKEND = re.compile(r'^\s*backend:\s*"([^"]+)"', re.MULTILINE)


def find_faults(repository: Path, backends: Path) -> Iterator[str]:
    """Yield everything that would keep a model from loading here. backends: the folder of tritonserver's backends"""
    configs = sorted(repository.glob("*/config.pbtxt"))
    if not configs:
        yield f"{repository} holds no model. Mount a repository that `make export` wrote there"
        return
    needed = {name for config in configs for name in BACKEND.findall(config.read_text())}
    for name in sorted(needed):
        if not (backends / name).is_dir():
            yield f"this image has no {name} backend in {backends}; use the one that the repository was exported for (TRITON=…)"
    if any(repository.glob("*/*/serving")):
        tables = TABLE_PACKAGES if (repository / "rank_rows").is_dir() else {}
        live = LIVE_PACKAGES if shares_live_state(repository) else {}
        for module, package in {**PACKAGES, **tables, **live}.items():
            if not is_installed(module):
                yield f"Python here lacks {module}, which the stages need: pip install '{package}', or build deploy/Dockerfile"
    if any(repository.glob("*/*/workflow/workflow.pkl")):
        for module, package in WORKFLOW_PACKAGES.items():
            if not is_installed(module):
                fact = f"Python here lacks {module}, which NVTabular's workflow needs"
                yield f"{fact}: pip install '{package}', or export with {COMPILED_PREPROCESS}"
    if "hps" in needed:
        yield from find_hps_faults(repository / "ps.json")
    yield from find_changed_manifests(repository)


def find_changed_manifests(repository: Path) -> Iterator[str]:
    """Yield the manifests that are not the published ones. `server start` checks the same (refuse_changed_manifests).

    Stages compare their files with their manifests. If somebody changed both, only this check finds out.
    """
    config = repository / "recommend" / "config.pbtxt"
    for generation in PINNED.findall(config.read_text()) if config.is_file() else []:
        ensemble = repository / "recommend" / generation
        manifest = ensemble / "manifest.json"
        try:
            digests = json.loads(manifest.read_text()).get("stages", {}).items() if manifest.is_file() else ()
        except (OSError, ValueError, AttributeError) as error:
            yield f"{manifest} cannot be read ({error!r}). Export the repository again, or pin an older generation"
            continue
        for name, digest in digests:
            folder = ensemble / name if (ensemble / name).is_dir() else repository / name / generation
            path = folder / "manifest.json"
            if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                fact = f"{path} is not the manifest that generation {generation} was published with, so files may have changed"
                yield f"{fact} as well. Export the repository again, or pin an older generation"


def shares_live_state(repository: Path) -> bool:
    """Return whether a stage reads users from Redis. An unreadable stage.json is a fault that its model will report."""
    for path in repository.glob("*/*/stage.json"):
        with suppress(ValueError, AttributeError):
            if json.loads(path.read_text()).get("live_redis"):
                return True
    return False


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # raised when the parent package is missing
        return False


def find_hps_faults(path: Path) -> Iterator[str]:
    """Yield the faults of ps.json and its tables: the hps backend reads all of them when it loads."""
    if not path.is_file():
        yield f"{path} is missing, and the hps backend starts from it. Export the repository again"
        return
    try:
        models = json.loads(path.read_text())["models"]
        folders = [Path(folder) for model in models for folder in model["sparse_files"]]
        gpus = sorted({gpu for model in models for gpu in model["deployed_device_list"]})
    except (ValueError, KeyError, TypeError) as error:
        yield f"{path} does not describe tables ({error!r}). Export the repository again"
        return
    for folder in folders:
        if missing := [name for name in ("key", "emb_vector") if not (folder / name).is_file()]:
            lacking = " and ".join(missing)
            yield f"{folder} lacks {lacking}. Mount the repository at the path that the export was given ([merlin] mount)"
    majors = list_gpu_majors()
    for gpu in gpus:
        if gpu >= len(majors):
            fact = f"{path} keeps rows on GPU {gpu}, and the driver shows {len(majors)} GPUs here"
            yield f"{fact}. Start the container with --gpus all, or export with another [merlin] gpu or TRITON=modern"
        elif majors[gpu] not in HPS_MAJORS:
            fact = f"GPU {gpu} has the compute capability {majors[gpu]}.x, and this hps backend has code for 7.x to 9.x"
            yield f"{fact}. Serve from another GPU, or export with TRITON=modern"


def list_gpu_majors() -> list[int]:
    """Return the major compute capability of each GPU that the driver shows, an empty list without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, major = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    majors = []
    for number in range(count.value):
        cuda.cuDeviceGet(ctypes.byref(device), number)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), COMPUTE_CAPABILITY_MAJOR, device)
        majors.append(major.value)
    return majors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=Path, required=True, help="the model repository")
    parser.add_argument("--backends", type=Path, default=Path("/opt/tritonserver/backends"), help="tritonserver's backends")
    arguments = parser.parse_args()
    faults = list(find_faults(arguments.repository, arguments.backends))
    for fault in faults:
        print(f"preflight: {fault}.", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
