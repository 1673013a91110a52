"""Write the settings of `observe` and `upsert`: names of events, changeable columns, and the store's folder."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import numpy as np

from export.settings import LiveChoices
from repository.publish import Staging
from serving.contract.artifacts import StageInfo
from serving.contract.ids import NAME
from serving.contract.tensors import LIVE_MODELS
from serving.live.catalogue_times import CatalogueTimes
from serving.live.events import EventKind, EventKinds
from serving.stages.live.models import LiveSettings
from training.dataset import Dataset
from training.dataset.description import Description, Items

ROLES = {"title": "text", "category": "text", "provider": "text", "available": "flag", "price": "number"}  # -> type
LEAST_ABOVE_ZERO = float(np.finfo(np.float32).tiny)


def write_live_models(staging: Staging, like: StageInfo, dataset: Dataset, choices: LiveChoices) -> None:
    """Write `stage.json` of `observe` and `upsert`. like: the info of a stage, with the same axes and context columns."""
    description = dataset.description
    kinds = make_event_kinds(description)
    settings = LiveSettings(
        kinds=tuple(asdict(kind) for kind in kinds.kinds),
        value_is=kinds.value_is,
        columns=list_changeable_columns(description, has_names=dataset.item_names is not None),
        roles=find_column_roles(description),
        **choices.model_dump(include={field.name for field in fields(LiveSettings)}),
    )
    for name in LIVE_MODELS:
        replace(like, stage=name, settings=asdict(settings)).write(staging.folder(name))


def make_event_kinds(description: Description) -> EventKinds:
    """Return the kinds of `[events]`; without that section one kind, that of the log's rows.

    With a label column, positives are the events whose value is high enough, as in the log. The column states the weight of
    a row of the log, so the weights of live events are relative to that of its kind: a purchase counts the same in both.
    """
    log = description.interactions
    value_is = "label" if log.label else "weight" if log.weight else ""
    positive_at = None if not log.label else LEAST_ABOVE_ZERO if log.positive_at is None else float(log.positive_at)
    if not description.events:
        name = "rating" if log.label else "purchase"
        return EventKinds((EventKind(name, positive=not log.label, positive_at=positive_at),), value_is)
    row_weight = description.events[description.row_event].weight
    unit = row_weight if row_weight > 0 else 1.0
    kinds = (
        EventKind(
            name, event.weight / unit, event.positive and not log.label, positive_at if event.positive else None, event.seen
        )
        for name, event in description.events.items()
    )
    return EventKinds(tuple(kinds), value_is)


def find_column_roles(description: Description) -> dict[str, str]:
    """Return role -> name in the data of the item columns that `upsert` may change under either of both.

    Left out is a feature of another type than the role, and a column of no other use that is named like another role.
    """
    items = description.items
    if items is None:
        return {}
    features = list_item_features(items)
    names = {role: getattr(items, role) for role in ROLES}
    return {
        role: name
        for role, name in names.items()
        if name and name != role and features.get(name, None if name in {*ROLES, NAME} else ROLES[role]) == ROLES[role]
    }


def find_catalogue_times(dataset: Dataset) -> CatalogueTimes | None:
    """Return when the rows of the item file were last changed, and what they hold; None where the file does not say."""
    items, updates_s = dataset.description.items, dataset.item_updates_s
    if items is None or updates_s is None:
        return None
    roles = {role for role in ROLES if getattr(items, role)}
    if items.price_column:
        roles.add("price")
    columns = {*roles, *find_column_roles(dataset.description).values(), *list_item_features(items)}
    return CatalogueTimes(updates_s.index.to_numpy(np.int64), updates_s.to_numpy(np.int64), frozenset(columns))


def list_item_features(items: Items) -> dict[str, str]:
    """Return column -> type of the feature columns of the items."""
    texts = dict.fromkeys(items.categorical, "text") | dict.fromkeys(items.multi_categorical, "texts")
    return texts | dict.fromkeys(items.continuous, "number")


def list_changeable_columns(description: Description, has_names: bool) -> dict[str, dict[str, str]]:
    """Return kind -> column -> type of what `upsert` may change: an item's roles, by either name, and all feature columns.

    has_names: whether the shop's item ids are text, so that `upsert` may name an item
    """
    items, users = description.items, description.users
    item = dict(ROLES)
    if has_names:
        item[NAME] = "name"
    item |= {name: ROLES[role] for role, name in find_column_roles(description).items()}
    if items:
        item |= list_item_features(items)
    user = {}
    if users:
        user = dict.fromkeys(users.categorical, "text") | dict.fromkeys(users.continuous, "number")
    return {"item": item, "user": user}
