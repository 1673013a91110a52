"""Plan table budgets: how many rows of each table each level holds, and the bytes that they take.

HPS has one dial per level and model: `gpucacheper`, the share of every table that L1 caches, and `overflow_margin`, the rows of
a table that one partition of L2 keeps. The planner raises each as far as its budget allows. It refuses a budget that is too
small for the least setting, and names one that is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from hps_config.hit_rate import HitRates, predict_hit_rates
from hps_config.memory import (
    L1_SET_ROWS,
    compute_buffer_bytes,
    compute_l1_bytes,
    compute_l1_rows,
    compute_l2_bytes,
    compute_l3_bytes,
    compute_l3_memory_bytes,
    compute_ring_bytes,
)
from hps_config.ps_config import NO_MARGIN
from hps_config.tables import ROW_FORMATS, TableSpec
from serving.contract.errors import ConfigError

SHARE_STEPS = 1_000_000  # gpucacheper is written with six digits


@dataclass(frozen=True)
class Budgets:
    """Bytes each level may take. L1 is per process, L2 per machine, L3 on disk; 0 leaves L2 or L3 out.

    Where L2 does not hold every row, RocksDB's memory per process counts towards `l1_bytes`.
    """

    l1_bytes: int
    l2_bytes: int
    l3_bytes: int
    instances: int = 1  # processes that serve the model, each with its own L1
    max_batch_size: int = 4096  # samples of the largest request
    num_partitions: int = 8  # of L2


@dataclass(frozen=True)
class TablePlan:
    """One table's rows and bytes per level."""

    table: TableSpec
    l1_rows: int
    l2_rows: int
    l3_rows: int

    @property
    def in_l2(self) -> bool:
        """Whether L2 holds every row."""
        return self.l2_rows == self.table.rows

    @property
    def l1_bytes(self) -> int:
        return compute_l1_bytes(self.table, self.l1_rows)

    @property
    def l2_bytes(self) -> int:
        return compute_l2_bytes(self.table, self.l2_rows)

    @property
    def l3_bytes(self) -> int:
        return compute_l3_bytes(self.table, self.l3_rows)


@dataclass(frozen=True)
class Plan:
    """Rows per level, and their bytes, including slots but not interpreter and libraries."""

    budgets: Budgets
    tables: tuple[TablePlan, ...]
    gpucacheper: float  # share of each table in L1
    overflow_margin: int  # rows of a table per partition of L2; NO_MARGIN when all rows fit

    @property
    def l1_bytes(self) -> int:
        """Bytes of L1 in one process."""
        return sum(planned.l1_bytes for planned in self.tables)

    @property
    def l2_bytes(self) -> int:
        """Bytes of L2, one copy for all processes of the machine."""
        return sum(planned.l2_bytes for planned in self.tables)

    @property
    def l3_bytes(self) -> int:
        """Bytes of L3 on disk."""
        return sum(planned.l3_bytes for planned in self.tables)

    @property
    def l3_memory_bytes(self) -> int:
        """Bytes of RocksDB's index, filters and block cache in one process."""
        return compute_l3_memory_bytes(tuple(planned.table for planned in self.tables)) if self.budgets.l3_bytes else 0

    @property
    def ring_bytes(self) -> int:
        """Bytes of the machine's recent updates, which every L1 follows."""
        return sum(compute_ring_bytes(planned.table) for planned in self.tables)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of keys and rows of the largest request in one process."""
        return compute_buffer_bytes(tuple(planned.table for planned in self.tables), self.budgets.max_batch_size)

    @property
    def process_bytes(self) -> int:
        """Private memory of one process."""
        return self.l1_bytes + self.buffer_bytes + self.l3_memory_bytes

    @property
    def machine_bytes(self) -> int:
        """Memory of all processes, of L2 and of the update rings."""
        return self.budgets.instances * self.process_bytes + self.l2_bytes + self.ring_bytes

    @property
    def spared_bytes(self) -> int:
        """Part of `process_bytes` that our own levels save: L1 of tables that L2 holds whole, which HPS caches as well."""
        return sum(planned.l1_bytes for planned in self.tables if planned.in_l2)

    @property
    def l2_complete(self) -> bool:
        """Whether L2 holds every row of every table, so that L3 is read only at start."""
        return all(planned.in_l2 for planned in self.tables)


def plan_levels(tables: tuple[TableSpec, ...], budgets: Budgets) -> Plan:
    """Fill the levels as far as the budgets allow.

    Raises ConfigError for a budget that is too small, and names one that is enough.
    """
    _check_tables(tables, budgets)
    _check_l3(tables, budgets)
    margin = _find_largest_margin(tables, budgets)
    share = _find_largest_share(tables, budgets, _compute_rocksdb_bytes(tables, budgets, margin))
    planned = tuple(
        TablePlan(
            table,
            compute_l1_rows(table.rows, share),
            _compute_l2_rows(table, margin, budgets),
            table.rows if budgets.l3_bytes else 0,
        )
        for table in tables
    )
    return Plan(budgets, planned, share, margin)


def predict(plan: Plan, traces: dict[str, np.ndarray]) -> dict[str, HitRates]:
    """Predict hit rates per table of a plan. traces: table name -> int64 [N] keys in order of use."""
    known = {planned.table.name: planned for planned in plan.tables}
    unknown = sorted(set(traces) - set(known))
    if unknown:
        raise ConfigError(
            f"the trace has keys of {', '.join(unknown)}. Expected tables of the plan: {', '.join(known)}. Rename its arrays."
        )
    return {name: _predict_table(plan, known[name], keys) for name, keys in traces.items()}


def _predict_table(plan: Plan, planned: TablePlan, keys: np.ndarray) -> HitRates:
    rates = predict_hit_rates(keys, planned.l1_rows, planned.l2_rows, plan.budgets.instances)
    return replace(rates, l2=1 - rates.l1) if planned.in_l2 else rates


def _check_tables(tables: tuple[TableSpec, ...], budgets: Budgets) -> None:
    if not tables:
        raise ConfigError("the plan has no tables. Expected at least one. Add a [[tables]] section.")
    names = [table.name for table in tables]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(f"table names repeat: {', '.join(repeated)}. Expected unique names. Rename a table.")
    if min(budgets.instances, budgets.max_batch_size, budgets.num_partitions) < 1:
        raise ConfigError(f"{budgets} has a count below 1. Expected instances, batch and partitions of at least 1. Correct it.")
    if not budgets.l2_bytes and not budgets.l3_bytes:
        raise ConfigError(
            "the budgets give neither L2 nor L3 any bytes. Expected one that holds every row. Give l2 or l3 a budget."
        )


def _check_l3(tables: tuple[TableSpec, ...], budgets: Budgets) -> None:
    needed = sum(compute_l3_bytes(table, table.rows) for table in tables)
    if budgets.l3_bytes and needed > budgets.l3_bytes:
        rows = sum(table.rows for table in tables)
        raise ConfigError(
            f"L3 needs {needed} bytes for {rows} rows. The budget is {budgets.l3_bytes}. Raise l3 to {needed} bytes, "
            f"or keep at most {int(rows * budgets.l3_bytes / needed)} rows."
        )


def _compute_rocksdb_bytes(tables: tuple[TableSpec, ...], budgets: Budgets, margin: int) -> int:
    """Return the bytes that RocksDB takes from L1's budget: 0 where L2 holds every row, because RocksDB is then not needed."""
    complete = all(_compute_l2_rows(table, margin, budgets) == table.rows for table in tables)
    return compute_l3_memory_bytes(tables) if budgets.l3_bytes and not complete else 0


def _find_largest_share(tables: tuple[TableSpec, ...], budgets: Budgets, rocksdb_bytes: int) -> float:
    """Return the largest share of every table whose caches fit one process, besides `rocksdb_bytes`."""

    def count_bytes(steps: int) -> int:
        return rocksdb_bytes + sum(
            compute_l1_bytes(table, compute_l1_rows(table.rows, steps / SHARE_STEPS)) for table in tables
        )

    if (needed := count_bytes(1)) > budgets.l1_bytes:
        raise ConfigError(
            f"L1 needs {needed} bytes per process for the least it can hold ({L1_SET_ROWS} rows or a millionth of each of "
            f"{len(tables)} tables) and {rocksdb_bytes} bytes of it for RocksDB's index, filters and block cache. The budget "
            f"is {budgets.l1_bytes}. Raise l1 to {needed} bytes, or serve fewer tables."
        )
    return _find_largest(SHARE_STEPS, lambda steps: count_bytes(steps) <= budgets.l1_bytes) / SHARE_STEPS


def _find_largest_margin(tables: tuple[TableSpec, ...], budgets: Budgets) -> int:
    """Return the most rows per partition that fit L2, NO_MARGIN when all do. Without an L3 they must."""

    def count_bytes(margin: int) -> int:
        return sum(compute_l2_bytes(table, _compute_l2_rows(table, margin, budgets)) for table in tables)

    if count_bytes(NO_MARGIN) <= budgets.l2_bytes:
        return NO_MARGIN
    if not budgets.l3_bytes:
        raise ConfigError(_describe_l2_refusal(tables, budgets, count_bytes(NO_MARGIN)))
    if not budgets.l2_bytes:
        return NO_MARGIN
    if (needed := count_bytes(1)) > budgets.l2_bytes:
        raise ConfigError(
            f"L2 needs {needed} bytes for one row in each of {budgets.num_partitions} partitions of {len(tables)} tables. "
            f"The budget is {budgets.l2_bytes}. Raise l2 to {needed} bytes, or set it to 0 to serve misses from L3."
        )
    return _find_largest(max(table.rows for table in tables), lambda margin: count_bytes(margin) <= budgets.l2_bytes)


def _compute_l2_rows(table: TableSpec, margin: int, budgets: Budgets) -> int:
    return min(table.rows, margin * budgets.num_partitions) if budgets.l2_bytes else 0


def _describe_l2_refusal(tables: tuple[TableSpec, ...], budgets: Budgets, needed: int) -> str:
    remedies = [
        f"raise l2 to {needed} bytes",
        f"give l3 {sum(compute_l3_bytes(table, table.rows) for table in tables)} bytes of disk",
    ]
    for row_format in ROW_FORMATS[1:]:
        narrower = [table.model_copy(update={"row_format": row_format}) for table in tables]
        if sum(compute_l2_bytes(table, table.rows) for table in narrower) <= budgets.l2_bytes:
            remedies.append(f"keep the rows as {row_format}")
            break
    return (
        f"L2 needs {needed} bytes for {sum(table.rows for table in tables)} rows, and there is no L3 to hold the rest. "
        f"The budget is {budgets.l2_bytes}. What would fit: {'; or '.join(remedies)}."
    )


def _find_largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return a number of 1 … most that fits while the next one does not (the largest if needs grow with it). fits(1) holds."""
    least, beyond = 1, most + 1
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if fits(middle) else (least, middle)
    return least
