"""Third stage: score every candidate of a batch with the DLRM, in a few runs of the network.

history, candidates ─▶ cross features ─┐
rows of the user ─▶ tables ────────────┼─▶ network ─▶ logits (+ blend * standardised retrieval score) ─▶ rank_scores
rows of the candidates ─▶ tables ──────┘
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from serving.contract.artifacts import (
    REMEDY,
    StageInfo,
    check_range,
    make_stage_settings,
    open_checked_array,
    open_network,
    read_stage,
)
from serving.contract.errors import ArtifactError, DependencyError
from serving.contract.measurements import Measurement
from serving.contract.tensors import NARROWED, PAD_ID, PAD_SCORE, Degraded, find_generation_faults, mark_degraded
from serving.live.reader import Reader
from serving.loops.compiled import compiled
from serving.stages.features.best_items import BestItems
from serving.stages.features.drift import DriftWindow
from serving.stages.features.encode import Plan
from serving.stages.features.ids import ItemIndex
from serving.stages.features.item_statistics import ItemStatistics
from serving.stages.features.probes import find_asked
from serving.stages.features.ranking import LIVE, N_FEATURES, SCALE, SCORE, TOGETHER, compute_pair_numbers, scale_strengths
from serving.stages.features.user_state import name_raw_column
from serving.stages.live.catalogue.item_features import FOLDER as PLAN_FOLDER
from serving.stages.live.catalogue.item_features import ItemFeatures
from serving.stages.live.catalogue.items import LiveItems
from serving.stages.live.catalogue.ranked_items import RankedItems
from serving.stages.live.content import Content
from serving.stages.live.counts.sales import LiveSales, load_learned_sales
from serving.stages.live.counts.trends import ItemTrends
from serving.stages.live.users.user_categories import UserCategoryTrends
from serving.tables.leveled import LeveledTables
from serving.tables.measurements import measure_tables
from serving.tables.opening import open_tables
from serving.tables.store.tables import Rows

Arrays = dict[str, np.ndarray]

TABLES_FOLDER, NETWORK = "tables", "rank"
LAYERS_FILE = "layers.npz"  # the network's weights in HugeCTR's order, for other servers of the model
OF_REQUESTS = (  # inputs that depend on the request
    *("user_id", "user_continuous", "history_ids", "history_age_days", "history_interests"),
    *("retrieval_scores", "taken_together", "taken_with_latest"),
)
# (request, candidate) pairs per run: larger runs do not fit the processor's caches (64,000: 1.6 times the time per pair).
PAIRS_AT_ONCE = 4_096
# Live pairs add to a score, see `RankInputs.compute_pair_inputs`. The network reads the strength too, but gives it too little
# weight for new items and for what goes with the latest item: in training, the neighbour lists already contain these pairs.
LIFT, LATEST_LIFT = 3.0, 0.5


@dataclass(frozen=True)
class RankSettings:
    """`settings` of stage.json.

    user_tables, item_tables: a table name per categorical column; blend: weight of the retrieval score that is added to logits
    threads: of the network's runs
    as_of_s: clock of the item statistics, unix seconds; live sales after it are added
    repeats: whether the network learned how often and when users took a candidate; otherwise these features are 0
    """

    user_tables: tuple[str, ...]
    item_tables: tuple[str, ...]
    blend: float
    threads: int = 1
    as_of_s: int = 0
    repeats: bool = False

    def __post_init__(self) -> None:
        for side in ("user_tables", "item_tables"):
            object.__setattr__(self, side, tuple(getattr(self, side)))  # JSON has lists only


@dataclass(frozen=True)
class RankInputs:
    """Computes the network's inputs other than table rows, and the keys of these rows, in every layout of the stage.

    item_rows: int32 [n_items + 1, Si] keys; item_numbers: float32 [n_items + 1, Gi]
    user_categories: declared aggregations of users within categories; a request writes them over the last item numbers
    sales, novelty: sales since the export, and 1 / (1 + sales before it), float32 [n_items + 1]; None without a live store
    """

    settings: RankSettings
    items: ItemIndex
    item_rows: np.ndarray
    item_numbers: np.ndarray
    statistics: ItemStatistics
    user_categories: UserCategoryTrends | None = None
    sales: LiveSales | None = None
    novelty: np.ndarray | None = None

    @classmethod
    def load(cls, folder: Path, settings: RankSettings) -> RankInputs:
        """Load from a version folder. Raises ArtifactError when files disagree."""
        items, statistics = ItemIndex.load(folder / "item_ids.npy"), ItemStatistics.load(folder)
        rows = open_checked_array(folder, "item_rows", "int32", None, None)
        numbers = open_checked_array(folder, "item_numbers", "float32", None, None)
        lengths = {"item_rows": len(rows), "item_numbers": len(numbers), "statistics": statistics.n_items + 1}
        if set(lengths.values()) != {items.n_items + 1}:
            raise ArtifactError(f"{folder}: {items.n_items} items need {items.n_items + 1} rows, found {lengths}. {REMEDY}")
        user_categories = UserCategoryTrends.load(folder, items, numbers.shape[1], settings.as_of_s)
        return cls(settings, items, rows, numbers, statistics, user_categories)

    def find_row_keys(self, inputs: Arrays, candidates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of the user's rows, int64 [B, Fu], and of the candidates' rows, int [B, C, Si].

        candidates: int [B, C] item positions
        """
        return inputs["user_categorical"], self.item_rows.take(candidates, axis=0)

    def compute_pair_inputs(self, inputs: Arrays, candidates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the candidates' numbers, then the cross features, float32 [B, C, Gp], and the lifts, float32 [B, C].

        Lifts are what live pairs add to the scores, 0 without a live store:
            log(1 + LIFT * taken_together / (1 + sales before the export)) + LATEST_LIFT * log(1 + taken_with_latest)

        candidates: int [B, C] item positions
        """
        history = self.items.find_positions(inputs["history_ids"])
        ages, scores = inputs["history_age_days"], inputs["retrieval_scores"]
        # Items that users only looked at lead a live history; where nothing is taken again, no place counts.
        first_taken = inputs["history_interests"][:, 0] if self.settings.repeats else np.array([history.shape[1]])
        numbers = compute_pair_numbers(self.statistics, self.item_numbers, history, ages, candidates, scores, first_taken)
        lifts, n_own = np.zeros(candidates.shape, np.float32), self.item_numbers.shape[1]
        if self.user_categories:
            self.user_categories.write(inputs["user_id"][:, 0], candidates, numbers)
        if np.count_nonzero(inputs["taken_together"]):
            numbers[..., n_own + TOGETHER] = scale_strengths(inputs["taken_together"])
            if self.novelty is not None:
                write_lifts(candidates, inputs["taken_together"], inputs["taken_with_latest"], self.novelty, lifts)
        if self.sales and self.sales.has_live_events:
            numbers[..., n_own + LIVE] = candidates < self.items.n_items
        return numbers, lifts

    def take_retrieval_part(self, pair_numbers: np.ndarray) -> np.ndarray:
        """Return one of the cross features, float32 [B, C]: the standardised retrieval score. pair_numbers: [B, C, Gp]"""
        return pair_numbers[..., self.item_numbers.shape[1] + SCORE]


@dataclass(frozen=True)
class EmbeddingRows:
    """Reads the embedding rows of users and candidates from our own tables. Layouts with NVIDIA's `hps` backend have none."""

    settings: RankSettings
    tables: LeveledTables

    @classmethod
    def load(cls, folder: Path, info: StageInfo, inputs: RankInputs, as_exported: bool = False) -> EmbeddingRows:
        """Open the tables, which processes share unless they are read `as_exported` (`open_tables`).

        Raises ArtifactError when they do not fit the keys of `inputs`.
        """
        settings = inputs.settings
        names = (*settings.user_tables, *settings.item_tables)
        tables = open_tables(folder / TABLES_FOLDER, info.stage, names, as_exported)
        try:
            sizes = len(settings.user_tables), len(settings.item_tables)
            expected = info.axes.user_categorical, inputs.item_rows.shape[1]
            if sizes != expected:
                raise ArtifactError(
                    f"{folder} names {sizes[0]} user and {sizes[1]} item tables; expected {expected[0]} and {expected[1]}, one "
                    f"per categorical column. {REMEDY}"
                )
            n_rows = {table.name: table.rows for table in tables.config.tables}
            for name, column in zip(settings.item_tables, inputs.item_rows.T, strict=True):
                check_range(f"{folder / 'item_rows.npy'}, of table {name},", column, n_rows[name] - 1)
            return cls(settings, tables)
        except BaseException:  # also an interrupt: nobody else could close the tables
            tables.close()
            raise

    def read(self, user_keys: np.ndarray, item_keys: np.ndarray) -> Rows[Arrays]:
        """Return the values {"user_rows": float32 [B, Fu, D], "item_rows": float32 [B, C, Si, D]}.

        user_keys: int64 [B, Fu]; item_keys: int [B, C, Si]. Raises DependencyError when the rows cannot be read.
        """
        result = self.tables.gather((self.settings.user_tables, user_keys), (self.settings.item_tables, item_keys))
        user_rows, item_rows = result.values
        return Rows({"user_rows": user_rows, "item_rows": item_rows}, result.degraded)


@dataclass(frozen=True)
class RankOutputs:
    """Computes the scores from the network's logits, in every layout of the stage."""

    blend: float

    def make_outputs(self, inputs: Arrays, logits: np.ndarray, retrieval_part: np.ndarray) -> Arrays:
        """Return the outputs of `rank` by name. logits, retrieval_part: float32 [B, C]; scores: logits + blend * retrieval_part

        A request with a non-finite score keeps its retrieval scores and is marked as degraded.
        """
        rank_scores, broken = np.empty(logits.shape, np.float32), np.zeros(len(logits), bool)
        candidates = (inputs["candidate_ids"], inputs["retrieval_scores"])
        write_ranked(*candidates, logits, retrieval_part, self.blend, rank_scores, broken)
        return {"rank_scores": rank_scores, "lineage": mark_degraded(inputs["lineage"], broken, Degraded.RANK)}


@dataclass(frozen=True)
class Rank:
    """The whole stage in one process."""

    info: StageInfo
    inputs: RankInputs
    rows: EmbeddingRows
    network: Any
    outputs: RankOutputs
    best_items: BestItems
    content: Content
    item_plan: Plan
    trends: ItemTrends | None = None  # declared aggregations of items
    learned: np.ndarray | None = None
    drift: DriftWindow | None = None  # watches the best item of each request for the whole catalogue
    live_items: LiveItems | None = None

    @classmethod
    def load(cls, folder: Path, as_exported: bool = False) -> Rank:
        """Load the stage from its version folder. Raises ArtifactError when a file is missing or disagrees with the others.

        as_exported: read the embedding rows of the files, without updates (`open_tables`)
        """
        info = read_stage(folder)
        settings = make_stage_settings(folder, info, RankSettings)
        network = open_network(folder, NETWORK, settings.threads)
        inputs = RankInputs.load(folder, settings)
        n_taken = {tensor.name: tensor.shape[-1] for tensor in network.get_inputs()}["pair_numbers"]
        if n_taken != (n_computed := inputs.item_numbers.shape[1] + N_FEATURES):
            raise ArtifactError(
                f"{folder / NETWORK}.onnx takes {n_taken} numbers per candidate; expected the {n_computed} that this version "
                f"computes. {REMEDY}"
            )
        content, learned = Content.load(folder), load_learned_sales(folder)
        plan = Plan.load(folder / PLAN_FOLDER)
        n_per_pair = inputs.user_categories.n_numbers if inputs.user_categories else 0
        item_numbers = inputs.item_numbers[:, : inputs.item_numbers.shape[1] - n_per_pair]
        trends = ItemTrends.load(folder, inputs.items, item_numbers, settings.as_of_s)
        best_items = choose_watched(inputs, plan, trends)
        drift = DriftWindow.load(folder, len(best_items.categorical), "best_items")
        rows = EmbeddingRows.load(folder, info, inputs, as_exported)  # last, because nothing would close it after an error
        outputs = RankOutputs(settings.blend)
        return cls(info, inputs, rows, network, outputs, best_items, content, plan, trends, learned, drift)

    def with_live(self, reader: Reader) -> Rank:
        """Return the stage with a live store attached, whose new and changed items it ranks."""
        inputs = self.inputs
        item_arrays = (inputs.item_rows, inputs.item_numbers)
        features = ItemFeatures(self.item_plan, *item_arrays).compile_loops()
        as_of_s = inputs.settings.as_of_s
        trends = self.trends.compile_loops() if self.trends else None
        user_categories = inputs.user_categories.compile_loops() if inputs.user_categories else None
        arrays = RankedItems(self.content, *item_arrays, inputs.statistics, features, trends, user_categories)
        sales = LiveSales(inputs.items, as_of_s, self.learned)
        # Before `refresh`, which adds live sales to the popularity.
        novelty = np.exp(-inputs.statistics.popularity[:, 0] / np.float32(SCALE))
        some = np.zeros((2, 2), np.float32)
        write_lifts(np.zeros((2, 2), np.int64), some, some, novelty, some.copy())  # compiled here: no request waits for it
        live_items = LiveItems(
            reader, inputs.items, self.content, arrays, sales, trends=trends, user_categories=user_categories
        )
        live_items.catch_up()  # here, so that no request waits for it
        if trends:
            trends.sweep(inputs.items.n_items)
        return replace(self, inputs=replace(inputs, sales=sales, novelty=novelty), live_items=live_items)

    @property
    def tables(self) -> LeveledTables:
        """The tables that rows are read from."""
        return self.rows.tables

    def close(self) -> None:
        """Release the tables, which instances share. The stage cannot be called afterwards."""
        self.tables.close()

    def list_measurements(self) -> Iterator[Measurement]:
        """Yield the counters of the tables' levels, and the drift of the best items since the export."""
        yield from measure_tables(self.tables.read_metrics())
        if self.drift:
            yield from self.drift.list_measurements()

    def find_faults(self, inputs: Arrays) -> dict[int, str]:
        """Return a message for each row of another generation, by row."""
        return find_generation_faults(inputs["lineage"], self.info.generation)

    def __call__(self, inputs: Arrays) -> Arrays:
        """Serve one batch of `rank` (serving/contract/tensors.py)."""
        if self.live_items:
            self.live_items.refresh()
        candidates = self.inputs.items.find_positions(inputs["candidate_ids"])
        try:
            rows = self.rows.read(*self.inputs.find_row_keys(inputs, candidates))
        except DependencyError:  # the tables cannot be read: non-finite logits leave the order of retrieval
            logits = retrieval_part = lifts = np.full(candidates.shape, np.nan, np.float32)
            degraded = True
        else:
            logits, retrieval_part, lifts = self._compute_logits(inputs, candidates, rows.values)
            degraded = rows.degraded
        outputs = self.outputs.make_outputs(inputs, logits, retrieval_part)
        if self.drift:
            user_ids = inputs["user_id"][:, 0]
            asked_rows = find_asked(user_ids, inputs["lineage"][:, 1] & NARROWED > 0)  # no export has such requests
            self.best_items.watch(user_ids[asked_rows], candidates[asked_rows], outputs["rank_scores"][asked_rows], self.drift)
        # After the drift window, which watches the model's own scores.
        np.add(outputs["rank_scores"], lifts, out=outputs["rank_scores"], where=np.isfinite(logits).all(axis=1, keepdims=True))
        if degraded:
            outputs["lineage"] = mark_all_degraded(outputs["lineage"])
        return outputs

    def _compute_logits(
        self, inputs: Arrays, candidates: np.ndarray, rows: Arrays
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (logits, retrieval_part, lifts), float32 [B, C]. candidates: int [B, C] positions.

        rows: of the whole batch, as `EmbeddingRows.read` returns them, so that a slow level is read once. The network runs on
        as many requests at a time as fit the processor's caches.
        """
        tensors = {name: inputs[name] for name in OF_REQUESTS} | rows
        at_once = choose_chunk_size(len(candidates), max(1, PAIRS_AT_ONCE // candidates.shape[1]))
        logits, retrieval_part, lifts = (np.empty(candidates.shape, np.float32) for _ in range(3))
        for first in range(0, len(candidates), at_once):
            part = slice(first, first + at_once)
            chunk = {name: values[part] for name, values in tensors.items()}
            pairs, lifts[part] = self.inputs.compute_pair_inputs(chunk, candidates[part])
            feeds = {"user_numbers": chunk["user_continuous"], "pair_numbers": pairs}
            feeds |= {name: chunk[name] for name in ("user_rows", "item_rows")}
            logits[part] = self.network.run(["logits"], feeds)[0]
            retrieval_part[part] = self.inputs.take_retrieval_part(pairs)
        return logits, retrieval_part, lifts


def mark_all_degraded(lineage: np.ndarray) -> np.ndarray:
    """Return the lineage, int64 [B, 7], with every request marked: the ranker's embedding rows may be defaults or stale."""
    return mark_degraded(lineage, np.ones(len(lineage), bool), Degraded.RANK)


def choose_watched(inputs: RankInputs, plan: Plan | None, trends: ItemTrends | None) -> BestItems:
    """Return the features of items that are watched: all but lists, whose rows are one an item. plan: of the catalogue"""
    columns = plan or Plan((), ())
    categorical, continuous = (tuple(column.name for column in part) for part in (columns.categorical, columns.continuous))
    live = tuple(name_raw_column("aggregate", name) for name in trends.names) if trends else ()
    numbers = inputs.item_numbers[:, : len(continuous) + len(live)]
    return BestItems(inputs.item_rows[:, : len(categorical)], numbers, categorical, (*continuous, *live), live)


def choose_chunk_size(count: int, most: int) -> int:
    """Return the size, 1 … `most`, of chunks of `count` rows, such that the last chunk is not much smaller than the others."""
    n_parts = max(1, -(-count // most))
    return max(1, -(-count // n_parts))


@compiled
def write_lifts(candidates, taken_together, taken_with_latest, novelty, lifts):
    """Write the lifts that `RankInputs.compute_pair_inputs` returns, float32 [B, C], to an array of 0.

    taken_together, taken_with_latest: float32 [B, C]; novelty: float32 [n_items + 1]
    """
    for row in range(len(candidates)):
        for place in range(candidates.shape[1]):
            if taken_together[row, place] > 0.0:
                new = np.log1p(np.float32(LIFT) * taken_together[row, place] * novelty[candidates[row, place]])
                lifts[row, place] = new + np.float32(LATEST_LIFT) * np.log1p(taken_with_latest[row, place])


@compiled
def write_ranked(candidate_ids, retrieval_scores, logits, retrieval_part, blend, rank_scores, broken):
    """Write rank_scores, float32 [B, C], and broken, bool [B], which must be all False: the requests with a non-finite score.

    candidate_ids: int64 [B, C]; retrieval_scores, logits, retrieval_part: float32 [B, C]; blend: float
    """
    for row in range(len(logits)):
        for place in range(logits.shape[1]):
            score = logits[row, place] + np.float32(blend) * retrieval_part[row, place]
            broken[row] |= candidate_ids[row, place] != PAD_ID and not np.isfinite(score)
            rank_scores[row, place] = score
        for place in range(logits.shape[1]):
            if candidate_ids[row, place] == PAD_ID:
                rank_scores[row, place] = PAD_SCORE
            elif broken[row]:
                rank_scores[row, place] = retrieval_scores[row, place]
