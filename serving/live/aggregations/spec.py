"""Parse and check `[[aggregations]]` of a `dataset.toml`.

    [[aggregations]]
    name = "item_sales_24h"
    entity = "item"              # user, item, a category column of [items], or "user x <column>"
    value = "count"              # count, amount, price or distinct
    function = "count"           # count, sum, mean, last or distinct
    window = "24h"               # or half_life = "3d", or session_gap = "30min"
    events = ["purchase"]        # optional: names of [events]; default: all

value       of an event                           count, sum, mean                    last (n = 3: three columns)
count       its weight                            events, weights, mean weight        days since each of the last n events
amount      its quantity, rating or amount        of the events that have one         the last n amounts, newest first
price       the price of its item                 of the events whose item has one    the last n prices, newest first
distinct    its item (or its user, if the entity is an item or a category): only with function = "distinct" and a window
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from serving.contract.errors import ConfigError

REQUIRED = ("name", "entity", "value", "function")
USER, ITEM, CROSS = "user", "item", "user x "
VALUES = ("count", "amount", "price", "distinct")
FUNCTIONS = ("count", "sum", "mean", "last", "distinct")
UNITS_MS = {"min": 60_000, "h": 3_600_000, "d": 86_400_000}
SPANS = ("window", "half_life", "session_gap")
SHORTEST_WINDOW_MS = 10 * UNITS_MS["min"]
MOST_LAST = 16


@dataclass(frozen=True)
class Aggregation:
    """One declared aggregation. Raises ConfigError when its parts do not fit together."""

    name: str
    entity: str
    value: str
    function: str
    window: str = ""
    half_life: str = ""
    session_gap: str = ""
    n: int = 0  # of function = "last"
    events: tuple[str, ...] = ()  # empty: all

    def __post_init__(self) -> None:
        for key in (*REQUIRED, *SPANS):
            self._require(isinstance(getattr(self, key), str), f"{key} is {getattr(self, key)!r}", "a text")
        self._require(self.name.isidentifier(), f"name is {self.name!r}", "letters, digits and _, not beginning with a digit")
        self._require(self.value in VALUES, f"value is {self.value!r}", list_choices(VALUES, self.value))
        self._require(self.function in FUNCTIONS, f"function is {self.function!r}", list_choices(FUNCTIONS, self.function))
        are_names = isinstance(self.events, list | tuple) and all(isinstance(name, str) for name in self.events)
        self._require(are_names, f"events is {self.events!r}", 'a list of names of [events], such as ["purchase"]')
        object.__setattr__(self, "events", tuple(dict.fromkeys(self.events)))  # each once
        self._check_span()
        self._check_last()
        self._check_distinct()

    def _check_span(self) -> None:
        span_keys = [key for key in SPANS if getattr(self, key)]
        if self.function == "last":
            self._require(span_keys in ([], ["window"]), f"last is combined with {' and '.join(span_keys)}", "window or none")
        else:
            keys_text = " and ".join(span_keys) or "none"
            self._require(len(span_keys) == 1, f"of window, half_life and session_gap it has {keys_text}", "exactly one")
        for key in span_keys:
            length_ms = parse_duration_ms(getattr(self, key))
            self._require(length_ms > 0, f"{key} is {getattr(self, key)!r}", 'a time such as "10min", "24h" or "7d"')
            long_enough = key != "window" or length_ms >= SHORTEST_WINDOW_MS
            self._require(long_enough, f"window is {self.window!r}", "at least 10min")

    def _check_last(self) -> None:
        if self.function == "last":
            is_count = type(self.n) is int and 1 <= self.n <= MOST_LAST
            self._require(is_count, f"n is {self.n!r}", f'a whole number from 1 to {MOST_LAST}: function = "last" needs it')
        else:
            fact = f"n = {self.n!r} is given with function = {self.function!r}"
            self._require(self.n == 0, fact, 'function = "last", or no n')

    def _check_distinct(self) -> None:
        if "distinct" in (self.value, self.function):
            fits = self.value == self.function and bool(self.window)
            fact = f"value = {self.value!r} is combined with function = {self.function!r}"
            self._require(fits, fact, "distinct for both, with a window")

    def _require(self, holds: bool, fact: str, expectation: str) -> None:
        if not holds:
            raise ConfigError(f"[[aggregations]] {self.name!r}: {fact}. Expected {expectation}. Correct it in dataset.toml.")

    @property
    def span(self) -> tuple[str, int]:
        """(the given key of SPANS, its length in milliseconds); ("", 0) for `last` without a window."""
        key = next((key for key in SPANS if getattr(self, key)), "")
        return key, parse_duration_ms(getattr(self, key)) if key else 0

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the resulting columns: `name`; for `last`, `name_1` (newest) to `name_n`."""
        if self.function == "last":
            return tuple(f"{self.name}_{place}" for place in range(1, self.n + 1))
        return (self.name,)


def is_of_users(entity: str) -> bool:
    """Return whether an entity is users, or users within categories; the names of categories may begin with "user"."""
    return entity == USER or entity.startswith(CROSS)


def read_published(tables: Sequence[Mapping[str, Any]]) -> tuple[Aggregation, ...]:
    """Return the aggregations as a generation has them. Raises ConfigError or TypeError."""
    return tuple(Aggregation(**table) for table in tables)


def parse_aggregations(
    tables: Sequence[Mapping[str, Any]], category_columns: Sequence[str], event_names: Sequence[str]
) -> tuple[Aggregation, ...]:
    """Return the aggregations that the tables of `[[aggregations]]` declare.

    category_columns: category columns of the items; event_names: names of `[events]`
    Raises ConfigError for an unknown key, naming the known ones, and for a wrong value, naming what was expected.
    """
    parsed = tuple(_parse(table, number) for number, table in enumerate(tables, start=1))
    names: set[str] = set()
    for aggregation in parsed:
        repeated = names & set(aggregation.feature_names)
        aggregation._require(not repeated, f"the column {min(repeated, default='')!r} exists already", "a name of its own")
        names |= set(aggregation.feature_names)
        entities = (USER, ITEM, *category_columns, *(CROSS + column for column in category_columns))
        is_known = aggregation.entity in entities
        aggregation._require(is_known, f"entity is {aggregation.entity!r}", list_choices(entities, aggregation.entity))
        for event in aggregation.events:
            aggregation._require(event in event_names, f"events names {event!r}", list_choices(event_names, event))
    return parsed


def _parse(table: Mapping[str, Any], number: int) -> Aggregation:
    known = [field.name for field in fields(Aggregation)]
    subject = f"[[aggregations]] number {number}, {table.get('name', 'without a name')!r},"
    for key in table:
        if key not in known:
            raise ConfigError(
                f"{subject} has the unknown key {key!r}. Expected {list_choices(known, key)}. Correct it in dataset.toml."
            )
    for key in REQUIRED:
        if key not in table:
            raise ConfigError(f"{subject} lacks the key {key!r}. Expected {', '.join(REQUIRED)}. Add it in dataset.toml.")
    return Aggregation(**table)


def list_choices(choices: Sequence[str], choice: str) -> str:
    """Return the choices as text for a message, with the one that was probably meant."""
    listed = f"one of {', '.join(choices)}" if choices else "nothing: none is declared"
    close = difflib.get_close_matches(choice, choices, n=1) if isinstance(choice, str) else []
    return f"{listed} (did you mean {close[0]!r}?)" if close else listed


def parse_duration_ms(text: str) -> int:
    """Return the milliseconds of a duration such as "10min", "24h" or "7d"; 0 if the text is not one."""
    match = re.fullmatch(r"([1-9]\d{0,5}) ?(min|h|d)", text)
    return int(match[1]) * UNITS_MS[match[2]] if match else 0
