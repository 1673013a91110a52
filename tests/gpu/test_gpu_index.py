"""The retriever's index on a GPU finds what it finds on the CPU. Needs a Faiss built for GPUs, and one."""

import faiss
import numpy as np
import pytest

from serving.stages.parts.gpu_index import MOST_GPU_RESULTS, clone_to_gpu, find_missing_code
from serving.stages.search.search import make_index_queries
from training.retrieval.index import make_index_vectors

FACT = "this Faiss was built without GPU support" if not hasattr(faiss, "StandardGpuResources") else "no GPU was found"
NO_CODE = find_missing_code(0)  # where there is none, the search would end the whole test run
pytestmark = pytest.mark.skipif(
    not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus() or bool(NO_CODE),
    reason=f"{NO_CODE or FACT}: needs faiss-gpu and a GPU",
)


@pytest.mark.parametrize("kind", ["flat", "lists"])
def test_the_same_items_come_first(kind):
    rng = np.random.default_rng(0)
    vectors = make_index_vectors(rng.normal(size=(20_000, 64)).astype(np.float32))
    queries = make_index_queries(rng.normal(size=(32, 64)).astype(np.float32))
    flat = faiss.IndexFlatL2(vectors.shape[1])
    index: faiss.Index = faiss.IndexIDMap(flat)
    if kind == "lists":
        index = faiss.IndexIVFFlat(flat, vectors.shape[1], 64)
        index.train(vectors)
        index.nprobe = 64
    index.add_with_ids(vectors, np.arange(20_000))
    clone = clone_to_gpu(index, 0)
    assert clone is not index
    for count in (256, MOST_GPU_RESULTS):
        expected, got = (each.search(queries, count)[1] for each in (index, clone))
        same = [len(np.intersect1d(a, b)) / count for a, b in zip(expected, got, strict=True)]
        assert min(same) > 0.999  # equal distances may come in another order
