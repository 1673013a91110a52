"""Before tritonserver starts: what it would trip over in this image, one line each with a remedy. Exit code 1 if anything.

    python3 preflight.py --repository /models

Needs Python 3.8 and nothing else. `make check`, on the machine that exports, looks at much more; this looks at what only the
serving image knows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = {  # module -> what pip installs
    "numpy": "numpy<2",
    "numba": "numba<0.60",
    "onnxruntime": "onnxruntime",
    "faiss": "faiss-gpu-cu12==1.12.0",
}
TABLE_PACKAGES = {"rocksdict": "rocksdict"}  # of our own levels, where no hps backend serves the tables
WORKFLOW_PACKAGES = {"nvtabular": "nvtabular==23.8.0", "merlin.systems": "merlin-systems==23.8.0"}
PLAN = '[merlin] preprocess = "compiled"'
BACKEND = re.compile(r'^\s*backend:\s*"([^"]+)"', re.MULTILINE)


def faults(repository: Path, backends: Path) -> Iterator[str]:
    """Return everything that would keep a model from loading here."""
    configs = sorted(repository.glob("*/config.pbtxt"))
    if not configs:
        yield f"{repository} holds no model. Mount a repository that `make export` wrote there"
        return
    needed = {name for config in configs for name in BACKEND.findall(config.read_text())}
    for name in sorted(needed):
        if not (backends / name).is_dir():
            yield f"this image has no {name} backend in {backends}; use the image the repository was exported for (TRITON=…)"
    if any(repository.glob("*/*/serving")):
        tables = TABLE_PACKAGES if (repository / "rank_rows").is_dir() else {}
        for module, package in {**PACKAGES, **tables}.items():
            if not installed(module):
                yield f"Python here lacks {module}, which the stages need: pip install '{package}', or build deploy/Dockerfile"
    if any(repository.glob("*/*/workflow/workflow.pkl")):
        for module, package in WORKFLOW_PACKAGES.items():
            if not installed(module):
                fact = f"Python here lacks {module}, which NVTabular's workflow needs"
                yield f"{fact}: pip install '{package}', or export with {PLAN}"
    if "hps" in needed:
        yield from hps_faults(repository / "ps.json")


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package it is in
        return False


def hps_faults(path: Path) -> Iterator[str]:
    """Yield what is wrong with ps.json and its tables, all of which the hps backend reads when it is loaded."""
    if not path.is_file():
        yield f"{path} is missing, and the hps backend starts from it. Export the repository again"
        return
    try:
        models = json.loads(path.read_text())["models"]
        folders = [Path(folder) for model in models for folder in model["sparse_files"]]
    except (ValueError, KeyError, TypeError) as error:
        yield f"{path} does not describe tables ({error!r}). Export the repository again"
        return
    for folder in folders:
        if missing := [name for name in ("key", "emb_vector") if not (folder / name).is_file()]:
            where = "where the export was told it would be ([merlin] mount)"
            yield f"{folder} lacks {' and '.join(missing)}. Mount the repository {where}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=Path, required=True, help="the model repository")
    parser.add_argument("--backends", type=Path, default=Path("/opt/tritonserver/backends"), help="tritonserver's backends")
    arguments = parser.parse_args()
    found = list(faults(arguments.repository, arguments.backends))
    for fault in found:
        print(f"preflight: {fault}.", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
