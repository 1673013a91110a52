"""`dataset.toml` as typed settings. Every key is listed here; an unknown key is an error.

data/README.md documents the format with examples. load.py opens the data files.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from serving.contract.errors import ConfigError, DataError
from serving.contract.tensors import LIVE_MODELS, STAGES, Axes, make_ensemble_spec, make_live_specs, make_stage_specs
from serving.live.aggregations import parse_aggregations
from training.dataset.times import check_time_format

FILE_NAME = "dataset.toml"
ColumnName = Annotated[str, Field(min_length=1)]
TimeFormat = Annotated[str, AfterValidator(check_time_format)]
EventName = Annotated[str, Field(min_length=1, max_length=64)]

# Columns of the loaded frames, whose names context columns (LOG_COLUMNS) and item features (ITEM_ROLES) may not have.
LOG_COLUMNS = ("user_id", "item_id", "timestamp", "positive", "weight", "label")
ITEM_ROLES = ("title", "category", "provider", "available")


def _list_tensor_names() -> set[str]:
    stages = make_stage_specs(Axes())
    specs = (*stages.values(), *make_live_specs().values(), make_ensemble_spec(stages))
    return {t.name for s in specs for t in (*s.inputs, *s.outputs, *s.input_fields, *s.output_fields)} | {*STAGES, *LIVE_MODELS}


def _refuse_repeats(names: list[str]) -> None:
    for position, name in enumerate(names):
        if name in names[:position]:
            raise ValueError(f"the column {name!r} is declared twice; declare it once, with one kind")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Interactions(_Section):
    """The log: one row per event. csv, csv.gz, tsv, tsv.gz or parquet."""

    path: str
    user_id: ColumnName
    item_id: ColumnName
    timestamp: ColumnName
    time_format: TimeFormat | None = None  # of `timestamp`; None: unix times or ISO date-times
    label: ColumnName | None = None
    positive_at: float | None = None  # rows with a label at or above it are positives; without it, label > 0
    weight: ColumnName | None = None  # a quantity: rows where it is <= 0 (returns, cancellations) are dropped
    ignore_items: list[str | int] = []  # item ids that are not products: postage, fees, test articles

    @model_validator(mode="after")
    def _positive_at_needs_label(self) -> Interactions:
        if self.positive_at is not None and self.label is None:
            raise ValueError('positive_at says which labels count as positive, so it needs label = "<column>"')
        return self

    @model_validator(mode="after")
    def _columns_differ(self) -> Interactions:
        if len({self.user_id, self.item_id, self.timestamp}) < 3:
            raise ValueError("user_id, item_id and timestamp are three columns; name a different one for each")
        return self


class Items(_Section):
    """The catalogue: one row per item. Items that only the log has are kept, with missing features."""

    path: str
    item_id: ColumnName
    title: ColumnName | None = None
    categorical: list[ColumnName] = []
    multi_categorical: dict[ColumnName, Annotated[str, Field(min_length=1)]] = {}  # column -> separator
    continuous: list[ColumnName] = []
    category: ColumnName | None = None  # of a multi_categorical column: its first value
    provider: ColumnName | None = None
    price: ColumnName | None = None  # for price rules; without it, the continuous column "price" if there is one
    available: ColumnName | None = None  # 0/1 or true/false; missing = available
    updated_at: ColumnName | None = None  # time of the row's last change; columns that `upsert` set earlier give way to it
    time_format: TimeFormat | None = None  # of `updated_at`

    @model_validator(mode="after")
    def _time_format_needs_updated_at(self) -> Items:
        if self.time_format is not None and self.updated_at is None:
            raise ValueError('time_format says how the times of updated_at are written, so it needs updated_at = "<column>"')
        return self

    @property
    def feature_columns(self) -> list[str]:
        return [*self.categorical, *self.multi_categorical, *self.continuous]

    @property
    def price_column(self) -> str | None:
        return self.price or ("price" if "price" in self.continuous else None)

    @model_validator(mode="after")
    def _names(self) -> Items:
        _refuse_repeats(self.feature_columns)
        for name in self.feature_columns:
            is_own_role = name in ("category", "provider") and name in self.categorical and getattr(self, name) in (None, name)
            if name in ("item_id", *ITEM_ROLES) and not is_own_role:
                raise ValueError(
                    f"the feature column {name!r} has the name of a role of the item table; rename the column in the file "
                    f"(reserved: item_id, {', '.join(ITEM_ROLES)})"
                )
        if self.price and "price" in self.feature_columns and not (self.price == "price" and "price" in self.continuous):
            raise ValueError(
                f"price = \"{self.price}\" is the column of price rules, but the feature column 'price' is another one; "
                'list it in continuous and leave out price = "…", or rename the column in the file'
            )
        return self


class Users(_Section):
    """The customers: one row per user. Users that only the log has are kept, with missing features."""

    path: str
    user_id: ColumnName
    categorical: list[ColumnName] = []
    continuous: list[ColumnName] = []

    @property
    def feature_columns(self) -> list[str]:
        return [*self.categorical, *self.continuous]

    @model_validator(mode="after")
    def _names(self) -> Users:
        _refuse_repeats(self.feature_columns)
        if "user_id" in self.feature_columns:
            raise ValueError("user_id is always a feature; take it out of categorical and continuous")
        return self


class Context(_Section):
    """Columns of the log that are known at request time. Each becomes an optional request tensor."""

    categorical: list[ColumnName] = []
    continuous: list[ColumnName] = []

    @property
    def columns(self) -> list[str]:
        return [*self.categorical, *self.continuous]

    @model_validator(mode="after")
    def _names(self) -> Context:
        _refuse_repeats(self.columns)
        taken_names = sorted(set(self.columns) & (_list_tensor_names() | set(LOG_COLUMNS)))
        if taken_names:
            raise ValueError(
                f"the context column {taken_names[0]!r} has a name that the served models use themselves; rename it in the file"
            )
        return self


class Event(_Section):
    """One kind of live event. Positives are the goal of recommendations; models learn from them."""

    weight: float = 1.0
    positive: bool = False
    seen: bool = False  # the item is not recommended to this user again; always so for positives


class Description(_Section):
    """A whole `dataset.toml`."""

    name: Annotated[str, Field(min_length=1)]  # also names a folder: `make eval` exports to .run/eval/<name>
    interactions: Interactions
    items: Items | None = None
    users: Users | None = None
    context: Context = Context()
    events: dict[EventName, Event] = {}
    aggregations: list[dict[str, Any]] | None = None  # None: the defaults of training/features/aggregates.py

    @property
    def event_names(self) -> tuple[str, ...]:
        """Names that a live event may have; without `[events]` one, that of the log's own rows."""
        return tuple(self.events) or ("rating" if self.interactions.label else "purchase",)

    @property
    def row_event(self) -> str:
        """The event that the log's rows stand for: the first positive one of `event_names`."""
        return next((name for name, event in self.events.items() if event.positive), self.event_names[0])

    @property
    def category_columns(self) -> tuple[str, ...]:
        """Columns of the items by which aggregations may group: the categorical ones and the category."""
        items = self.items
        return tuple(dict.fromkeys([*items.categorical, *([items.category] if items.category else [])])) if items else ()

    @model_validator(mode="after")
    def _aggregations_are_sound(self) -> Description:
        log, has_price = self.interactions, self.items is not None and self.items.price_column is not None
        positives = {name for name, event in self.events.items() if event.positive} or set(self.event_names)
        for each in parse_aggregations(self.aggregations or [], self.category_columns, self.event_names):
            fault = ""
            if each.value == "amount" and not (log.label or log.weight):
                fault = 'value is "amount", but the log has none. Expected [interactions] label or weight. Add it'
            elif each.value == "price" and not has_price:
                fault = 'value is "price", but items have none. Expected [items] price, or "price" in continuous. Add it'
            elif each.events and positives.isdisjoint(each.events):
                fault = f"events names {each.events[0]!r}, but only positive ones count. Expected {min(positives)!r}. Name it"
            if fault:
                raise ConfigError(f"[[aggregations]] {each.name!r}: {fault}, or remove the aggregation.")
        return self

    @model_validator(mode="after")
    def _context_is_known_at_request_time(self) -> Description:
        log = self.interactions
        roles = {log.user_id: "user_id", log.item_id: "item_id", log.timestamp: "timestamp", log.label: "label"}
        column = next((name for name in self.context.columns if name in roles), None)
        if column is not None:
            raise ValueError(
                f"[context] {column!r} is the {roles[column]} of [interactions], which is no context of a request; take it out"
            )
        return self

    @model_validator(mode="after")
    def _some_event_is_positive(self) -> Description:
        if self.events and not any(event.positive for event in self.events.values()):
            raise ValueError("[events] has no positive event; set positive = true for the one that recommendations aim at")
        return self

    @field_validator("name")
    @classmethod
    def _name_of_a_folder(cls, name: str) -> str:
        if name.startswith(".") or not name.isprintable() or set(name) & set("/\\"):
            raise ValueError(f"{name!r} becomes the name of a folder; leave out slashes and a leading dot")
        return name


SECTIONS: dict[str, type[BaseModel]] = {
    "interactions": Interactions,
    "items": Items,
    "users": Users,
    "context": Context,
    "events": Event,
}


def read_description(folder: Path) -> Description:
    """Read `folder/dataset.toml`. Raises DataError with file, key, allowed values and remedy."""
    path = folder / FILE_NAME
    if not path.is_file():
        raise DataError(
            f"{path} does not exist. A data set is a folder with a {FILE_NAME}; data/README.md shows how to write one."
        )
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not valid TOML: {error}. Correct that line; data/README.md shows the format.") from error
    try:
        return Description.model_validate(content)
    except ValidationError as error:
        raise DataError(f"{path}: {_explain(error)}") from error
    except ConfigError as error:  # of an aggregation
        raise DataError(f"{path}: {error}") from error


def _explain(error: ValidationError) -> str:
    """Return the first error of a description as a sentence; unknown keys come first, with the existing ones."""
    fault = next((e for e in error.errors() if e["type"] == "extra_forbidden"), error.errors()[0])
    keys = [str(part) for part in fault["loc"]]
    section = SECTIONS.get(keys[0]) if keys else None  # a fault of the whole description has no keys
    prefix = f"[{keys[0]}] " if section else ""
    if fault["type"] == "extra_forbidden":
        allowed = ", ".join((section or Description).model_fields)
        return f"{prefix}has the unknown key {keys[-1]!r}. Allowed: {allowed}. Rename or remove it."
    if fault["type"] == "missing":
        return f"{prefix}lacks the required key {keys[-1]!r}. Add it; data/README.md shows the format."
    if section is Event and fault["type"] == "model_type":
        return (
            f"[events] {keys[1]} is {fault['input']!r:.60}; expected a section. Write [events.{keys[1]}] and its keys below it."
        )
    key = ".".join(keys[1:] if section else keys)
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] != "value_error":  # messages of our own name what was given
        message += f", got {fault['input']!r:.60}"
    return f"{prefix}{key}{': ' if key else ''}{message}. Correct it; data/README.md shows the format."
