"""Write the aggregations at the end of the log, from which the rank stage goes on.

Those of items and categories are for trends.py in serving/stages/live/counts, those of users within categories for
user_categories.py in serving/stages/live/users.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from serving.live.aggregations import join_keys
from serving.live.aggregations.plan import NO_KEY
from serving.live.aggregations.spec import CROSS, ITEM
from serving.stages.live.counts.trends import FOLDER, TRENDS_FILE
from serving.stages.live.users import user_categories
from training.dataset.dataset import Dataset
from training.features.aggregates import LogAggregates


def write_trends(folder: Path, dataset: Dataset, aggregates: LogAggregates, n_free: int) -> None:
    """Write the records into folders of the rank stage's folder; none where the ranker learns from none.

    n_free: rows kept free for new items
    """
    if aggregates.item_plans:
        _write_folder(folder / FOLDER, TRENDS_FILE, aggregates.item_plans, _write_records, dataset, aggregates, n_free)
    if aggregates.pair_plans:
        paths = folder / user_categories.FOLDER, user_categories.DECLARATION_FILE
        _write_folder(*paths, aggregates.pair_plans, _write_user_records, dataset, aggregates, n_free)


def _write_folder(
    folder: Path,
    file_name: str,
    entities: Iterable[str],
    write_records: Callable[[Path, int, str, LogAggregates, int], None],
    dataset: Dataset,
    aggregates: LogAggregates,
    n_free: int,
) -> None:
    """Write the declaration of some entities, and the records of each."""
    folder.mkdir()
    for number, entity in enumerate(entities):
        write_records(folder, number, entity, aggregates, n_free)
    declared = [aggregation for entity in entities for aggregation in aggregates.list_of_entity(entity)]
    aggregates.save_prices(folder, declared)
    items, columns = dataset.description.items, {entity: entity.removeprefix(CROSS) for entity in entities if entity != ITEM}
    settings = {
        "aggregations": [asdict(aggregation) for aggregation in declared],
        "event_names": aggregates.event_names,
        "amount": aggregates.amount,
        "category_columns": {
            entity: column if items and column in items.categorical else "category" for entity, column in columns.items()
        },
    }
    (folder / file_name).write_text(json.dumps(settings, indent=1) + "\n")


def _write_records(folder: Path, number: int, entity: str, aggregates: LogAggregates, n_free: int) -> None:
    plan, events, item_ids = aggregates.plans[entity], aggregates.events, aggregates.item_ids[:-1]
    positions = np.searchsorted(item_ids, events["item_id"])
    if entity == ITEM:
        records, rows = plan.make_empty(len(item_ids) + n_free + 1), positions
    else:
        item_keys = aggregates.item_categories[entity][:-1]
        keys = np.unique(item_keys[item_keys != NO_KEY])
        record_of = np.where(item_keys == NO_KEY, len(keys), np.searchsorted(keys, item_keys))
        records, rows = plan.make_empty(len(keys) + 1), np.where(record_of == len(keys), -1, record_of)[positions]
        padding = np.full(n_free + 1, len(keys))
        np.save(folder / f"keys.{number}.npy", keys)
        np.save(folder / f"record_of.{number}.npy", np.concatenate([record_of, padding]).astype(np.int32))
    plan.update(records, rows, events)
    np.save(folder / f"records.{number}.npy", records)


def _write_user_records(folder: Path, number: int, entity: str, aggregates: LogAggregates, n_free: int) -> None:
    plan, event_keys = aggregates.plans[entity], join_keys(aggregates.keys[entity])
    keys = np.unique(event_keys[event_keys != NO_KEY])
    records = plan.make_empty(len(keys) + 1)
    plan.update(records, np.where(event_keys == NO_KEY, -1, np.searchsorted(keys, event_keys)), aggregates.events)
    category_of = aggregates.item_categories[entity.removeprefix(CROSS)]
    np.save(folder / f"keys.{number}.npy", keys)
    np.save(folder / f"records.{number}.npy", records)
    np.save(folder / f"category_of.{number}.npy", np.append(category_of, np.full(n_free, NO_KEY)))
