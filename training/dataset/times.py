"""Convert a log's timestamps to int64 unix seconds: unix times, ISO date-times or a stated format. UTC without an offset."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import numpy as np
import pandas as pd

from training.dataset.columns import Column

ISO = r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d{1,9})?)?)?( ?(Z|UTC|[+-]\d{2}(:?\d{2})?))?"
LIMIT_S = 100_000_000_000  # the year 5138 in seconds, March 1973 in milliseconds: tells the units apart
UNITS = {"seconds": 1, "milliseconds": 1_000, "microseconds": 1_000_000, "nanoseconds": 1_000_000_000}
DAY_S = 86_400
SPREADSHEET_DAYS = (32_874, 73_050)  # 1990 to 2099, in days since 1899-12-30
REMEDY = (
    "Write the whole column as unix seconds (1291190760), or as ISO date-times (2010-12-01 08:26:00), or state its format in "
    'dataset.toml, such as time_format = "%d.%m.%Y %H:%M".'
)
SAMPLE = datetime(2010, 12, 31, tzinfo=UTC)


def check_time_format(time_format: str) -> str:
    """Return the format. Raises ValueError unless it is one of strptime and tells the day of a time."""
    try:
        parsed = pd.to_datetime(SAMPLE.strftime(time_format), format=time_format, utc=True)
    except ValueError as error:
        raise ValueError(f"{time_format!r} is no format of strptime: {error}") from error
    if parsed != SAMPLE:
        raise ValueError(
            f"{time_format!r} does not tell year, month and day. Use the directives of Python's strptime, as in %d.%m.%Y %H:%M"
        )
    return time_format


def parse_times(column: Column, time_format: str | None = None) -> tuple[np.ndarray, str]:
    """Return unix seconds, int64 [n_rows], 0 where missing, and the format ("seconds", "milliseconds", "ISO", …).

    time_format: how all times are written, as strptime takes it; None: it is recognised. Then the median's magnitude decides
        the unit of unix times, one for the whole column.

    Raises DataError for the first row that does not parse, and for numbers that are no unix times: dates written as numbers
    (20101201, 20101201082600), years, days of a spreadsheet, and times of which most are in the future. Other small numbers are
    unix times: a log may count from 0.
    """
    texts = pd.Series(column.values, dtype=object).astype(str)
    if time_format is not None:
        return np.append(_parse_formatted(column, texts, time_format), 0)[column.codes], time_format
    numbers = pd.to_numeric(texts, errors="coerce").to_numpy(np.float64)
    if np.isfinite(numbers).sum() * 2 > len(numbers):
        seconds, kind = _parse_unix(column, numbers)
    else:
        seconds, kind = _parse_iso(column, texts), "ISO date-times"
    return np.append(seconds, 0)[column.codes], kind


def _parse_unix(column: Column, numbers: np.ndarray) -> tuple[np.ndarray, str]:
    if not np.isfinite(numbers).all():
        raise column.make_fault_at_value(~np.isfinite(numbers), "is not a time, while most of the column is unix time", REMEDY)
    if look := _recognise(numbers):
        raise column.make_fault(int(np.argmax(~column.missing)), f"looks like {look}, not like a unix time", REMEDY)
    median = float(np.median(np.abs(numbers)))
    unit = next((name for name, per_s in UNITS.items() if median < LIMIT_S * per_s), "nanoseconds")
    smallest = 0 if unit == "seconds" else LIMIT_S * UNITS[unit] / 1_000
    foreign = (np.abs(numbers) >= LIMIT_S * UNITS[unit]) | (np.abs(numbers) < smallest)
    if foreign.any():
        raise column.make_fault_at_value(foreign, f"is no time in {unit}, while most of the column is", REMEDY)
    seconds = np.floor(numbers / UNITS[unit]).astype(np.int64)
    ahead = seconds > time.time() + DAY_S
    if ahead.sum() * 2 > len(ahead):
        raise column.make_fault_at_value(ahead, f"is in the future as unix {unit}, like most of the column", REMEDY)
    return seconds, unit


def _recognise(numbers: np.ndarray) -> str:
    """Return how dates are written in numbers that are no unix times, "" where they may be unix times."""
    if ((numbers >= SPREADSHEET_DAYS[0]) & (numbers <= SPREADSHEET_DAYS[1])).all():
        return "a day of a spreadsheet"
    if (numbers % 1 != 0).any():
        return ""
    if ((numbers >= 1990) & (numbers <= 2100)).all():
        return "a year"
    for after_day, look in ((1, "a day written as a number"), (100**2, "YYYYMMDDhhmm"), (100**3, "YYYYMMDDhhmmss")):
        days, clock = np.divmod(numbers, after_day)
        year, month, day = days // 10_000, days // 100 % 100, days % 100
        valid = (year >= 1900) & (year <= 2100) & (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
        valid &= (clock // max(after_day // 100, 1) < 24) & (clock // 100 % 100 < 60) & (clock % 100 < 60)
        if valid.all():
            return look
    return ""


def _parse_formatted(column: Column, texts: pd.Series, time_format: str) -> np.ndarray:
    parsed = pd.to_datetime(texts, format=time_format, utc=True, errors="coerce")
    bad = parsed.isna().to_numpy()
    if bad.any():
        remedy = f"Write the whole column like {SAMPLE.strftime(time_format)}, or correct time_format in dataset.toml."
        raise column.make_fault_at_value(bad, f"is no time of the format {time_format!r}", remedy)
    return parsed.astype("int64").to_numpy() // 1_000_000_000


def _parse_iso(column: Column, texts: pd.Series) -> np.ndarray:
    well_formed = texts.str.fullmatch(ISO).to_numpy(bool)
    quick = texts.where(well_formed).str.replace("UTC", "Z", regex=False)  # pandas takes a hundred times as long for the former
    parsed = pd.to_datetime(quick, utc=True, errors="coerce")
    bad = parsed.isna().to_numpy()
    if bad.any():
        raise column.make_fault_at_value(bad, "is not a time", REMEDY)
    return parsed.astype("int64").to_numpy() // 1_000_000_000
