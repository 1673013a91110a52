"""Data files as columns of text. Everything downstream parses a column's distinct values once, not every row.

    file -> read_columns -> Column (codes, values) -> numbers() / times() / texts() / lists() -> arrays

A Column knows its file, so that whatever cannot be parsed is reported with file, column and row.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from stages.errors import DataError

MISSING_TEXTS = ["", "NULL", "null", "NaN", "nan", "NA", "N/A", "\\N"]
SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")


@dataclass(frozen=True)
class Column:
    """One column of a file: row r holds values[codes[r]], or nothing where codes[r] is -1.

    codes: int64 [n_rows];  values: object [n_distinct] of str;  first_line: line of row 0 in the file, 1-based
    """

    path: Path
    name: str
    codes: np.ndarray
    values: np.ndarray
    first_line: int

    def fault(self, row: int, fact: str, remedy: str) -> DataError:
        """The error for row `row` (0-based): file, column, line in the file, the text there, remedy."""
        text = repr(self.values[self.codes[row]]) if self.codes[row] >= 0 else "nothing"
        return DataError(f"{self.path}: column {self.name!r}, row {row + self.first_line}: {text} {fact}. {remedy}")

    def fault_at_value(self, bad: np.ndarray, fact: str, remedy: str) -> DataError:
        """The error for the first row whose value is marked in `bad`, bool [n_distinct]."""
        row = int(np.argmax(np.append(bad, False)[self.codes]))
        return self.fault(row, fact, remedy)

    @property
    def missing(self) -> np.ndarray:
        """bool [n_rows]."""
        return self.codes < 0

    def texts(self) -> np.ndarray:
        """object [n_rows] of str, None where missing."""
        return np.append(self.values, None)[self.codes]

    def lists(self, separator: str) -> np.ndarray:
        """object [n_rows] of lists of str; empty where missing. Parts are stripped, empty and repeated parts left out."""
        parts = np.empty(len(self.values) + 1, object)
        for position, value in enumerate(self.values):
            parts[position] = list(dict.fromkeys(p.strip() for p in value.split(separator) if p.strip()))
        parts[-1] = []
        return parts[self.codes]

    def numbers(self, missing: float = np.nan) -> np.ndarray:
        """float64 [n_rows]. A text that is not a finite number is an error."""
        parsed = pd.to_numeric(pd.Series(self.values, dtype=object), errors="coerce").to_numpy(np.float64)
        if not np.isfinite(parsed).all():
            raise self.fault_at_value(
                ~np.isfinite(parsed),
                "is not a number",
                "Write numbers like 12.5 (decimal point, no unit); leave unknown ones empty.",
            )
        return np.append(parsed, missing)[self.codes]

    def flags(self) -> np.ndarray:
        """bool [n_rows] of 0/1 or true/false; missing is True."""
        known = {"1": True, "0": False, "true": True, "false": False, "1.0": True, "0.0": False}
        parsed = [known.get(value.strip().lower()) for value in self.values]
        bad = np.array([flag is None for flag in parsed], bool)
        if bad.any():
            raise self.fault_at_value(bad, "is neither 0 nor 1", "Write 0 or 1 (or true, false).")
        return np.append(np.array(parsed, bool), True)[self.codes]


def read_columns(path: Path, names: list[str]) -> dict[str, Column]:
    """The named columns of a file, keyed by name. Raises DataError when file or column is not there or not readable."""
    if not path.name.lower().endswith(SUFFIXES):
        raise DataError(
            f"{path}: the kind of file is unknown. Expected a name ending in {', '.join(SUFFIXES)}: convert or rename it."
        )
    names = list(dict.fromkeys(names))
    if path.name.lower().endswith(".parquet"):
        return _read_parquet(path, names)
    return _read_text(path, names, "\t" if ".tsv" in path.name.lower() else ",")


def _read_text(path: Path, names: list[str], separator: str) -> dict[str, Column]:
    settings = dict(sep=separator, encoding="utf-8-sig", keep_default_na=False, na_values=MISSING_TEXTS, skip_blank_lines=False)
    try:
        header = pd.read_csv(path, nrows=0, **settings).columns.tolist()
        _check_columns(path, names, header)
        frame = pd.read_csv(path, usecols=names, dtype="category", **settings)
    except pd.errors.EmptyDataError as error:
        raise DataError(f"{path} is empty. Expected a header line with {', '.join(names)}, then one row per line.") from error
    except pd.errors.ParserError as error:
        reason = str(error).removeprefix("Error tokenizing data. C error: ").strip()
        raise DataError(
            f"{path}: {reason}. Quote values that contain the separator {separator!r}, or mend the line."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}). Save or convert it as UTF-8."
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} is not a complete gzip file ({error}). Compress it again, or drop .gz from its name."
        ) from error
    columns = {}
    for name in names:
        series = frame.pop(name)
        columns[name] = Column(path, name, series.cat.codes.to_numpy(np.int64), np.array(series.cat.categories, object), 2)
    return columns


def _read_parquet(path: Path, names: list[str]) -> dict[str, Column]:
    try:
        _check_columns(path, names, pq.read_schema(path).names)
        table = pq.read_table(path, columns=names)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a parquet file ({error}). Write it again, or name it after its kind.") from error
    columns = {}
    for name in names:
        kind = table.schema.field(name).type
        if pa.types.is_nested(kind):
            raise DataError(
                f"{path}: column {name!r} holds {kind}. Expected plain values: join lists to one text with a separator."
            )
        series = table.column(name).to_pandas()
        codes, values = pd.factorize(series.where(~series.isin(MISSING_TEXTS)) if series.dtype == object else series)
        columns[name] = Column(path, name, codes.astype(np.int64), np.array([_text_of(v) for v in values], object), 1)
    return columns


def _text_of(value: object) -> str:
    """A parquet value as the text a CSV would hold: 3.0 is "3" (integers with gaps are stored as floats), times are ISO."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, (bool, np.bool_)):
        return str(int(value))
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _check_columns(path: Path, names: list[str], header: list[str]) -> None:
    absent = [name for name in names if name not in header]
    if not absent:
        return
    for separator, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars"), (",", "commas")):
        if len(header) == 1 and separator in header[0]:
            raise DataError(
                f"{path}: column {absent[0]!r} is not there: row 1 is one column, {header[0]!r}, separated by {word}. "
                "Expected commas in .csv and tabs in .tsv: convert or rename the file."
            )
    raise DataError(
        f"{path}: column {absent[0]!r} is not there. Row 1 has: {', '.join(header)}. Mend the name in dataset.toml or the file."
    )
