"""Build the features of users and items for the models and the preprocess stage, from the training log.

train ─▶ EventLog (point-in-time states) ─▶ derive_raw_columns ─▶ NVTabular fit ─▶ Plan ─▶ replayed row by row ─▶ Features
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from serving.contract.errors import ExportError
from serving.contract.tensors import MISSING_INT, ContextColumn
from serving.stages.features.encode import Plan, Ragged
from serving.stages.features.ids import ItemIndex
from serving.stages.features.ranking import list_feature_names
from serving.stages.features.user_state import NO_CATEGORY, compute_history_age_days, derive_raw_columns
from serving.stages.features.user_store import SeenItems
from training.dataset.dataset import Dataset
from training.features.aggregates import LogAggregates, name_all, read_aggregations
from training.features.cluster import Cluster
from training.features.columns import RawColumn, make_frame, make_raw_values
from training.features.compile import compile_workflow
from training.features.items import Codes, ItemArrays, collect_item_columns, compute_item_statistics, encode_items
from training.features.parity import replay
from training.features.point_in_time import EventLog, Moments
from training.features.rows import MOST_IN_MEMORY, TrainingRows, hold_rows
from training.features.schema import FeatureSchema, FeatureSettings, Side, name_kind
from training.features.store import collect_seen_items, make_profiles, write_store
from training.features.workflow import fit_workflow, save_for_serving

DEFAULTS = FeatureSettings()
CHUNK_ROWS = 32_768  # rows encoded at once, which bounds [rows, H] arrays to a few hundred MB
REPLAY_POOL_ROWS = 2_000  # training examples of which some are replayed


class Examples(NamedTuple):
    """A model's inputs for N users at N moments.

    user_categorical   int64 [N, Fu] rows of the tables named by `Features.user_rows`, user_id first
    user_continuous    float32 [N, Gu]
    history_positions  int32 [N, H] item positions, newest first, padded with n_items
    history_age_days   float32 [N, H], 0 where padded
    """

    user_categorical: np.ndarray
    user_continuous: np.ndarray
    history_positions: np.ndarray
    history_age_days: np.ndarray


@dataclass(frozen=True)
class Features:
    """Fitted on one training log. Item arrays have n_items + 1 rows, the last one the padding row."""

    settings: FeatureSettings
    schema: FeatureSchema
    context: tuple[ContextColumn, ...]
    user_plan: Plan
    item_plan: Plan
    items: ItemIndex
    item_arrays: ItemArrays
    categories: Codes
    providers: Codes
    log: EventLog
    seen: SeenItems
    parity: dict[str, dict]

    @property
    def as_of_s(self) -> int:
        """The store's clock in unix seconds."""
        return self.log.as_of_s

    @property
    def user_rows(self) -> dict[str, int]:
        """The rows of each embedding table of users, in the order of `user_categorical`."""
        return self.user_plan.rows

    @property
    def item_rows(self) -> dict[str, int]:
        """The rows of each embedding table of items: the columns of `item_arrays.categorical`, then the lists."""
        return self.item_plan.rows

    @property
    def ranker_numbers(self) -> tuple[str, ...]:
        """The names of the ranker's numbers in its order; they begin with `user.`, `item.` or `pair.`"""
        sides = {"user": self.user_plan, "item": self.item_plan}
        plans = (f"{side}.{column.name}" for side, plan in sides.items() for column in plan.continuous)
        of_items, of_pairs = (name_all(plans) for plans in (self.log.aggregates.item_plans, self.log.aggregates.pair_plans))
        aggregates = (*(f"item.aggregate_{name}" for name in of_items), *(f"pair.aggregate_{name}" for name in of_pairs))
        return (*plans, *aggregates, *(f"pair.{name}" for name in list_feature_names()))

    @cached_property
    def item_aggregates(self) -> np.ndarray:
        """float32 [n_items + 1, A]: aggregations of the items at the end of the log, as they are served without live state."""
        return self.log.aggregates.compute_for_catalogue(self.as_of_s)

    def encode_items_before(self, items: pd.DataFrame, events: pd.DataFrame) -> ItemArrays:
        """Encode the catalogue with the sales of `events` alone, seen from the last of them. items: frame of the data set"""
        sold = compute_item_statistics(events, self.items, int(events["timestamp"].max()), self.settings)
        return encode_items(self.item_plan, collect_item_columns(items, self.schema.item, sold))

    def encode_users(self, user_ids: np.ndarray, context: Mapping[str, np.ndarray] | None = None) -> Examples:
        """Encode users as the store serves them: after the whole training log, at its clock."""
        return self.encode_moments(self.log.find_moments_at_end(user_ids), np.full(len(user_ids), self.as_of_s), context)

    def encode_moments(self, moments: Moments, clocks: np.ndarray, context: Mapping[str, np.ndarray] | None) -> Examples:
        """Encode users at each moment of `log`. clocks: int64 [N] unix seconds to which ages are counted."""
        context = make_missing_context(self.context, len(clocks)) | dict(context or {})
        n_rows, width = len(clocks), self.settings.history_length
        examples = Examples(
            np.empty((n_rows, len(self.user_plan.categorical)), np.int64),
            np.empty((n_rows, len(self.user_plan.continuous)), np.float32),
            np.empty((n_rows, width), np.int32),
            np.empty((n_rows, width), np.float32),
        )
        for part in _split_rows(n_rows):
            state = self.log.compute_state(moments.slice(part), clocks[part])
            columns = derive_raw_columns(state, {name: values[part] for name, values in context.items()}, clocks[part])
            examples.user_categorical[part], examples.user_continuous[part], _ = self.user_plan(columns)
            examples.history_positions[part] = self.items.find_positions(state.history_ids)
            examples.history_age_days[part] = compute_history_age_days(state, clocks[part])
        return examples

    def save_preprocess(self, folder: Path) -> None:
        """Write the files of `serving/stages/preprocess.py`: user plan, store, and the catalogue's ids and categories.

        The publication writes `stage.json` and the manifest.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.user_plan.save(folder / "plan")
        write_store(folder / "store", self.log, self.seen.user_ids)
        np.save(folder / "item_ids.npy", self.items.ids)
        np.save(folder / "item_category.npy", self.categories.codes)


def build_features(
    dataset: Dataset,
    train: pd.DataFrame,
    settings: FeatureSettings = DEFAULTS,
    seed: int = 0,
    workflow: Path | None = None,
    cluster: Cluster | None = None,
    say: Callable[[str], None] = print,
) -> Features:
    """Fit and compile the features of a data set, and verify the compiled plan.

    train: the training part of `dataset.interactions`; the rest of the log is not used
    seed: selects the rows of the parity replay
    workflow: folder in which to save NVTabular's user workflow too, for servers that run NVTabular itself
    cluster: the Dask cluster that fits NVTabular, with the same result; None: this process
    say: reports how far the training columns of a large log are
    Raises ExportError when there is no positive event, or when a plan disagrees with its workflow; with a cluster also
    what `hold_rows` raises.
    """
    rows = np.flatnonzero(train["positive"].to_numpy())
    if not len(rows):
        raise ExportError(
            "The training log has no positive event, so nothing can be learned. Lower positive_at in dataset.toml."
        )
    schema = FeatureSchema.of(dataset, settings)
    items = ItemIndex(dataset.items["item_id"].to_numpy())
    categories, providers = Codes.of(dataset.items["category"]), Codes.of(dataset.items["provider"])
    log = make_event_log(dataset, train, items, categories, settings)
    rng = np.random.default_rng(seed)

    def derive_user_rows(chosen: np.ndarray) -> dict[str, np.ndarray]:
        return collect_training_columns(log, train, chosen, schema, dataset.context_columns)

    replayed = derive_user_rows(rows[rng.integers(0, len(rows), REPLAY_POOL_ROWS)])
    with hold_rows(len(rows), lambda part: make_frame(derive_user_rows(rows[part])), cluster, say=say) as user_rows:
        user_plan, user_report = _fit_and_prove(schema.user, user_rows, replayed, settings, rng, workflow)
    # Models see items as often as they are sold, so the workflow is fitted on the items of positives.
    catalogue = collect_item_columns(dataset.items, schema.item, compute_item_statistics(train, items, log.as_of_s, settings))
    catalogue_frame, sold = make_frame(catalogue), items.find_positions(train["item_id"].to_numpy()[rows])
    item_side = _drop_empty_lists(schema.item, catalogue, sold)
    most_in_memory = MOST_IN_MEMORY // (1 + _count_list_values(item_side, catalogue, sold) // len(sold))
    with hold_rows(
        len(rows), lambda part: catalogue_frame.iloc[sold[part]].reset_index(drop=True), cluster, most_in_memory, say
    ) as item_rows:
        item_plan, item_report = _fit_and_prove(item_side, item_rows, catalogue, settings, rng)
    return Features(
        settings=settings,
        schema=schema,
        context=dataset.context_columns,
        user_plan=user_plan,
        item_plan=item_plan,
        items=items,
        item_arrays=encode_items(item_plan, catalogue),
        categories=categories,
        providers=providers,
        log=log,
        seen=collect_seen_items(train, log.list_remembered(settings.session_hours)),
        parity={"user": user_report, "item": item_report},
    )


def take_context(events: pd.DataFrame, columns: tuple[ContextColumn, ...]) -> dict[str, np.ndarray]:
    """Return context columns of log rows as the stages read them: int64, object of str or float64 [N], by name."""
    return {column.name: make_raw_values(events[column.name], column.kind) for column in columns}


def make_missing_context(columns: tuple[ContextColumn, ...], n_rows: int) -> dict[str, np.ndarray]:
    """Return the context of requests without context, [N] by name."""
    missing = {"integer": MISSING_INT, "string": None, "continuous": np.nan}
    dtypes = {"integer": np.int64, "string": object, "continuous": np.float64}
    return {column.name: np.full(n_rows, missing[column.kind], dtypes[column.kind]) for column in columns}


def make_event_log(
    dataset: Dataset, train: pd.DataFrame, items: ItemIndex, categories: Codes, settings: FeatureSettings
) -> EventLog:
    users = dataset.description.users
    kinds = {name: name_kind(dataset.users[name]) for name in users.categorical} if users else {}
    kinds |= dict.fromkeys(users.continuous, "continuous") if users else {}
    codes = categories.codes if (categories.codes != NO_CATEGORY).any() else None
    aggregates = LogAggregates.of(dataset, train, read_aggregations(dataset))
    return EventLog(train, items, codes, make_profiles(dataset.users, kinds), settings.history_length, aggregates)


def collect_training_columns(
    log: EventLog,
    train: pd.DataFrame,
    rows: np.ndarray,
    schema: FeatureSchema,
    context: tuple[ContextColumn, ...],
) -> dict[str, np.ndarray]:
    """Return the users' raw columns of all training examples by name, [N]. rows: int64 [N] of `train`.

    Each example sees the log up to its second (exclusive), which hides its own basket.
    """
    side, examples = schema.user, train.iloc[rows]
    moments = log.find_moments_before(examples["user_id"].to_numpy(), examples["timestamp"].to_numpy())
    names = {column.name for column in side.categories} | {column.name for column in side.numbers}
    names |= {column.source for column in side.bins}
    timestamps, context_columns = examples["timestamp"].to_numpy(), take_context(examples, context)
    parts = []
    for part in _split_rows(len(rows)):
        state = log.compute_state(moments.slice(part), timestamps[part])
        derived = derive_raw_columns(state, {name: v[part] for name, v in context_columns.items()}, timestamps[part])
        parts.append({name: derived[name] for name in names})
    return {name: np.concatenate([part[name] for part in parts]) for name in sorted(names)}


def _drop_empty_lists(side: Side, catalogue: Mapping[str, RawColumn], sold: np.ndarray) -> Side:
    """Return the side without lists that hold nothing of any sold item: NVTabular cannot be fitted on them. sold: int64 [N]"""
    filled = {name for name, raw in catalogue.items() if isinstance(raw, Ragged) and np.diff(raw.offsets)[sold].any()}
    return replace(side, lists=tuple(column for column in side.lists if column.name in filled))


def _count_list_values(side: Side, catalogue: Mapping[str, RawColumn], sold: np.ndarray) -> int:
    """Return how many values the lists of all sold items have: NVTabular holds each as a row of its own."""
    lists = [raw for column in side.lists if isinstance(raw := catalogue[column.name], Ragged)]
    return sum(int(np.diff(raw.offsets)[sold].sum()) for raw in lists)


def _fit_and_prove(
    side: Side,
    rows: TrainingRows,
    columns: Mapping[str, RawColumn],
    settings: FeatureSettings,
    rng: np.random.Generator,
    workflow_folder: Path | None = None,
) -> tuple[Plan, dict]:
    """Fit on `rows`, compile, and replay some of `columns`. Return the plan and the parity report.

    workflow_folder: folder in which to save the workflow too
    """
    workflow = fit_workflow(side, rows, settings)
    plan = compile_workflow(workflow)
    report = replay(workflow, plan, columns, rng)
    if workflow_folder:
        save_for_serving(workflow, workflow_folder)
    return plan, report


def _split_rows(n_rows: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK_ROWS) for start in range(0, n_rows, CHUNK_ROWS))
