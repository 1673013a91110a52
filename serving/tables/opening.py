"""Open the tables of a stage: with the levels of its `levels.json`, or all of them whole in shared memory."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from serving.contract.artifacts import REMEDY, open_array
from serving.contract.errors import ArtifactError
from serving.tables.config import EXACT, LevelsConfig, TableConfig, read_config
from serving.tables.leveled import CONFIG_FILE, LeveledTables


def open_tables(folder: Path, model: str, needed: Sequence[str] = (), as_exported: bool = False) -> LeveledTables:
    """Open the tables of `folder`: <table>.npy files, float32 [rows, D], and perhaps levels.json.

    model: the name of the tables' model where there is no levels.json
    as_exported: read only the files. This is slower, and does not see rows that updates have changed since the export

    Raises ArtifactError when one of the `needed` tables is missing or broken, ConfigError for bad settings.
    """
    config = read_config(folder / CONFIG_FILE) if (folder / CONFIG_FILE).exists() else plan_in_memory(folder, model)
    if missing := set(needed) - {table.name for table in config.tables}:
        raise ArtifactError(f"{folder} lacks the tables {sorted(missing)}. {REMEDY}")
    return LeveledTables(keep_to_files(config, folder) if as_exported else config)


def keep_to_files(config: LevelsConfig, folder: Path) -> LevelsConfig:
    """Return settings that read rows from the files in `folder` alone, in the row formats of `config`.

    Servers of the same tables on this machine share rows in memory, a database and updates. With these settings nothing is
    shared.
    """
    tables = tuple(replace(table, l2_rows=0) for table in config.tables)
    own_arena = f"{config.arena}-{os.getpid()}-{secrets.token_hex(4)}"
    alone = replace(config, tables=tables, arena=own_arena, source=str(folder), hit_rate_threshold=EXACT)
    return replace(alone, redis=None, rocksdb=None, updates=None)


def plan_in_memory(folder: Path, model: str) -> LevelsConfig:
    """Return settings for complete tables in shared memory, with one copy for all instances that open the same files.

    Raises ArtifactError if there is no table, or one has another shape than [rows, D].
    """
    names = sorted(path.stem for path in folder.glob("*.npy"))
    if not names:
        raise ArtifactError(f"{folder} holds no embedding table; expected <table>.npy files. {REMEDY}")
    shapes = {name: open_array(folder, name, "r").shape for name in names}
    if wrong := [name for name, shape in shapes.items() if len(shape) != 2]:
        raise ArtifactError(f"{folder / wrong[0]}.npy has shape {list(shapes[wrong[0]])}; expected [rows, D]. {REMEDY}")
    tables = tuple(TableConfig(name, rows, width, l2_rows=rows) for name, (rows, width) in shapes.items())
    return LevelsConfig(model, tables, name_arena(folder, names), source=str(folder))


def name_arena(folder: Path, names: list[str]) -> str:
    """Return an arena name that depends on the files, so that another export gets its own rows."""
    stats = {name: (folder / f"{name}.npy").stat() for name in names}
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
    return hashlib.blake2b(repr((str(folder.resolve()), facts)).encode(), digest_size=12).hexdigest()
