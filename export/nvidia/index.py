"""The index in a form that a GPU can hold: inverted lists stay as they are, any other index becomes a flat one.

A GPU searches a flat index exactly.
"""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np

from serving.contract.artifacts import open_array
from serving.stages.search.search import INDEX_FILE
from training.retrieval.index import make_index_vectors

ON_GPU_AS_IT_IS = ("lists", "compressed lists")


def write_gpu_index(folder: Path, kind: str) -> str:
    """Write the index into a version folder of `retrieve_search`. Return its kind. kind: that of the cpu profile's index.

    The cpu profile scores small catalogues without an index.
    """
    if kind in ON_GPU_AS_IT_IS:
        return kind
    vectors = np.asarray(open_array(folder, "item_vectors"))
    positions = np.flatnonzero(open_array(folder, "available"))
    index = faiss.IndexIDMap(faiss.IndexFlatL2(vectors.shape[1] + 1))
    index.add_with_ids(make_index_vectors(vectors[positions]), positions)
    faiss.write_index(index, str(folder / INDEX_FILE))
    return "flat"


def read_index_bytes(folder: Path) -> int:
    """Return the bytes of the index on disk, about as many as it takes of GPU memory."""
    return (folder / INDEX_FILE).stat().st_size
