"""Which Faiss index: the cheapest one that finds what exact search finds.

Indexes are good at the nearest of equally long vectors and poor at the largest inner product of vectors of any length, so the
items are moved and lengthened (Bachrach 2014) until both ask the same: on 100,000 items a graph then computes 800 distances
where lists of the raw vectors took 20,000 for the same recall.

Small catalogues are scored whole: one matrix product costs less than walking any index. Larger ones try an inverted file and a
graph (compressed vectors in lists when there are millions), raise the search effort until recall is enough, and take the kind
that computes the fewest distances: a count, not a clock, so that the same vectors always get the same index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import faiss
import numpy as np

from stages.errors import ExportError
from stages.search import index_queries

EXACT_UP_TO = 20_000  # items: 64 floats each are read in a tenth of a millisecond
GRAPH_UP_TO = 500_000  # items: a graph of more takes too long to build on one core
COMPRESS_FROM = 2_000_000  # items
WANTED_RECALL = 0.98
QUERIES = 512
SAMPLES_PER_LIST = 64  # vectors that place each list's centre


@dataclass(frozen=True)
class Trial:
    """One index at one effort. cost: distances computed per query; recall: share of the exact answers found."""

    kind: str
    effort: int
    recall: float
    cost: float


class Choice(NamedTuple):
    """index: a Faiss index over positions, or None where the catalogue is scored whole."""

    kind: str
    index: Any
    trials: tuple[Trial, ...]

    def report(self) -> dict[str, Any]:
        return {"kind": self.kind, "wanted_recall": WANTED_RECALL, "trials": [asdict(trial) for trial in self.trials]}


class _Kind(NamedTuple):
    build: Callable[[np.ndarray, np.ndarray], Any]  # (vectors, positions) -> index
    efforts: tuple[int, ...]
    set_effort: Callable[[Any, int], None]
    cost: Callable[[Any, np.ndarray, int], float]  # distances computed per query


def choose_index(item_vectors: np.ndarray, positions: np.ndarray, query_vectors: np.ndarray, k: int, effort: int = 0) -> Choice:
    """item_vectors: float32 [n_items, D]; positions: int64 [n], those that may be served; query_vectors: float32 [Q, D].

    k: how many answers are compared; effort: the only one to try, 0 = a ladder. Raises ExportError when no kind reaches the
    wanted recall.
    """
    if len(positions) <= EXACT_UP_TO:
        return Choice("exact", None, (Trial("exact", 0, 1.0, float(len(positions))),))
    queries = query_vectors[:QUERIES]
    exact, vectors = exact_scores(item_vectors[positions], queries, k), index_vectors(item_vectors[positions])
    unit_queries = index_queries(queries)
    trials, found = [], []
    for name, kind in _kinds(len(positions)).items():
        index = kind.build(vectors, positions)
        for tried in (effort,) if effort else kind.efforts:
            kind.set_effort(index, tried)
            recall = recall_of(true_scores(item_vectors, queries, index.search(unit_queries, exact.shape[1])[1]), exact)
            trials.append(Trial(name, tried, recall, kind.cost(index, unit_queries, exact.shape[1])))
            if recall >= WANTED_RECALL:
                found.append((trials[-1].cost, name, index))
                break
    if not found:
        best = max(trials, key=lambda trial: trial.recall)
        raise ExportError(
            f"No index reaches recall {WANTED_RECALL} of exact search over {len(positions):,} items; the best, {best.kind} at "
            f"effort {best.effort}, reaches {best.recall:.3f}. Check the item vectors: most of them may be equal or not finite."
        )
    _, name, index = min(found, key=lambda option: option[0])
    return Choice(name, index, tuple(trials))


def exact_scores(vectors: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    """float32 [Q, min(k, n)]: the largest inner products, falling."""
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors)
    return flat.search(queries, min(k, len(vectors)))[0]


def index_vectors(vectors: np.ndarray) -> np.ndarray:
    """float32 [n, D] -> unit vectors [n, D + 1], whose order by distance to an `index_queries` is by falling inner product.

    Taking the mean away takes the same from all scores of a user; the extra dimension makes all equally long.
    """
    centred = vectors - vectors.mean(axis=0)
    squares = np.square(centred).sum(axis=1)
    longest = max(squares.max(), np.finfo(np.float32).tiny)
    extra = np.sqrt(longest - squares)
    return (np.concatenate([centred, extra[:, None]], axis=1) / np.sqrt(longest)).astype(np.float32)


def true_scores(item_vectors: np.ndarray, queries: np.ndarray, found: np.ndarray) -> np.ndarray:
    """int64 [Q, k] positions, -1 = none -> float32 [Q, k] inner products, -inf for none."""
    return np.where(found >= 0, np.einsum("qd,qkd->qk", queries, item_vectors[found]), -np.inf)


def recall_of(found: np.ndarray, exact: np.ndarray) -> float:
    """Share of the k answers as good as the exact ones: scores [Q, k], `exact` falling. An item may stand for its equal."""
    floor = exact[:, -1:] - 1e-5 * np.abs(exact[:, -1:])
    return float((found >= floor).mean())


def _kinds(n_items: int) -> dict[str, _Kind]:
    lists = _Kind(_build_lists, (8, 16, 32, 64, 128, 256, 512), _set_probes, _cost_of_lists)
    if n_items >= COMPRESS_FROM:
        return {"compressed lists": lists._replace(build=_build_compressed)}
    if n_items > GRAPH_UP_TO:
        return {"lists": lists}
    return {"lists": lists, "graph": _Kind(_build_graph, (256, 512, 1024, 2048), _set_breadth, _cost_of_graph)}


def _n_lists(n_items: int) -> int:
    return int(4 * n_items**0.5)


def _build_lists(vectors: np.ndarray, positions: np.ndarray) -> Any:
    n_items, width = vectors.shape
    return _filled(faiss.IndexIVFFlat(faiss.IndexFlatL2(width), width, _n_lists(n_items)), vectors, positions)


def _build_compressed(vectors: np.ndarray, positions: np.ndarray) -> Any:
    """One byte per dimension: the kernel computes the scores it returns from the true vectors anyway."""
    n_items, width = vectors.shape
    index = faiss.IndexIVFScalarQuantizer(faiss.IndexFlatL2(width), width, _n_lists(n_items), faiss.ScalarQuantizer.QT_8bit)
    return _filled(index, vectors, positions)


def _filled(index: Any, vectors: np.ndarray, positions: np.ndarray) -> Any:
    index.cp.max_points_per_centroid = SAMPLES_PER_LIST
    index.cp.niter = 10
    index.train(vectors)
    index.add_with_ids(vectors, positions)
    return index


def _build_graph(vectors: np.ndarray, positions: np.ndarray) -> Any:
    graph = faiss.IndexHNSWFlat(vectors.shape[1], 32)
    graph.hnsw.efConstruction = 80
    index = faiss.IndexIDMap(graph)
    index.add_with_ids(vectors, positions)
    return index


def _set_probes(index: Any, effort: int) -> None:
    index.nprobe = min(effort, index.nlist)


def _set_breadth(index: Any, effort: int) -> None:
    faiss.downcast_index(index.index).hnsw.efSearch = effort


def _cost_of_lists(index: Any, queries: np.ndarray, k: int) -> float:
    faiss.cvar.indexIVF_stats.reset()
    index.search(queries, k)
    return index.nlist + faiss.cvar.indexIVF_stats.ndis / len(queries)


def _cost_of_graph(index: Any, queries: np.ndarray, k: int) -> float:
    faiss.cvar.hnsw_stats.reset()
    index.search(queries, k)
    return faiss.cvar.hnsw_stats.ndis / len(queries)
