"""Write the aggregations of items at the end of the log, from which the rank stage goes on (serving/stages/live/trends.py)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from serving.live.aggregations.plan import NO_KEY
from serving.live.aggregations.spec import ITEM, USER
from serving.stages.live.trends import FOLDER, TRENDS_FILE
from training.dataset.dataset import Dataset
from training.features.aggregates import LogAggregates


def write_trends(folder: Path, dataset: Dataset, aggregates: LogAggregates, n_free: int) -> None:
    """Write the records of items and categories into the rank stage's folder; nothing where the ranker learns from none.

    n_free: rows kept free for new items
    """
    entities = [entity for entity in aggregates.plans if entity != USER]
    if not entities:
        return
    folder, items = folder / FOLDER, dataset.description.items
    folder.mkdir()
    for number, entity in enumerate(entities):
        _write_records(folder, number, entity, aggregates, n_free)
    declared = [aggregation for entity in entities for aggregation in aggregates.list_of_entity(entity)]
    aggregates.save_prices(folder, declared)
    settings = {
        "aggregations": [asdict(aggregation) for aggregation in declared],
        "event_names": aggregates.event_names,
        "amount": aggregates.amount,
        "category_columns": {
            name: name if items and name in items.categorical else "category" for name in entities if name != ITEM
        },
    }
    (folder / TRENDS_FILE).write_text(json.dumps(settings, indent=1) + "\n")


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
