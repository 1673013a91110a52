"""A Faiss index on the GPU where the installed Faiss has one, and where it has none the index as it is: same answers."""

from __future__ import annotations

from typing import Any

import faiss

MOST_GPU_RESULTS = 2_048  # k of every GPU index; serving/stages/search/search.py never asks an index for more
SCRATCH_BYTES = 256 << 20  # of one search; Faiss would take 1.5 GiB per process


def on_gpu(index: Any, gpu: int) -> Any:
    """-> a clone in the memory of GPU number `gpu`, or `index` itself: no GPU build of Faiss, no GPU, no index.

    Raises RuntimeError when it is not there or has no room: a server that searches on the CPU unasked would only be slow.
    """
    if index is None or not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus():
        return index
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(SCRATCH_BYTES)
    clone: Any = faiss.index_cpu_to_gpu(resources, gpu, index)
    clone.resources = resources  # they must live as long as the index
    return clone
