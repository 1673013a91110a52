"""Write the ranker's training requests as HugeCTR reads them: Parquet, one row per (request, candidate).

<folder>/train/*.parquet, validation/*.parquet     label, numbers, keys (offset per slot; lists as lists)
<folder>/<part>/_metadata.json, _file_list.txt     required by HugeCTR's Parquet reader
<folder>/dlrm_inputs.json                          names of the inputs, for the import (inputs.py)
<folder>/training.json                             sizes, for export/nvidia/hugectr/container/train_dlrm.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from export.nvidia.hugectr.inputs import Inputs
from serving.contract.errors import DataError
from serving.contract.tensors import PAD_ROW
from training.models.rankers.ranking_data import Requests
from training.models.rankers.train_ranker import RankerSettings

NAME, LABEL = "dlrm", "label"


def write_training_data(
    folder: Path,
    teaching: Sequence[Requests],
    validation: Requests,
    inputs: Inputs,
    settings: RankerSettings,
    rng: np.random.Generator,
) -> dict[str, int]:
    """Write training and validation rows. Return their number by part. inputs: in the order of the requests' columns.

    Raises DataError when no candidate was taken.
    """
    parts = {"train": teaching, "validation": [validation]}
    rows = {part: _write_part(folder / part, requests, inputs, settings, rng) for part, requests in parts.items()}
    if not all(rows.values()):
        raise DataError(f"The log leaves {rows} rows to train on. Expected some of both. Use a log in which users come back.")
    inputs.write(folder / f"{NAME}_inputs.json")
    lengths = [1] * len(inputs.user_slots) + [slot.shape[1] for slot in validation.items.rows]
    sizes = {
        "dense_dim": len(inputs.numbers),
        "nnz_per_slot": lengths,
        "vocabulary": sum(slot.rows for slot in inputs.slots),
        "width": settings.width,
        "bottom": [*settings.bottom, settings.width],
        "top": [*settings.top, 1],
        "rows": rows,
    }
    (folder / "training.json").write_text(json.dumps(sizes, indent=1) + "\n")
    return rows


def _write_part(
    folder: Path, parts: Sequence[Requests], inputs: Inputs, settings: RankerSettings, rng: np.random.Generator
) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    tables = [_make_table(part, inputs, settings, rng) for part in parts]
    files = {f"{number}.parquet": table for number, table in enumerate(tables) if table.num_rows}
    for name, table in files.items():
        pq.write_table(table, folder / name)
    names = [LABEL, *map(name_column, inputs.numbers), *(name_column(slot.name) for slot in inputs.slots)]
    kinds = {"labels": slice(0, 1), "conts": slice(1, 1 + len(inputs.numbers)), "cats": slice(1 + len(inputs.numbers), None)}
    metadata = {"file_stats": [{"file_name": name, "num_rows": table.num_rows} for name, table in files.items()]}
    indexed = [{"col_name": name, "index": index} for index, name in enumerate(names)]
    metadata |= {kind: indexed[columns] for kind, columns in kinds.items()}
    (folder / "_metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    (folder / "_file_list.txt").write_text("\n".join([str(len(files)), *(f"./{folder.name}/{name}" for name in files), ""]))
    return sum(table.num_rows for table in files.values())


def name_column(name: str) -> str:
    """Return a column's name in the Parquet file, without dots: readers take those for nested columns."""
    return name.replace(".", "_")


def _make_table(part: Requests, inputs: Inputs, settings: RankerSettings, rng: np.random.Generator) -> pa.Table:
    """Return rows of the requests with a taken candidate: every taken one, and a sample of the others."""
    request, candidate = np.nonzero(_sample_candidates(part, settings.candidates_per_request, rng))
    items = part.candidates[request, candidate]
    numbers = np.concatenate(
        [part.users.user_continuous[request], part.items.numbers[items], part.cross[request, candidate]], axis=1
    )
    keys = [part.users.user_categorical[request, slot, None] for slot in range(len(inputs.user_slots))]
    lists = [(rows[items], rows.shape[1]) for rows in part.items.rows]
    keys += [np.pad(rows, ((0, 0), (0, longest - rows.shape[1])), constant_values=PAD_ROW) for rows, longest in lists]
    columns = {LABEL: pa.array(part.taken[request, candidate].astype(np.float32))}
    columns |= {name_column(name): pa.array(numbers[:, i].astype(np.float32)) for i, name in enumerate(inputs.numbers)}
    columns |= {name_column(slot.name): _make_keys(rows, slot.first_key) for slot, rows in zip(inputs.slots, keys, strict=True)}
    return pa.table(columns)


def _sample_candidates(part: Requests, width: int, rng: np.random.Generator) -> np.ndarray:
    """Return bool [N, C], at most `width` per request: all taken candidates and a random sample of the others."""
    order = rng.random(part.taken.shape) + 2.0 * ~part.valid - part.taken
    rank = np.argsort(np.argsort(order, axis=1), axis=1)
    return (rank < width) & part.valid & part.taken.any(axis=1, keepdims=True)


def _make_keys(rows: np.ndarray, first_key: int) -> pa.Array:
    """Return int64 keys [N], or lists of them. rows: int [N, L] of a slot's table, padded with PAD_ROW where L > 1."""
    if rows.shape[1] == 1:
        return pa.array(rows[:, 0].astype(np.int64) + first_key)
    is_row = rows != PAD_ROW
    offsets = np.concatenate([[0], np.cumsum(is_row.sum(axis=1))]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(rows[is_row].astype(np.int64) + first_key))
