"""Plan and write the ranker's embedding tables: budgets -> plan -> ps.json -> levels.json.

<rank's version folder>/tables/
    <table>.npy   float32 [rows, D], as trained
    ps.json       budgets, levels and row formats in NVIDIA's schema (hps_config/)
    levels.json   the same for serving/tables, which does not import hps_config

The model's name is a digest of the tables (`rank-<digest>`), so that generations, or shops on one Kafka, never mix rows. The
names of the rows in memory and of the database have a digest of the settings as well: one updater writes them, and only those.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from export.settings import TableSettings
from hps_config.description import HpsDescription
from hps_config.levels import convert_levels
from hps_config.planning import Plan, plan_levels
from hps_config.ps_writer import write_ps_json
from hps_config.reader import check_ps_json, read_ps_json
from hps_config.report import format_bytes
from repository.checks.finding import Finding, count_errors
from serving.contract.artifacts import compute_sha256, open_array
from serving.contract.errors import ConfigError
from serving.tables.config import EXACT, LevelsConfig, TableConfig, read_config
from serving.tables.leveled import CONFIG_FILE
from serving.tables.store.row_formats import RowCodec
from serving.tables.store.table import make_l1_sections

if TYPE_CHECKING:
    from training.features.build import Features

MODEL, PS_FILE = "rank", "ps.json"
STATE_FOLDER = "recommender-tables"  # in the temporary folder of the serving machine, unless [tables] state names another


def find_shapes(features: Features, width: int) -> dict[str, tuple[int, int]]:
    """Return table -> (rows, D) of the tables that `save_ranker` will write after training."""
    from training.models.rankers.ranking_data import make_served_items  # only now: `make check` needs no pandas

    rows = {f"user_{slot}": n_rows for slot, n_rows in enumerate(features.user_rows.values())}
    slots = make_served_items(features).rows
    for slot, (n_rows, table_rows) in enumerate(zip(features.item_rows.values(), slots, strict=True)):
        rows[f"item_{slot}"] = n_rows if table_rows.shape[1] == 1 else table_rows.shape[0]  # lists become one row per item
    return {name: (n_rows, width) for name, n_rows in rows.items()}


def plan_tables(
    settings: TableSettings, shapes: Mapping[str, tuple[int, int]], instances: int, samples: int, model: str = MODEL
) -> tuple[HpsDescription, Plan]:
    """Plan the tables. shapes: table -> (rows, D); samples: (user, candidate) pairs of the largest batch.

    RocksDB is part of the plan when something needs it: rows that do not fit L2, or live updates that must not be lost.
    Otherwise the published tables are the complete level on disk, and nothing is written on the serving machine.
    Raises ConfigError, with what would fit, when the budgets do not.
    """
    if unknown := sorted(settings.row_formats.keys() - shapes.keys()):
        raise ConfigError(f"[tables] row_formats names {', '.join(unknown)}. The ranker's tables are {', '.join(shapes)}.")
    description = describe_tables(settings, shapes, instances, samples, model)
    plan = plan_levels(description.tables, description.budgets)
    if plan.l2_complete and not settings.brokers:
        description = description.model_copy(update={"budget": description.budget.model_copy(update={"l3": 0})})
        plan = plan_levels(description.tables, description.budgets)
    return description, plan


def describe_tables(
    settings: TableSettings, shapes: Mapping[str, tuple[int, int]], instances: int, samples: int, model: str
) -> HpsDescription:
    """Convert [tables] of the export's settings to a description for hps_config."""
    state = settings.state or STATE_FOLDER
    formats = {name: settings.row_formats.get(name, settings.row_format) for name in shapes}
    return HpsDescription.model_validate(
        {
            "model": model,
            "budget": {"l1": settings.l1, "l2": settings.l2, "l3": settings.l3},
            "serving": {
                "instances": instances,
                "max_batch_size": samples,
                "hit_rate_threshold": settings.hit_rate_threshold,
            },
            "volatile": {"type": "redis_cluster", "address": settings.redis} if settings.redis else {},
            "persistent": {"path": f"{state}/{model}"},
            "updates": {"brokers": settings.brokers},
            "tables": [
                {"name": name, "rows": rows, "width": width, "row_format": formats[name]}
                for name, (rows, width) in shapes.items()
            ],
        }
    )


def write_tables(folder: Path, settings: TableSettings, instances: int, samples: int) -> tuple[dict[str, int], str]:
    """Write ps.json and levels.json beside the tables in `folder`. Return bytes by level, and a line for people.

    Raises ConfigError when the tables do not fit the budgets, DataError when a row format cannot hold a value.
    """
    arrays = {path.stem: open_array(folder, path.stem, "r") for path in sorted(folder.glob("*.npy"))}
    shapes = {name: (len(array), array.shape[1]) for name, array in arrays.items()}
    digest = compute_digest(folder, arrays)
    description, plan = plan_tables(settings, shapes, instances, samples, f"{MODEL}-{digest}")
    write_ps_json(folder / PS_FILE, description, plan)
    config = read_stated_levels(folder / PS_FILE, arrays, digest)
    config = replace(config, tables=tuple(set_mean_default(table, arrays[table.name]) for table in config.tables))
    separate(config).write(folder / CONFIG_FILE)
    return make_report(config, plan)


def separate(config: LevelsConfig) -> LevelsConfig:
    """Return settings whose rows in memory and whose database no repository with other settings shares.

    An updater writes the rows in its own layout, and to its own levels. L1 and the threshold are not shared anyway.
    """
    tables = tuple(replace(table, l1_rows=0) for table in config.tables)
    shared = repr(replace(config, tables=tables, hit_rate_threshold=EXACT))
    digest = hashlib.sha256(shared.encode()).hexdigest()[:8]
    rocksdb = config.rocksdb and replace(config.rocksdb, path=f"{config.rocksdb.path}-{digest}")
    return replace(config, arena=f"{config.arena}-{digest}", rocksdb=rocksdb)


def read_stated_levels(ps_file: Path, arrays: Mapping[str, np.ndarray], digest: str) -> LevelsConfig:
    """Return the levels that ps.json states. Their default rows are numbers: it cannot state vectors."""
    rows = {name: len(array) for name, array in arrays.items()}
    return convert_levels(read_ps_json(ps_file), f"{MODEL}-{digest}", digest, rows, source=".")


def check_tables(folder: Path) -> list[Finding]:
    """Return findings about the tables in `folder`."""
    findings = [replace(finding, where=f"{PS_FILE} {finding.where}") for finding in check_ps_json(folder / PS_FILE)]
    if count_errors(findings):
        return findings
    written_levels = read_config(folder / CONFIG_FILE)
    arrays = {table.name: open_array(folder, table.name, "r") for table in written_levels.tables}
    stated_levels = read_stated_levels(folder / PS_FILE, arrays, written_levels.model.removeprefix(f"{MODEL}-"))
    plain = tuple(replace(table, default=stated_levels.tables[0].default) for table in written_levels.tables)
    # ps.json names neither the rows in memory nor our database
    stated_levels = replace(stated_levels, arena=written_levels.arena, rocksdb=written_levels.rocksdb)
    if replace(written_levels, tables=plain, source=".") != stated_levels:
        fact = f"differs from {PS_FILE}"
        remedy = "Expected the same tables and levels. Export the repository again."
        findings.append(Finding("error", CONFIG_FILE, fact, remedy))
    if written_levels.rocksdb and Path(tempfile.gettempdir()) in Path(written_levels.rocksdb.path).parents:
        contents = "updates" if written_levels.updates else "rows"
        fact = f"keeps {contents} in {written_levels.rocksdb.path}, which may not outlive a reboot or a clean-up of old files"
        findings.append(Finding("warning", CONFIG_FILE, fact, "Set [tables] state, and export again."))
    return findings


def compute_digest(folder: Path, tables: Mapping[str, np.ndarray]) -> str:
    """Return a digest of the tables, 12 hex digits."""
    contents = "".join(f"{name} {compute_sha256(folder / f'{name}.npy')}\n" for name in tables)
    return hashlib.sha256(contents.encode()).hexdigest()[:12]


def set_mean_default(table: TableConfig, array: np.ndarray) -> TableConfig:
    """Return the config with the mean row as default row; ps.json can only state one number for all columns."""
    RowCodec(table.row_format, table.width).encode(array)  # raises for values that the format cannot hold
    return replace(table, default=tuple(array.mean(axis=0, dtype=np.float64).astype(np.float32).tolist()))


def make_report(config: LevelsConfig, plan: Plan) -> tuple[dict[str, int], str]:
    """Return bytes by level, and a line for people."""
    l1_bytes = sum(make_l1_sections(table).nbytes for table in config.tables if table.l1_rows)
    sizes = {"l1_bytes_per_process": l1_bytes, "l2_bytes": plan.l2_bytes, "l3_bytes": plan.l3_bytes}
    rows, formats = sum(planned.table.rows for planned in plan.tables), {planned.table.row_format for planned in plan.tables}
    tables = f"tables: {len(plan.tables)} of {rows:,} rows ({', '.join(sorted(formats))})"
    memory = f", {format_bytes(plan.l2_bytes)} in memory" + (", all rows" if plan.l2_complete else "")
    disk = f", {format_bytes(plan.l3_bytes)} in RocksDB" if plan.l3_bytes else ""
    return sizes, tables + memory + disk
