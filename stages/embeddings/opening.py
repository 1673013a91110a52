"""The tables of a stage, as its kernel opens them: the tiers of its `tiers.json`, or every table whole in shared memory."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from stages.artifacts import REMEDY, open_array
from stages.embeddings.config import TableConfig, TiersConfig
from stages.embeddings.memory import ARENA_PREFIX
from stages.embeddings.table import l2_sections, ring_sections
from stages.embeddings.tiers import CONFIG_FILE, Tiers
from stages.errors import ArtifactError

SHARED_MEMORY = "/dev/shm"


def open_tables(folder: Path, model: str) -> Tiers:
    """`folder` holds <table>.npy files, float32 [rows, D], and perhaps tiers.json. Raises ArtifactError and ConfigError."""
    if (folder / CONFIG_FILE).exists():
        return Tiers.load(folder)
    return Tiers(in_memory(folder, model))


def in_memory(folder: Path, model: str) -> TiersConfig:
    """Settings for complete tables in memory, one copy for all instances that open the same files."""
    names = sorted(path.stem for path in folder.glob("*.npy"))
    if not names:
        raise ArtifactError(f"{folder} holds no embedding table; expected <table>.npy files. {REMEDY}")
    shapes = {name: open_array(folder, name).shape for name in names}
    if wrong := [name for name, shape in shapes.items() if len(shape) != 2]:
        raise ArtifactError(f"{folder / wrong[0]}.npy has shape {list(shapes[wrong[0]])}; expected [rows, D]. {REMEDY}")
    tables = tuple(TableConfig(name, rows, width, l2_rows=rows) for name, (rows, width) in shapes.items())
    needed = sum(l2_sections(table).nbytes + ring_sections(table).nbytes for table in tables)
    arena = arena_of(folder, names)
    return TiersConfig(model, tables, arena, place_for(arena, needed), source=str(folder))


def arena_of(folder: Path, names: list[str]) -> str:
    """A name that changes with the files: another export gets rows of its own."""
    stats = {name: (folder / f"{name}.npy").stat() for name in names}
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
    return hashlib.blake2b(repr((str(folder.resolve()), facts)).encode(), digest_size=12).hexdigest()


def place_for(arena: str, nbytes: int) -> str:
    """Shared memory, or the temporary folder where a container's shared memory is too small: the page cache shares as well."""
    if Path(SHARED_MEMORY, f"{ARENA_PREFIX}{arena}").exists():  # another instance found room before us
        return SHARED_MEMORY
    fits = Path(SHARED_MEMORY).is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * nbytes
    return SHARED_MEMORY if fits else tempfile.gettempdir()
