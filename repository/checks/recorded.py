"""Recorded requests: requests of real users with their in-process answers, published with the generation.

They warm up the server, rehearse the export, feed perf_analyzer, and prove that served answers equal in-process ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serving.contract.errors import ArtifactError

RECORDED_FILE = "recorded_requests.npz"
SCORE_TOLERANCE = 1e-5

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Recorded:
    """R recorded requests of one row each. inputs, outputs: the ensemble's tensors by name, [R, *dims]."""

    inputs: Arrays
    outputs: Arrays

    def write(self, path: Path) -> None:
        tensors = {f"in_{k}": v for k, v in self.inputs.items()} | {f"out_{k}": v for k, v in self.outputs.items()}
        np.savez_compressed(path, **{k: v.astype(bytes) if v.dtype == np.object_ else v for k, v in tensors.items()})


def read_recorded(path: Path) -> Recorded:
    """Read recorded requests. Raises ArtifactError when the file is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # damage makes numpy, zipfile and zlib raise errors of many types
        raise ArtifactError(f"{path} cannot be read: {error}. Export the repository again (`make export`).") from error
    arrays = {k: v.astype(object) if v.dtype.kind == "S" else v for k, v in arrays.items()}
    inputs = {k.removeprefix("in_"): v for k, v in arrays.items() if k.startswith("in_")}
    return Recorded(inputs, {k.removeprefix("out_"): v for k, v in arrays.items() if k.startswith("out_")})


def compare_answers(answers: Arrays, expected: Arrays, tolerance: float = SCORE_TOLERANCE) -> str:
    """Return "" when ids are equal and scores within `tolerance` (absolute or relative), otherwise the difference."""
    ids_differ = (answers["item_ids"] != expected["item_ids"]).any(axis=1)
    if ids_differ.any():
        row = int(np.argmax(ids_differ))
        return f"{ids_differ.sum()} of {len(ids_differ)} id lists differ, first request {row}"
    if not np.allclose(answers["scores"], expected["scores"], rtol=tolerance, atol=tolerance, equal_nan=False):
        return f"scores differ by up to {np.abs(answers['scores'] - expected['scores']).max():.2g}"
    return ""
