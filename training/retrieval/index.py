"""Choose the Faiss index: inverted lists, searched with the effort that reaches the required recall of exact search.

Indexes find nearest neighbours of equally long vectors well, and largest inner products poorly. So items are centred and get
an extra dimension (Bachrach 2014) that makes both equivalent: on 100,000 items 3,000 distances then reach the recall of 20,000.

Small catalogues are scored whole, which costs less than an index. We do not use HNSW: for 400 results of 100,000 items it took
1.3 ms instead of 0.3 ms at the same recall; it needs twice the memory and minutes to build, and does not run on a GPU.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import faiss
import numpy as np

from serving.contract.errors import ExportError
from serving.stages.search.search import make_index_queries

WANTED_RECALL = 0.98
QUERIES = 512
EFFORTS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # lists searched per query
LISTS_PER_ROOT = 4  # lists, times the root of the number of items
SAMPLES_PER_LIST = 64  # training vectors per list centre


class Sizes(NamedTuple):
    """Numbers of items at which the way to search them changes."""

    exact_up_to: int = 20_000  # 64 floats each are read in a tenth of a millisecond
    compress_from: int = 2_000_000


SIZES = Sizes()


@dataclass(frozen=True)
class Trial:
    """One index at one effort. cost: distances computed per query; recall: share of the exact answers found.

    recall_lower_bound: lower bound of the 95 % interval of the recall on as many other queries
    """

    kind: str
    effort: int
    recall: float
    recall_lower_bound: float
    cost: float


class Choice(NamedTuple):
    """The chosen way to search a catalogue, with the trials that led to it.

    kind: "exact", "lists" or "compressed lists"; index: a Faiss index over positions, None for "exact"
    trials: the efforts that were tried, the chosen one last
    """

    kind: str
    index: Any
    trials: tuple[Trial, ...]

    def report(self) -> dict[str, Any]:
        """Return the choice as a dict for the export's report."""
        return {"kind": self.kind, "wanted_recall": WANTED_RECALL, "trials": [asdict(trial) for trial in self.trials]}


def choose_index(
    item_vectors: np.ndarray,
    positions: np.ndarray,
    query_vectors: np.ndarray,
    k: int,
    effort: int = 0,
    sizes: Sizes = SIZES,
) -> Choice:
    """Choose an index. item_vectors: float32 [n_items, D]; positions: int64 [n] servable items; query_vectors: float32 [Q, D].

    k: results to compare; effort: lists searched per query, 0 = try several. Raises ExportError when the required recall is not
    reached.
    """
    if len(positions) <= sizes.exact_up_to:
        return Choice("exact", None, (Trial("exact", 0, 1.0, 1.0, float(len(positions))),))
    queries = query_vectors[:QUERIES]
    exact, vectors = find_exact_scores(item_vectors[positions], queries, k), make_index_vectors(item_vectors[positions])
    kind = "lists" if len(positions) < sizes.compress_from else "compressed lists"
    index = _fill(_make_empty(kind, len(positions), vectors.shape[1]), vectors, positions)
    trials: list[Trial] = []
    for lists in (effort,) if effort else EFFORTS:
        trials.append(try_index(kind, index, lists, item_vectors, queries, exact))
        if trials[-1].recall >= WANTED_RECALL:
            return Choice(kind, index, tuple(trials))
    raise ExportError(
        f"No index reaches recall {WANTED_RECALL} of exact search over {len(positions):,} items; at effort {lists} it is "
        f"{trials[-1].recall:.3f}. Check the item vectors: most of them may be equal or not finite."
    )


def try_index(kind: str, index: Any, effort: int, item_vectors: np.ndarray, queries: np.ndarray, exact: np.ndarray) -> Trial:
    """Measure the index at an effort, which stays set in it.

    effort: lists searched per query; item_vectors: float32 [n_items, D]; queries: float32 [Q, D]
    exact: float32 [Q, k], what `find_exact_scores` returns for these queries
    """
    index.nprobe = min(effort, index.nlist)
    statistics = faiss.cvar.indexIVF_stats  # type: ignore[attr-defined]  # which Faiss's stubs lack
    statistics.reset()
    positions = index.search(make_index_queries(queries), exact.shape[1])[1]
    cost = index.nlist + statistics.ndis / len(queries)
    shares = measure_recalls(compute_true_scores(item_vectors, queries, positions), exact)
    error = shares.std() * (2 / len(shares)) ** 0.5  # of the difference between two such samples
    return Trial(kind, effort, float(shares.mean()), float(shares.mean() - 1.96 * error), cost)


def extract_inverted_file(index: faiss.Index) -> faiss.IndexIVF:
    """Return the index with its own type, so that its effort (`nprobe`) can be read and set. It must be an inverted file."""
    inverted = faiss.downcast_index(index)
    assert isinstance(inverted, faiss.IndexIVF)
    return inverted


def find_exact_scores(vectors: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    """Return each query's largest inner products, float32 [Q, min(k, n)], descending.

    vectors: float32 [n, D]; queries: float32 [Q, D]
    """
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors)
    return flat.search(queries, min(k, len(vectors)))[0]


def make_index_vectors(vectors: np.ndarray) -> np.ndarray:
    """Return unit vectors [n, D + 1] of float32 [n, D], whose distance to `make_index_queries` orders by falling inner product.

    Subtracting the mean changes all scores of a user alike; the extra dimension makes all vectors equally long.
    """
    centred = vectors - vectors.mean(axis=0)
    squares = np.square(centred).sum(axis=1)
    longest = max(squares.max(), np.finfo(np.float32).tiny)
    extra = np.sqrt(longest - squares)
    return (np.concatenate([centred, extra[:, None]], axis=1) / np.sqrt(longest)).astype(np.float32)


def compute_true_scores(item_vectors: np.ndarray, queries: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the inner products, float32 [Q, k], of queries and the items at `positions`, int64 [Q, k]; -inf for -1."""
    return np.where(positions >= 0, np.einsum("qd,qkd->qk", queries, item_vectors[positions]), -np.inf)


def measure_recalls(scores: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return the share of k results as good as the exact ones, float64 [Q]. Scores [Q, k], `exact` descending; ties count."""
    floor = exact[:, -1:] - 1e-5 * np.abs(exact[:, -1:])
    return (scores >= floor).mean(axis=1)


def _make_empty(kind: str, n_items: int, width: int) -> Any:
    """Return an empty index. Compressed ones store a byte per dimension; the stage computes exact scores anyway."""
    centres, n_lists = faiss.IndexFlatL2(width), int(LISTS_PER_ROOT * n_items**0.5)
    if kind == "lists":
        return faiss.IndexIVFFlat(centres, width, n_lists)
    return faiss.IndexIVFScalarQuantizer(centres, width, n_lists, faiss.ScalarQuantizer.QT_8bit)


def _fill(index: Any, vectors: np.ndarray, positions: np.ndarray) -> Any:
    index.cp.max_points_per_centroid = SAMPLES_PER_LIST
    index.cp.niter = 10
    index.train(vectors)
    index.add_with_ids(vectors, positions)
    return index
