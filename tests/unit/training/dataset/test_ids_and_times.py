"""Ids and times, value by value; the packed paths against slow twins."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from serving.contract.errors import DataError
from serving.contract.ids import ID_BITS, stable_id
from tests.present import present
from training.dataset.columns import Column
from training.dataset.ids import assign_ids, convert_ids
from training.dataset.times import parse_times


def column(*texts: str | None) -> Column:
    """Return a column as if it were read from log.parquet; None = missing."""
    values = np.array([text for text in dict.fromkeys(texts) if text is not None], object)
    codes = np.array([-1 if text is None else list(values).index(text) for text in texts], np.int64)
    return Column(Path("log.parquet"), "x", codes, values)


def test_stable_id_never_changes():
    assert stable_id("85123A") == 6648971616491731
    assert stable_id("85123A", attempt=1) != stable_id("85123A")


def test_stable_ids_are_exact_in_json_and_no_item_is_negative():
    ids = assign_ids(str(number) for number in range(20_000)).values()
    assert all(0 <= i < 2**ID_BITS and int(float(i)) == i for i in ids)
    assert len(set(ids)) == 20_000


def test_colliding_texts_get_different_ids_whatever_the_order():
    def narrow(text: str, attempt: int) -> int:
        return stable_id(text, attempt) % 97

    texts = [f"sku-{number}" for number in range(90)]
    ids = assign_ids(texts, narrow)
    assert len(set(ids.values())) == len(texts)
    assert ids == assign_ids(reversed(texts), narrow)
    first_of: dict[str, int] = {}
    for text in sorted(texts):  # the slow twin: the text that sorts first gets the first free id
        attempt = 0
        while narrow(text, attempt) in first_of.values():
            attempt += 1
        first_of[text] = narrow(text, attempt)
    assert ids == first_of


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["7", "0", None], [7, 0, 0]),
        (["17850.0", "1e+06", "-1.5e+06"], [17850, 1_000_000, -1_500_000]),
        (["9223372036854775807", "-5"], [2**63 - 1, -5]),
    ],
)
def test_integers_stay_as_they_are(texts, expected):
    (ids,), names = convert_ids([column(*texts)], allow_negative=True)
    assert ids.tolist() == expected
    assert names is None


@pytest.mark.parametrize(
    "text", ["007", "1.5", "-0", "1e3", "9223372036854775808", "9" * 40, "1e+99", "12a", "-3.2e+00", "1.55e+01"]
)
def test_one_text_makes_the_whole_column_text(text):
    (ids,), names = convert_ids([column("7", text, None)], allow_negative=True)
    assert ids.tolist() == [stable_id("7"), stable_id(text), 0]
    assert sorted(present(names)["name"]) == sorted(["7", text])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2010-12-01", "2010-12-01T00:00:00+00:00"),
        ("2010-12-01 08:26", "2010-12-01T08:26:00+00:00"),
        ("2010-12-01 08:26:00", "2010-12-01T08:26:00+00:00"),
        ("2010-12-01T08:26:00Z", "2010-12-01T08:26:00+00:00"),
        ("2010-12-01T08:26:00.999+01:00", "2010-12-01T07:26:00+00:00"),
        ("2010-12-01 08:26:00-0530", "2010-12-01T13:56:00+00:00"),
        ("2010-12-01 08:26:00.123456+01", "2010-12-01T07:26:00+00:00"),  # as Postgres writes them
        ("2010-12-01 08:26:00.5 UTC", "2010-12-01T08:26:00+00:00"),  # as BigQuery does
        ("1969-12-31 23:59:58.5", "1969-12-31T23:59:58+00:00"),
    ],
)
def test_iso_times(text, expected):
    seconds, kind = parse_times(column(text, None))
    assert kind == "ISO date-times"
    assert seconds.tolist() == [int(datetime.fromisoformat(expected).timestamp()), 0]


@pytest.mark.parametrize(
    ("factor", "kind"), [(1, "seconds"), (10**3, "milliseconds"), (10**6, "microseconds"), (10**9, "nanoseconds")]
)
def test_unix_times_in_every_unit(factor, kind):
    now_s = int(datetime(2024, 5, 1, tzinfo=UTC).timestamp())
    assert parse_times(column(str(now_s * factor), str((now_s + 60) * factor)))[0].tolist() == [now_s, now_s + 60]
    assert parse_times(column(str(now_s * factor)))[1] == kind


def test_small_unix_times_are_seconds():
    assert parse_times(column("0", "1", "2.9", "-3"))[0].tolist() == [0, 1, 2, -3]


@pytest.mark.parametrize(
    ("text", "time_format", "expected"),
    [
        ("16.03.2024 04:29", "%d.%m.%Y %H:%M", "2024-03-16T04:29:00+00:00"),
        ("1.3.2024 4:09", "%d.%m.%Y %H:%M", "2024-03-01T04:09:00+00:00"),
        ("3/16/24 4:29 PM", "%m/%d/%y %I:%M %p", "2024-03-16T16:29:00+00:00"),
        ("20240316", "%Y%m%d", "2024-03-16T00:00:00+00:00"),
        ("16 Mar 2024 04:29:00.9 +0200", "%d %b %Y %H:%M:%S.%f %z", "2024-03-16T02:29:00+00:00"),
    ],
)
def test_times_in_a_stated_format(text, time_format, expected):
    seconds, kind = parse_times(column(text, None, text), time_format)
    assert kind == time_format
    assert seconds.tolist() == [second := int(datetime.fromisoformat(expected).timestamp()), 0, second]


@pytest.mark.parametrize("text", ["2024-03-16 04:29", "31.02.2024 04:29", "16.03.2024", "16.03.2024 04:29:10", "1710563340"])
def test_a_time_in_another_format_than_the_stated_one_is_refused(text):
    told = f"row 2: '{text}' is no time of the format '%d.%m.%Y %H:%M'. Write the whole column like 31.12.2010 00:00, or"
    with pytest.raises(DataError, match=told):
        parse_times(column("16.03.2024 04:29", text), "%d.%m.%Y %H:%M")


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["202403010826"], "'202403010826' looks like YYYYMMDDhhmm, not like a unix time. Write the whole column as"),
        (["20240301082600", "20240301235959"], "'20240301082600' looks like YYYYMMDDhhmmss"),
        (["45352.35", "45353"], "'45352.35' looks like a day of a spreadsheet"),
        (["2023", "2024"], "'2023' looks like a year"),
        (["20240301082600123", "20240301082600456"], "'20240301082600123' is in the future as unix microseconds"),
    ],
)
def test_numbers_that_are_no_unix_times_are_refused(texts, told):
    with pytest.raises(DataError, match=f"column 'x', row 1: {told}"):
        parse_times(column(*texts))
