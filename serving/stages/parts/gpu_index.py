"""Move a Faiss index to the GPU where the installed Faiss supports it; otherwise keep it. Answers are the same."""

from __future__ import annotations

import ctypes
from typing import Any

import faiss

MOST_GPU_RESULTS = 2_048  # k of every GPU index; serving/stages/search/search.py never asks an index for more
SCRATCH_BYTES = 256 << 20  # of one search; the default is 1.5 GiB per process
COMPILED_MAJORS = (7, 8)  # faiss-gpu-cu12 1.12.0 holds code for the compute capabilities 7.0 and 8.0, and no PTX for others
COMPUTE_CAPABILITY_MAJOR = 75  # of CUdevice_attribute


def find_missing_code(gpu: int) -> str:
    """Return why Faiss cannot search on GPU number `gpu`, or "". There its first kernel would end the process.

    Also "" without a GPU build of Faiss, a GPU or a driver that describes it.
    """
    if not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus():
        return ""
    device, major = ctypes.c_int(), ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), gpu):
        return ""
    if cuda.cuDeviceGetAttribute(ctypes.byref(major), COMPUTE_CAPABILITY_MAJOR, device) or major.value in COMPILED_MAJORS:
        return ""
    return f"GPU {gpu} has the compute capability {major.value}.x, and Faiss holds code for 7.x and 8.x only"


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
