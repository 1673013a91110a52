"""Convert the shop's ids to int64. Integers stay; text gets `stable_id`, the same on every machine and at every export.

All columns of one kind of id are text as soon as one of their values is not an integer: "007" and "7" must not become one
item. Item ids must not be negative, because PAD_ID (-1) and FROM_STORE (-2) of serving/contract/tensors.py are reserved. User
ids may be negative.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from decimal import Decimal

import numpy as np
import pandas as pd

from serving.contract.ids import stable_id
from serving.contract.tensors import FIRST_USER_ID
from training.dataset.columns import Column

_INTEGER = re.compile(r"(0|-?[1-9]\d*)(\.0+)?|-?[1-9](\.\d+)?e\+\d\d")  # data frames write "17850.0" and "1e+06"


def assign_ids(texts: Iterable[str], id_of: Callable[[str, int], int] = stable_id) -> dict[str, int]:
    """Return text -> id without collisions. Of two texts that collide, the one that sorts first keeps its id."""
    ids: dict[str, int] = {}
    taken_ids: set[int] = set()
    for text in sorted(set(texts)):
        attempt = 0
        while (candidate := id_of(text, attempt)) in taken_ids:
            attempt += 1
        taken_ids.add(candidate)
        ids[text] = candidate
    return ids


def convert_ids(columns: list[Column], allow_negative: bool) -> tuple[list[np.ndarray], pd.DataFrame | None]:
    """Convert all columns of one kind of id alike, such as the item ids of the log and of the item file.

    Returns int64 [n_rows] per column (0 where column.missing), and a table (id, name) of text ids, None for integer ids.
    """
    texts = [list(column.values) for column in columns]
    integers = [numbers for column_texts in texts if (numbers := parse_integers(column_texts)) is not None]
    if len(integers) == len(columns):
        for column, numbers in zip(columns, integers, strict=True):
            if not allow_negative and (numbers < 0).any():
                raise column.make_fault_at_value(
                    numbers < 0,
                    "is a negative item id",
                    "-1 and -2 have a meaning of their own: number items from 0, or use text ids.",
                )
            if (numbers < FIRST_USER_ID).any():
                raise column.make_fault_at_value(
                    numbers < FIRST_USER_ID,
                    "is one of the ids of anonymous sessions",
                    f"Ids below {FIRST_USER_ID} belong to sessions: number users from there on, or use text ids.",
                )
        return [np.append(numbers, 0)[column.codes] for column, numbers in zip(columns, integers, strict=True)], None
    id_of_text = assign_ids(text for column_texts in texts for text in column_texts)
    arrays = [
        np.append(np.array([id_of_text[text] for text in column_texts], np.int64), 0)[column.codes]
        for column, column_texts in zip(columns, texts, strict=True)
    ]
    names = pd.DataFrame({"id": np.array(list(id_of_text.values()), np.int64), "name": list(id_of_text)})
    return arrays, names.sort_values("id", ignore_index=True)


def find_ids(texts: Iterable[str | int], names: pd.DataFrame | None) -> np.ndarray:
    """Return the ids of the texts that are ids, int64 [n]. names: the table of `convert_ids`, None where ids are integers"""
    wanted_names = [str(text) for text in texts]
    if names is not None:
        return names.loc[names["name"].isin(wanted_names), "id"].to_numpy(np.int64)
    numbers = [parsed for text in wanted_names if (parsed := parse_integers([text])) is not None]
    return np.concatenate([np.empty(0, np.int64), *numbers])


def parse_integers(texts: list[str]) -> np.ndarray | None:
    """Return int64 [n] when every text is an int64, otherwise None."""
    if not all(_INTEGER.fullmatch(text) for text in texts):
        return None
    numbers = [Decimal(text) for text in texts]
    limits = np.iinfo(np.int64)
    # Compare with the limits first, because `%` fails for numbers with more digits than Decimal's precision.
    if any(not limits.min <= number <= limits.max or number % 1 for number in numbers):
        return None
    return np.array([int(number) for number in numbers], np.int64)
