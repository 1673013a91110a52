"""Convert a log's timestamps, unix times or ISO date-times (UTC without an offset), to int64 unix seconds."""

from __future__ import annotations

import numpy as np
import pandas as pd

from training.dataset.columns import Column

ISO = r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d{1,9})?)?)?( ?(Z|[+-]\d{2}:?\d{2}))?"
LIMIT_S = 100_000_000_000  # the year 5138 in seconds, March 1973 in milliseconds: tells the units apart
UNITS = {"seconds": 1, "milliseconds": 1_000, "microseconds": 1_000_000, "nanoseconds": 1_000_000_000}
REMEDY = "Write the whole column as unix seconds (1291190760), or as ISO date-times (2010-12-01 08:26:00)."


def parse_times(column: Column) -> tuple[np.ndarray, str]:
    """Return unix seconds, int64 [n_rows], 0 where missing, and the detected format ("seconds", "milliseconds", "ISO", …).

    The median's magnitude decides the unit of unix times, one for the whole column.
    Raises DataError for the first row that does not parse, and for days written as numbers (20101201).
    """
    texts = pd.Series(column.values, dtype=object).astype(str)
    numbers = pd.to_numeric(texts, errors="coerce").to_numpy(np.float64)
    if np.isfinite(numbers).sum() * 2 > len(numbers):
        seconds, kind = _parse_unix(column, numbers)
    else:
        seconds, kind = _parse_iso(column, texts), "ISO date-times"
    return np.append(seconds, 0)[column.codes], kind


def _parse_unix(column: Column, numbers: np.ndarray) -> tuple[np.ndarray, str]:
    if not np.isfinite(numbers).all():
        raise column.make_fault_at_value(~np.isfinite(numbers), "is not a time, while most of the column is unix time", REMEDY)
    if _look_like_days(numbers):
        raise column.make_fault(
            int(np.argmax(~column.missing)), "looks like a day written as a number, not like a unix time", REMEDY
        )
    median = float(np.median(np.abs(numbers)))
    unit = next((name for name, per_s in UNITS.items() if median < LIMIT_S * per_s), "nanoseconds")
    smallest = 0 if unit == "seconds" else LIMIT_S * UNITS[unit] / 1_000
    foreign = (np.abs(numbers) >= LIMIT_S * UNITS[unit]) | (np.abs(numbers) < smallest)
    if foreign.any():
        raise column.make_fault_at_value(foreign, f"is no time in {unit}, while most of the column is", REMEDY)
    return np.floor(numbers / UNITS[unit]).astype(np.int64), unit


def _look_like_days(numbers: np.ndarray) -> bool:
    year, month, day = numbers // 10_000, numbers // 100 % 100, numbers % 100
    valid = (year >= 1900) & (year <= 2100) & (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
    return bool(valid.all() and (numbers % 1 == 0).all())


def _parse_iso(column: Column, texts: pd.Series) -> np.ndarray:
    well_formed = texts.str.fullmatch(ISO).to_numpy(bool)
    parsed = pd.to_datetime(texts.where(well_formed), utc=True, errors="coerce")
    bad = parsed.isna().to_numpy()
    if bad.any():
        raise column.make_fault_at_value(bad, "is not a time", REMEDY)
    return parsed.astype("int64").to_numpy() // 1_000_000_000
