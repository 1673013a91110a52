"""A Faiss index on the GPU where the installed Faiss has one, and where it has none the index as it is: same answers."""

from __future__ import annotations

from typing import Any

import faiss

MOST_GPU_RESULTS = 2_048  # k of every GPU index; stages/search.py never asks an index for more


def on_gpu(index: Any) -> Any:
    """-> a clone in the memory of GPU 0, or `index` itself: no GPU build of Faiss, no GPU, no index, a kind that GPUs lack."""
    if index is None or not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus():
        return index
    try:
        return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, index)
    except RuntimeError:  # Faiss has graphs on the CPU only
        return index
