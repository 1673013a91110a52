"""Load the searcher of a generation: item vectors, neighbours and the Faiss index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from serving.contract.artifacts import REMEDY, check_range, open_checked_array
from serving.contract.errors import ArtifactError
from serving.stages.search.search import INDEX_FILE, Neighbours, Search

NO_BLAS = 2**31 - 1  # disables Faiss's BLAS path, so that results do not depend on batch size


def load_search(folder: Path, kind: str) -> Search:
    """Load the searcher of a version folder. Raises ArtifactError when a file is missing or broken.

    kind: of the index, "exact" for none
    """
    vectors = open_checked_array(folder, "item_vectors", "float32", None, None)
    available = open_checked_array(folder, "available", "bool", len(vectors))
    index = None
    if kind != "exact":
        path = folder / INDEX_FILE
        faiss.cvar.distance_compute_blas_threshold = NO_BLAS
        try:
            index = faiss.read_index(str(path))
        except RuntimeError as error:
            raise ArtifactError(f"{path} cannot be read by Faiss {faiss.__version__}: {error}. {REMEDY}") from error
        if index.d != vectors.shape[1] + 1 or index.ntotal != available.sum():
            raise ArtifactError(
                f"{path} holds {index.ntotal} vectors of width {index.d}; expected {available.sum()} of width "
                f"{vectors.shape[1] + 1}. {REMEDY}"
            )
        for positions in list_positions(index):
            check_range(path, positions, len(vectors) - 1)
    return Search(vectors, Neighbours.load(folder), available, index)


def list_positions(index: Any) -> Iterator[np.ndarray]:
    """Yield the item positions in a Faiss index, one inverted list at a time: int64 views of its memory."""
    if isinstance(index, faiss.IndexIDMap):
        yield faiss.vector_to_array(index.id_map)
    elif inverted := faiss.try_extract_index_ivf(index):
        lists: Any = inverted
        for number in range(lists.nlist):
            if size := lists.invlists.list_size(number):
                yield faiss.rev_swig_ptr(lists.invlists.get_ids(number), size)
