"""Keep texts in `.npy` files, without pickle, and read texts of requests as those of a data set's files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

from serving.contract.artifacts import REMEDY, open_array
from serving.contract.errors import ArtifactError

MISSING_TEXTS = frozenset(["", "NULL", "null", "NaN", "nan", "NA", "N/A", "\\N"])  # in a data set's files
MISSING_BYTES = frozenset(text.encode() for text in MISSING_TEXTS)


def tidy_bytes(text: bytes) -> bytes:
    """Return a text of a request as the data set's files are read: without spaces around it, b"" for a missing value.

    Spaces are those of Unicode, such as the no-break space. Bytes that are not UTF-8 stay as they are.
    """
    tidied = text.decode(errors="surrogateescape").strip().encode(errors="surrogateescape")
    return b"" if tidied in MISSING_BYTES else tidied


def save_strings(folder: Path, name: str, texts: list[str]) -> None:
    """Write texts as UTF-8 bytes end to end, with offsets: `.npy` files without pickle."""
    encoded = [text.encode() for text in texts]
    np.save(folder / f"{name}.bytes.npy", np.frombuffer(b"".join(encoded), np.uint8))
    np.save(folder / f"{name}.offsets.npy", np.cumsum([0, *map(len, encoded)], dtype=np.int64))


def load_strings(folder: Path, name: str) -> list[str]:
    """Read what `save_strings` wrote. Raises ArtifactError when the files are missing or disagree."""
    blob = open_array(folder, f"{name}.bytes").tobytes()
    offsets = open_array(folder, f"{name}.offsets").tolist()
    if offsets[0] != 0 or offsets[-1] != len(blob):
        raise ArtifactError(f"{folder / name}: the offsets end at {offsets[-1]}, the text at byte {len(blob)}. {REMEDY}")
    return [blob[start:end].decode() for start, end in pairwise(offsets)]
