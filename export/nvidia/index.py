"""The index as a GPU can hold it: lists as they are, anything else as a flat one, which a GPU scans whole and exactly."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np

from serving.contract.artifacts import open_array
from serving.stages.search.search import INDEX_FILE
from training.retrieval.index import index_vectors

ON_GPU_AS_IT_IS = ("lists", "compressed lists")


def write_gpu_index(folder: Path, kind: str) -> str:
    """folder: version folder of `retrieve_search`; kind: the cpu profile's index -> the kind that is written there.

    Catalogues too small for an index are scored whole on a CPU.
    """
    if kind in ON_GPU_AS_IT_IS:
        return kind
    vectors = np.asarray(open_array(folder, "item_vectors"))
    positions = np.flatnonzero(open_array(folder, "available"))
    index = faiss.IndexIDMap(faiss.IndexFlatL2(vectors.shape[1] + 1))
    index.add_with_ids(index_vectors(vectors[positions]), positions)
    faiss.write_index(index, str(folder / INDEX_FILE))
    return "flat"


def index_bytes(folder: Path) -> int:
    """What the index takes in GPU memory: about what it takes on disk."""
    return (folder / INDEX_FILE).stat().st_size
