"""The plan's parts against the slow, obvious way; hashes against pandas, value by value."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pandas.util import hash_array

from serving.contract.errors import ArtifactError
from serving.contract.tensors import MISSING_INT, NULL_ROW, OOV_ROW
from serving.contract.texts import load_strings, save_strings
from serving.loops.hashing import hash_integers, hash_strings
from serving.stages.features.encode import (
    FIRST_ROW,
    CategoryColumn,
    IntegerVocabulary,
    NumberColumn,
    Plan,
    Ragged,
    StringVocabulary,
)

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INT64, min_size=1))
def test_integer_hash_is_pandas_hash(values):
    array = np.array(values, np.int64)
    kept = array.copy()
    np.testing.assert_array_equal(hash_integers(array), hash_array(array.copy()))
    np.testing.assert_array_equal(array, kept)  # pandas mixes in place; this one must not


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=24))
def test_string_hash_is_pandas_hash(texts):
    array = np.array(texts, object)
    expected = hash_array(array, categorize=False)
    np.testing.assert_array_equal(hash_strings(array), expected)
    as_bytes = np.array([text.encode() for text in texts], object)
    np.testing.assert_array_equal(hash_strings(as_bytes), expected)


def test_a_missing_string_hashes_as_the_empty_one():
    empty = hash_strings(np.array([""], object))
    assert hash_strings(np.array([None], object)) == empty == hash_strings(np.array([b""], object))


@given(st.sets(INT64.filter(lambda v: v != MISSING_INT), max_size=30), st.lists(INT64, max_size=30))
def test_integer_vocabulary_is_a_dict(known, asked):
    values = np.array(sorted(known, key=hash), np.int64)  # any order
    vocabulary = IntegerVocabulary.of(values, np.arange(FIRST_ROW, FIRST_ROW + len(values)))
    table = dict(zip(values.tolist(), range(FIRST_ROW, FIRST_ROW + len(values)), strict=True)) | {MISSING_INT: NULL_ROW}
    queries = [*asked, *known, MISSING_INT]
    expected = [table.get(query, OOV_ROW) for query in queries]
    np.testing.assert_array_equal(vocabulary(np.array(queries, np.int64)), expected)


def test_string_vocabulary_takes_both_spellings():
    vocabulary = StringVocabulary(["crème", "b"], np.array([3, 4]))
    asked = np.array(["crème", "crème".encode(), "b", b"b", "c", b"\xff\xfe", None, "", b""], object)
    np.testing.assert_array_equal(vocabulary(asked), [3, 3, 4, 4, OOV_ROW, OOV_ROW, NULL_ROW, NULL_ROW, NULL_ROW])


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_strings_come_back_as_saved(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("strings")
    save_strings(folder, "s", texts)
    assert load_strings(folder, "s") == texts


def test_strings_that_lost_their_end_are_refused(tmp_path):
    save_strings(tmp_path, "s", ["abc", "de"])
    np.save(tmp_path / "s.bytes.npy", np.zeros(3, np.uint8))
    with pytest.raises(ArtifactError, match="the offsets end at 5, the text at byte 3"):
        load_strings(tmp_path, "s")


def small_plan() -> Plan:
    return Plan(
        categorical=(
            CategoryColumn("user_id", "user_id", "integers", 6),
            CategoryColumn("city", "city", "strings", 5),
            CategoryColumn("hashed", "user_id", "hash", FIRST_ROW + 7, buckets=7),
            CategoryColumn("hashed_city", "city", "hash", FIRST_ROW + 5, buckets=5),
            CategoryColumn("age", "days", "bins", FIRST_ROW + 3, boundaries=(0.0, 1.0), fill=-1.0, low=-1.0, high=9.0),
        ),
        continuous=(
            NumberColumn("days", "days", fill=2.0, low=0.0, high=10.0, log=True, mean=1.0, std=0.5),
            NumberColumn("price", "price", low=-1.0, mean=3.0, std=2.0),
            NumberColumn("days_again", "days"),
        ),
        lists=(CategoryColumn("genres", "genres", "strings", 5),),
        vocabularies={
            "user_id": IntegerVocabulary.of(np.array([20, 10, 30]), np.array([3, 4, 5])),
            "city": StringVocabulary(["Oslo", "Rome"], np.array([3, 4])),
            "genres": StringVocabulary(["a", "b"], np.array([3, 4])),
        },
    )


COLUMNS: dict[str, Any] = {
    "user_id": np.array([10, 99, MISSING_INT]),
    "city": np.array([b"Rome", "Paris", None], object),
    "days": np.array([0.5, np.nan, 1e9]),
    "price": np.array([5.0, -7.0, np.nan]),
    "genres": Ragged(np.array(["b", "z", "a"], object), np.array([0, 2, 2, 3])),
}


def test_plan_encodes_every_kind_of_column():
    encoded = small_plan()(COLUMNS)
    hashed = hash_array(COLUMNS["user_id"].copy()) % 7 + FIRST_ROW
    hashed_city = hash_array(np.array(["Rome", "Paris", ""], object), categorize=False) % 5 + FIRST_ROW
    np.testing.assert_array_equal(
        encoded.categorical.T,
        [[4, OOV_ROW, NULL_ROW], [4, OOV_ROW, NULL_ROW], hashed, hashed_city, [FIRST_ROW + 1, FIRST_ROW, FIRST_ROW + 2]],
    )
    np.testing.assert_allclose(
        encoded.continuous.T,
        np.stack([(np.log1p([0.5, 2.0, 10.0]) - 1.0) / 0.5, [1.0, -2.0, np.nan], [0.5, np.nan, 1e9]]),
        rtol=1e-6,
    )
    np.testing.assert_array_equal(encoded.lists["genres"].values, [4, OOV_ROW, 3])
    np.testing.assert_array_equal(encoded.lists["genres"].offsets, [0, 2, 2, 3])
    assert encoded.categorical.dtype == np.int64
    assert encoded.continuous.dtype == np.float32


def numpy_numbers(columns: tuple[NumberColumn, ...], raw: dict[str, np.ndarray]) -> np.ndarray:
    """Column by column, each step a pass: float32 with a logarithm, float64 without, as NVTabular does."""
    answer = []
    for column in columns:
        values = raw[column.source].astype(np.float64)
        values = clipped(values, column)
        if column.log:
            values = np.log(values.astype(np.float32) + np.float32(1))
            answer.append((values - np.float32(column.mean)) / np.float32(column.std))
        else:
            answer.append(((values - column.mean) / column.std).astype(np.float32))
    return np.stack(answer, axis=1)


def clipped(values: np.ndarray, column: NumberColumn | CategoryColumn) -> np.ndarray:
    values = values if column.fill is None else np.where(np.isnan(values), column.fill, values)
    values = values if column.low is None else np.maximum(values, column.low)
    return values if column.high is None else np.minimum(values, column.high)


def odd_numbers(rng: np.random.Generator, n: int) -> np.ndarray:
    """All sizes and both signs, a tenth of it missing, infinite, zero or beyond float32."""
    values = rng.normal(size=n) * 10.0 ** rng.integers(-8, 12, n)
    return np.where(rng.random(n) < 0.1, rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0, 1e300], n), values)


@pytest.mark.parametrize("seed", range(20))
@np.errstate(all="ignore")
def test_numbers_and_bins_are_numpy_s_bit_for_bit(seed):
    rng = np.random.default_rng(seed)
    raw = {
        "float": odd_numbers(rng, 400),
        "single": odd_numbers(rng, 400).astype(np.float32),
        "whole": rng.integers(-9, 9, 400),
    }

    def limits() -> dict:
        low, high = np.sort(rng.normal(0, 100, 2)).tolist()
        bounds = {"fill": float(rng.normal()), "low": low, "high": high}
        return {name: value for name, value in bounds.items() if rng.random() < 0.6}

    numbers = tuple(
        NumberColumn(f"{source} {i}", source, **limits(), log=bool(i % 2), mean=rng.normal(), std=rng.uniform(0.1, 9))
        for i in range(6)
        for source in raw
    )
    bins = tuple(
        CategoryColumn(source, source, "bins", 9, boundaries=tuple(np.sort(rng.normal(0, 50, i))), **limits())
        for i, source in enumerate(raw)
    )
    encoded = Plan(bins, numbers)(raw)
    np.testing.assert_array_equal(encoded.continuous, numpy_numbers(numbers, raw))
    for column, rows in zip(bins, encoded.categorical.T, strict=True):
        expected = np.digitize(clipped(raw[column.source].astype(np.float64), column), column.boundaries) + FIRST_ROW
        np.testing.assert_array_equal(rows, expected)


def test_no_row_is_beyond_its_table():
    plan = small_plan()
    encoded = plan(COLUMNS)
    n_rows = [plan.rows[column.name] for column in plan.categorical]
    assert (encoded.categorical < n_rows).all()
    assert (encoded.categorical > 0).all()  # row 0 is padding


def test_plan_comes_back_as_saved(tmp_path):
    small_plan().save(tmp_path)
    for wanted, got in zip(small_plan()(COLUMNS)[:2], Plan.load(tmp_path)(COLUMNS)[:2], strict=True):
        np.testing.assert_array_equal(wanted, got)
    assert Plan.load(tmp_path).rows == small_plan().rows
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".json", ".npy")]


def test_a_plan_of_another_version_or_without_its_vocabulary_is_refused(tmp_path):
    small_plan().save(tmp_path)
    (tmp_path / "vocabulary.0.keys.npy").unlink()
    with pytest.raises(ArtifactError, match=r"vocabulary\.0\.keys"):
        Plan.load(tmp_path)
    (tmp_path / "plan.json").write_text('{"categorical": [{"name": "x"}], "continuous": [], "lists": []}')
    with pytest.raises(ArtifactError, match="not a plan of this version"):
        Plan.load(tmp_path)


@pytest.mark.parametrize(
    ("part", "values", "said"),
    [
        ("keys", [MISSING_INT, 9, 4], "is not ascending; expected keys in ascending order"),
        ("keys", [0.0, 4.0, 9.0], r"keys\.npy holds float64 \[3\]; expected int64"),
        ("rows", [1, 3], r"rows\.npy holds int64 \[2\]; expected int64 \[3\]"),
    ],
)
def test_a_broken_vocabulary_is_refused(tmp_path, part, values, said):
    IntegerVocabulary.of(np.array([4, 9]), np.array([3, 4])).save(tmp_path, "v")
    np.save(tmp_path / f"v.{part}.npy", np.array(values))
    with pytest.raises(ArtifactError, match=said):
        IntegerVocabulary.load(tmp_path, "v")


def test_texts_without_their_rows_are_refused(tmp_path):
    StringVocabulary(["a", "b"], np.array([3, 4])).save(tmp_path, "v")
    np.save(tmp_path / "v.rows.npy", np.array([3]))
    with pytest.raises(ArtifactError, match=r"rows\.npy holds int64 \[1\]; expected int64 \[2\]"):
        StringVocabulary.load(tmp_path, "v")
