"""Table budgets as an operator writes them: one TOML file (hps_config/defaults.toml shows every key)."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from hps_config.planning import Budgets
from hps_config.tables import Positive, TableSpec
from repository.toml_files import open_toml
from serving.tables.formats.names import check_name

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(value: object) -> int:
    """Return the bytes of `"64 MiB"` or a plain number. Raises ValueError with what was expected."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(\w*)", value) if isinstance(value, str) else None
    if not match or match[2] not in UNITS:
        raise ValueError(f'is {value!r}. Expected bytes as a number or as "64 MiB" ({", ".join(list(UNITS)[1:])})')
    return int(Fraction(match[1]) * UNITS[match[2]])


Bytes = Annotated[int, BeforeValidator(parse_bytes)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class BudgetSection(_Section):
    l1: Bytes  # per process
    l2: Bytes  # per machine
    l3: Bytes  # on disk


class ServingSection(_Section):
    instances: Positive = 1
    max_batch_size: Positive = 4096
    hit_rate_threshold: Annotated[float, Field(ge=0)] = 1.1
    refresh_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    devices: Annotated[list[int], Field(min_length=1)] = [0]


class VolatileSection(_Section):
    type: str = "parallel_hash_map"
    address: str = "127.0.0.1:7000"
    num_partitions: Positive = 8


class PersistentSection(_Section):
    path: str = "rocksdb"


class UpdateSection(_Section):
    brokers: str = ""  # empty: no live updates


class HpsDescription(_Section):
    """A whole description; the planner takes its `tables` and `budgets`."""

    model: str
    sparse_root: str = "."  # folder that holds <table>.model for each table
    budget: BudgetSection
    serving: ServingSection = ServingSection()
    volatile: VolatileSection = VolatileSection()
    persistent: PersistentSection = PersistentSection()
    updates: UpdateSection = UpdateSection()
    tables: Annotated[tuple[TableSpec, ...], Field(strict=False)]  # TOML has lists only

    @property
    def budgets(self) -> Budgets:
        return Budgets(
            l1_bytes=self.budget.l1,
            l2_bytes=self.budget.l2,
            l3_bytes=self.budget.l3,
            instances=self.serving.instances,
            max_batch_size=self.serving.max_batch_size,
            num_partitions=self.volatile.num_partitions,
        )


def read_description(path: Path) -> HpsDescription:
    """Read the description in a TOML file. Raises ConfigError with file, key and expectation."""
    with open_toml(path, "the keys are listed in hps_config/defaults.toml") as document:
        description = HpsDescription.model_validate(document)
        check_name("model", description.model)
    return description
