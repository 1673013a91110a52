"""Read data files as columns of text, so that later steps parse each distinct value of a column once, not every row.

    file -> read_columns -> Column (codes, values) -> numbers() / times() / texts() / lists() -> arrays

A Column knows its file, so that parse errors name file, column and row.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from serving.contract.errors import DataError
from serving.contract.texts import MISSING_TEXTS

BLOCK_BYTES = 16 << 20  # a row must fit into it
SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
GZIP = b"\x1f\x8b"  # first bytes of a compressed file
LARGEST_NUMBER = float(np.finfo(np.float32).max)

csv.field_size_limit(BLOCK_BYTES)  # csv refuses fields above 128 KiB by default


@dataclass(frozen=True)
class Column:
    """One column of a file: row r holds values[codes[r]] (stripped), or nothing where codes[r] is -1.

    codes: int64 [n_rows];  values: object [n_distinct] of str
    """

    path: Path
    name: str
    codes: np.ndarray
    values: np.ndarray

    def make_fault(self, row: int, fact: str, remedy: str) -> DataError:
        """Return the error for row `row` (0-based), with file, column, line, text and remedy."""
        text = repr(self.values[self.codes[row]]) if self.codes[row] >= 0 else "nothing"
        return DataError(f"{self.path}: column {self.name!r}, row {find_line(self.path, row)}: {text} {fact}. {remedy}")

    def make_fault_at_value(self, bad: np.ndarray, fact: str, remedy: str) -> DataError:
        """Return the error for the first row whose value is marked in `bad`, bool [n_distinct]."""
        row = int(np.argmax(np.append(bad, False)[self.codes]))
        return self.make_fault(row, fact, remedy)

    @property
    def missing(self) -> np.ndarray:
        """Return which rows are missing, bool [n_rows]."""
        return self.codes < 0

    def read_texts(self) -> np.ndarray:
        """Return object [n_rows] of str, None where missing."""
        return np.append(self.values, np.array([None], object))[self.codes]

    def read_lists(self, separator: str) -> np.ndarray:
        """Return object [n_rows] of lists of str, empty where missing.

        Parts are stripped; empty and repeated parts are dropped.
        """
        parts = np.empty(len(self.values) + 1, object)
        for position, value in enumerate(self.values):
            parts[position] = list(dict.fromkeys(p.strip() for p in value.split(separator) if p.strip()))
        parts[-1] = []
        return parts[self.codes]

    def read_numbers(self, missing: float = np.nan) -> np.ndarray:
        """Return float64 [n_rows], within the range of float32. Raises DataError for other numbers and other texts."""
        parsed = pd.to_numeric(pd.Series(self.values, dtype=object), errors="coerce").to_numpy(np.float64)
        bad = ~(np.abs(parsed) <= LARGEST_NUMBER)  # also NaN
        if bad.any():
            raise self.make_fault_at_value(
                bad,
                "is not a number, or is beyond 3.4e38",
                "Write numbers like 12.5 (decimal point, no unit); leave unknown ones empty.",
            )
        return np.append(parsed, missing)[self.codes]

    def read_prices(self) -> np.ndarray:
        """Return float64 [n_rows], NaN where missing. Raises DataError for a negative price too."""
        prices = self.read_numbers()
        if (prices < 0).any():
            row = int(np.argmax(prices < 0))
            raise self.make_fault(row, "is below 0", "Write prices of 0 or more; leave unknown ones empty.")
        return prices

    def read_flags(self) -> np.ndarray:
        """Return bool [n_rows] of 0/1 or true/false; missing is True. Raises DataError for other texts."""
        flag_of_text = {"1": True, "0": False, "true": True, "false": False, "1.0": True, "0.0": False}
        parsed = [flag_of_text.get(value.lower()) for value in self.values]
        bad = np.array([flag is None for flag in parsed], bool)
        if bad.any():
            raise self.make_fault_at_value(bad, "is neither 0 nor 1", "Write 0 or 1 (or true, false).")
        return np.append(np.array(parsed, bool), True)[self.codes]


def read_columns(path: Path, names: list[str]) -> dict[str, Column]:
    """Return the named columns of a file. Raises DataError when the file or a column is missing or unreadable."""
    if not path.name.lower().endswith(SUFFIXES):
        raise DataError(f"{path}: the kind of file is unknown. Expected one of {', '.join(SUFFIXES)}: convert or rename it.")
    names = list(dict.fromkeys(names))
    return _read_parquet(path, names) if _is_parquet(path) else _read_text(path, names)


def find_line(path: Path, row: int) -> int:
    """Return the line of the n-th data row (0-based) in a text file, or its row in a parquet file, 1-based.

    Reads a text file again, because blank lines and quoted line breaks shift the count; only errors need it.
    """
    if _is_parquet(path):
        return row + 1
    with _open_text(path) as stream:
        reader = csv.reader(stream, delimiter=_find_separator(path))
        before = 0  # lines read before the record
        rows_to_pass = row + 1  # the header is one
        for record in reader:
            if record and rows_to_pass == 0:
                break
            rows_to_pass -= bool(record)
            before = reader.line_num
    return before + 1


def _is_parquet(path: Path) -> bool:
    return path.name.lower().endswith(".parquet")


def _find_separator(path: Path) -> str:
    return "\t" if ".tsv" in path.name.lower() else ","


def _open_text(path: Path) -> TextIO:
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    return opener(path, "rt", encoding="utf-8-sig", errors="replace", newline="")


def _read_text(path: Path, names: list[str]) -> dict[str, Column]:
    try:
        with path.open("rb") as raw:
            if raw.read(2) == GZIP and not path.name.lower().endswith(".gz"):
                raise DataError(f"{path} is gzip without the ending .gz. Rename it to {path.name}.gz, also in dataset.toml.")
        with _open_text(path) as stream:
            header = next(csv.reader(stream, delimiter=_find_separator(path)), [])
        if any("\0" in name for name in header):
            raise DataError(f"{path}: row 1 holds zero bytes, as in UTF-16. Expected UTF-8: save or convert the file as UTF-8.")
        if not header:
            raise DataError(f"{path} is empty. Expected {', '.join(names)} in row 1, then one row for each entry.")
        _check_columns(path, names, header)
        compression = "gzip" if path.name.lower().endswith(".gz") else None  # Arrow itself knows .gz in small letters only
        table = pacsv.read_csv(
            pa.input_stream(str(path), compression=compression),
            pacsv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),  # one thread: errors name the row
            pacsv.ParseOptions(delimiter=_find_separator(path), newlines_in_values=True),
            pacsv.ConvertOptions(
                include_columns=names,
                column_types={name: pa.dictionary(pa.int32(), pa.string()) for name in names},
            ),
        ).unify_dictionaries()
    except pa.ArrowInvalid as error:
        raise _explain_unreadable(path, str(error)) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read to its end: {error}. Compress it again, or correct its name.") from error
    columns = {}
    for name in names:
        chunks = table.column(name).chunks  # they share one dictionary now
        codes = np.concatenate([chunk.indices.to_numpy() for chunk in chunks]) if chunks else np.empty(0, np.int64)
        texts = chunks[0].dictionary.to_pylist() if chunks else []
        if _find_separator(path) == "\t":
            _refuse_swallowed_rows(path, name, codes, texts)
        columns[name] = _make_column(path, name, codes, texts)
    return columns


def _refuse_swallowed_rows(path: Path, name: str, codes: np.ndarray, texts: list[str]) -> None:
    """Raise DataError where a tsv value holds rows. Programs that write tab-separated values often leave quotes as they are."""
    swallows = np.array(["\t" in text and "\n" in text for text in texts], bool)
    if swallows.any():
        row = int(np.argmax(swallows[codes]))
        raise DataError(
            f"{path}: column {name!r}, row {find_line(path, row)}: a quote at the beginning takes the next rows into the "
            "value. Write the value in quotes, and double those in it."
        )


def _make_column(path: Path, name: str, codes: np.ndarray, texts: list[str]) -> Column:
    """Build a Column from stripped texts. codes: int [n_rows] into `texts`, -1 = missing, as are MISSING_TEXTS."""
    values = np.array([text.strip() for text in texts], object)
    present = np.array([value not in MISSING_TEXTS for value in values], bool)
    new_codes = np.append(np.where(present, np.cumsum(present) - 1, -1), -1)
    return Column(path, name, new_codes[codes], values[present])


def _explain_unreadable(path: Path, reason: str) -> DataError:
    """Return Arrow's error as a DataError. Arrow's row number skips blank lines: the line of the file replaces it."""
    reason = reason.removeprefix("CSV parse error: ")
    reason = re.sub(r"Row #(\d+)", lambda match: f"row {find_line(path, int(match[1]) - 2)}", reason)
    if "UTF8" in reason:
        row = re.search(r"row \d+", reason)
        return DataError(
            f"{path}: {row[0] if row else 'a row'} is not UTF-8. Expected UTF-8: save or convert the file as UTF-8."
        )
    first_line, line_break, _ = reason.partition("\n")  # a quote without an end takes the lines that follow into its value
    remedy = f"Quote values that hold the separator {_find_separator(path)!r}, close every quote, or correct that row"
    return DataError(
        f"{path}: {first_line}{' …' if line_break else ''}. {remedy}; .csv files are separated by commas, .tsv files by tabs."
    )


def _read_parquet(path: Path, names: list[str]) -> dict[str, Column]:
    try:
        _check_columns(path, names, pq.read_schema(path).names)
        table = pq.read_table(path, columns=names)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a parquet file ({error}). Write it again, or name it after its kind.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read to its end ({error}). Write or copy it again.") from error
    columns = {}
    for name in names:
        kind = table.schema.field(name).type
        if pa.types.is_dictionary(kind):  # a categorical column
            kind = kind.value_type
        if pa.types.is_nested(kind) or kind in (pa.binary(), pa.large_binary()) or pa.types.is_fixed_size_binary(kind):
            raise DataError(
                f"{path}: column {name!r} holds {kind}. Expected plain values: join lists to one text with a separator, "
                "and write bytes as text."
            )
        series = _convert_to_pandas(path, name, table.column(name))
        codes, values = pd.factorize(series.array)
        columns[name] = _make_column(path, name, codes, [_write_text(value) for value in values])
    return columns


def _convert_to_pandas(path: Path, name: str, column: pa.ChunkedArray) -> pd.Series:
    """Convert a column of a parquet file. Years that pandas cannot hold, such as 9999, do not stop it."""
    try:
        return column.to_pandas(integer_object_nulls=True)  # as floats, large ids would lose digits
    except pa.ArrowInvalid:
        try:
            return column.to_pandas(timestamp_as_object=True)
        except ValueError as error:
            raise DataError(f"{path}: column {name!r}: {error}. Correct such times, or leave out their rows.") from error


def _write_text(value: object) -> str:
    """Return a parquet value as CSV text: 3.0 is "3" (pandas writes integers with gaps as floats), times are ISO."""
    if isinstance(value, float | np.floating) and value.is_integer():
        return str(int(value))
    if isinstance(value, (bool, np.bool_)):
        return str(int(value))
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _check_columns(path: Path, names: list[str], header: list[str]) -> None:
    twice = next((name for name in names if header.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}: row 1 has the column {twice!r} more than once. Rename or remove one of them.")
    absent = [name for name in names if name not in header]
    if not absent:
        return
    for separator, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars"), (",", "commas")):
        if len(header) == 1 and separator in header[0]:
            raise DataError(
                f"{path}: column {absent[0]!r} is not there: row 1 is one column, {header[0]!r}, separated by {word}. "
                "Expected commas in .csv and tabs in .tsv: convert or rename the file."
            )
    names_there = ", ".join(map(repr, header))
    is_utf8 = not any("\ufffd" in name for name in header)  # what reading puts in place of other bytes
    remedy = "Correct the name in dataset.toml or the file" if is_utf8 else "It is not UTF-8: save or convert the file as UTF-8"
    raise DataError(f"{path}: column {absent[0]!r} is not there. Row 1 has: {names_there}. {remedy}.")
