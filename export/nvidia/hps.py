"""Write the one table that the `hps` backend serves, with the rows of all slots, and the ps.json that names it.

HPS answers with flat rows. With one table they come in the order of the request's keys, so that the network reads them with a
single reshape. A key is the first key of its slot's own table plus the row there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sized
from pathlib import Path

import numpy as np

from export.nvidia.hugectr.model import compute_slot_offsets
from export.settings import Settings
from export.tables import plan_tables
from hps_config.description import PersistentSection
from hps_config.planning import plan_levels
from hps_config.ps_writer import name_sparse_folder, write_ps_json
from hps_config.tables import TableSpec
from repository.triton.config import Serving
from serving.contract.artifacts import open_array
from serving.stages.features.ranking import SCALE
from serving.stages.parts.specs import RANK_EMBEDDINGS
from serving.tables.formats.sparse_folder import write_sparse_folder

PS_FILE = "ps.json"
STATE_ROOT = "/var/lib/hps"  # in the container, unless [tables] state is absolute


def name_table(tables: dict[str, np.ndarray]) -> str:
    """Return a name that depends on the table's content, because the same key means another row in another export.

    HPS stores rows under the names of model and table, and servers may share a Redis cluster, a RocksDB folder or a Kafka.
    """
    digest = hashlib.sha256()
    for name, table in tables.items():
        digest.update(f"{name} {table.shape} ".encode())
        digest.update(np.ascontiguousarray(table, "<f4").data)
    return f"rank-{digest.hexdigest()[:12]}"


def write_table(folder: Path, tables: dict[str, np.ndarray], use_counts: dict[str, np.ndarray]) -> dict[str, int]:
    """Write the sparse folder into a version folder of `rank_embeddings`. Return the first key of each slot's table."""
    rows = np.concatenate(list(tables.values()))
    counts = np.concatenate([use_counts[name] for name in tables])
    write_sparse_folder(folder / name_sparse_folder(name_table(tables)), np.arange(len(rows)), rows, counts)
    return compute_slot_offsets(tables)


def read_uses(folder: Path, tables: Mapping[str, Sized], item_tables: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return the result of `estimate_uses` for a version folder of `rank` or `rank_features`."""
    popularity = np.asarray(open_array(folder, "popularity"))[:, 0]
    return estimate_uses(tables, item_tables, np.asarray(open_array(folder, "item_rows")), popularity)


def estimate_uses(
    tables: Mapping[str, Sized], item_tables: tuple[str, ...], item_rows: np.ndarray, popularity: np.ndarray
) -> dict[str, np.ndarray]:
    """Return how often each row will be read, up to a factor, float64 [rows] by table: HPS fills its cache hottest first.

    tables: name -> its rows, in slot order; item_rows: int [n_items + 1, Si];
    popularity: float32 [n_items + 1] scaled logarithm of how often each item was taken.
    An item's count goes to each of its rows. Users' rows are numbered by falling frequency, so the r-th counts 1 / r.
    """
    times_taken = np.expm1(popularity.astype(np.float64) / SCALE).clip(min=0.0)
    uses = {}
    for name, table in tables.items():
        if name in item_tables:
            uses[name] = np.bincount(item_rows[:, item_tables.index(name)], times_taken, len(table))
        else:
            uses[name] = times_taken.sum() / np.arange(1, len(table) + 1)
    return uses


def write_ps(
    path: Path, settings: Settings, tables: dict[str, np.ndarray], keys_per_request: int, generation: int, serving: Serving
) -> None:
    """Write ps.json. tables: those of all slots, float32 [rows, D]. Raises ConfigError when a budget is too small."""
    budgets = settings.tables.model_copy(update={"row_format": "fp32", "row_formats": {}})  # the only format of HPS
    samples, name = serving.max_batch_size, name_table(tables)
    n_rows, width = sum(map(len, tables.values())), next(iter(tables.values())).shape[1]
    description, plan = plan_tables(budgets, {name: (n_rows, width)}, serving.instances, samples, RANK_EMBEDDINGS)
    table = TableSpec(name=name, rows=n_rows, width=width, keys_per_sample=keys_per_request)
    description = description.model_copy(
        update={
            "sparse_root": f"{settings.merlin.mount}/{RANK_EMBEDDINGS}/{generation}",
            "serving": description.serving.model_copy(update={"devices": [settings.merlin.gpu]}),
            "persistent": PersistentSection(path=str(Path(STATE_ROOT, description.persistent.path))),
            "tables": (table,),
        }
    )
    plan = plan_levels(description.tables, plan.budgets)
    write_ps_json(path, description, plan)
