"""Move a Faiss index to the GPU where the installed Faiss supports it; otherwise keep it. Answers are the same."""

from __future__ import annotations

from typing import Any

import faiss

MOST_GPU_RESULTS = 2_048  # k of every GPU index; serving/stages/search/search.py never asks an index for more
SCRATCH_BYTES = 256 << 20  # of one search; the default is 1.5 GiB per process


def clone_to_gpu(index: Any, gpu: int) -> Any:
    """Return a clone in the memory of GPU number `gpu`, or `index` itself without a GPU build of Faiss, a GPU or an index.

    Raises RuntimeError when that GPU does not exist or is full: searching on the CPU unnoticed would only be slow.
    """
    if index is None or not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus():
        return index
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(SCRATCH_BYTES)
    clone: Any = faiss.index_cpu_to_gpu(resources, gpu, index)
    clone.resources = resources  # they must live as long as the index
    return clone
