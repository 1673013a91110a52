"""A plan as tables for people."""

from __future__ import annotations

from rich.console import Console, Group, JustifyMethod
from rich.table import Table

from hps_config import memory
from hps_config.hit_rate import WARM_UP_SHARE, HitRates
from hps_config.planning import Plan
from serving.tables.levels.rocks_store import (
    BLOCK_BYTES,
    BLOCK_CACHE_BYTES,
    BLOOM_BITS_PER_KEY,
    INDEX_BYTES_PER_BLOCK,
    MEMTABLE_BYTES,
)


def human_bytes(count: int) -> str:
    """Return bytes for people: 1536 is `1.5 KiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def print_plan(plan: Plan, hit_rates: dict[str, HitRates], console: Console) -> None:
    """Print bytes per level and process, predicted hit rates of the traced tables, and the assumptions behind them."""
    parts = [_levels(plan), _totals(plan)]
    if hit_rates:
        parts.append(_hit_rates(hit_rates))
    console.print(Group(*parts))
    for assumption in assumptions(plan, bool(hit_rates)):
        console.print(f"- {assumption}", markup=False, highlight=False)


def assumptions(plan: Plan, traced: bool) -> list[str]:
    """Return the assumptions behind the figures of a plan, one sentence each."""
    said = [
        "L1: HPS has one for every table. Our own levels leave it out where L2 holds the whole table: its shared rows are "
        "read as fast.",
        f"L1: whole sets of {memory.L1_SET_ROWS} rows, decoded to fp32, with their index and use counts.",
        "L2: one copy for all processes in shared memory, rows in the table's row format "
        "(a Redis cluster keeps fp32 rows and its own overhead instead).",
        f"L3: fp32 rows, {memory.L3_ROW_BYTES} bytes beside each, uncompressed; compaction may need as much again for a while.",
        f"RocksDB's memory: {BLOOM_BITS_PER_KEY} bits of filter a row, {INDEX_BYTES_PER_BLOCK} bytes of index a block of "
        f"{BLOCK_BYTES}, a cache of {human_bytes(BLOCK_CACHE_BYTES)}, out of L1's budget unless L2 holds every row; "
        f"live updates add up to {human_bytes(2 * MEMTABLE_BYTES)} a table, and the updater is one more such process.",
        "Not in RocksDB's memory: the C library's heaps of the threads that read it, 8 to 43 MiB a process (measured, 16 "
        "threads), next to nothing where MALLOC_ARENA_MAX=1 is set.",
        f"Per process: L1, RocksDB's memory and the buffers of a request of {plan.budgets.max_batch_size} samples, not the "
        "interpreter.",
        "NVIDIA's hps backend keeps fp32 rows in GPU memory, one full cache per GPU.",
    ]
    if traced:
        said.append(
            "Hit rates: exact LRU per level (on steady Zipf traffic our L1 stays from 1 point below to 7 above), uses dealt "
            f"to {plan.budgets.instances} processes in turn, the first {WARM_UP_SHARE:.0%} of the trace only warms the levels."
        )
    return said


def _levels(plan: Plan) -> Table:
    table = Table(title="rows and bytes per table")
    columns: tuple[tuple[str, JustifyMethod], ...] = (
        ("table", "left"),
        ("width", "right"),
        ("format", "left"),
        ("rows", "right"),
    )
    for name, justify in columns:
        table.add_column(name, justify=justify)
    for level in ("L1 of one process", "L2 of the machine", "L3 on disk"):
        table.add_column(level, justify="right")
    for planned in plan.tables:
        spec = planned.table
        levels = ((planned.l1_rows, planned.l1_bytes), (planned.l2_rows, planned.l2_bytes), (planned.l3_rows, planned.l3_bytes))
        cells = (f"{rows:,} rows\n{human_bytes(size)}" if rows else "none" for rows, size in levels)
        table.add_row(spec.name, str(spec.width), spec.row_format, f"{spec.rows:,}", *cells)
    return table


def _totals(plan: Plan) -> Table:
    budgets, table = plan.budgets, Table(title="bytes against budgets")
    for name in ("what", "planned", "budget"):
        table.add_column(name, justify="left" if name == "what" else "right")
    table.add_row("L1 of one process", human_bytes(plan.l1_bytes), human_bytes(budgets.l1_bytes))
    table.add_row("RocksDB's memory of one process", human_bytes(plan.l3_memory_bytes), "")
    table.add_row("request buffers of one process", human_bytes(plan.buffer_bytes), "")
    table.add_row("private memory of one process", human_bytes(plan.process_bytes), "")
    if plan.spared_bytes:
        table.add_row("the same in our own levels", human_bytes(plan.process_bytes - plan.spared_bytes), "")
    table.add_row("L2 of the machine", human_bytes(plan.l2_bytes), human_bytes(budgets.l2_bytes))
    table.add_row("update rings of the machine", human_bytes(plan.ring_bytes), "")
    table.add_row(f"memory of the machine, {budgets.instances} processes", human_bytes(plan.machine_bytes), "")
    if plan.spared_bytes:
        own_bytes = plan.machine_bytes - budgets.instances * plan.spared_bytes
        table.add_row("the same in our own levels", human_bytes(own_bytes), "")
    table.add_row("L3 on disk", human_bytes(plan.l3_bytes), human_bytes(budgets.l3_bytes))
    return table


def _hit_rates(hit_rates: dict[str, HitRates]) -> Table:
    table = Table(title="predicted hit rates, shares of all lookups")
    for name in ("table", "lookups", "L1", "L2", "in memory", "L3"):
        table.add_column(name, justify="left" if name == "table" else "right")
    for name, rates in hit_rates.items():
        shares = (rates.l1, rates.l2, rates.memory, 1 - rates.memory)
        table.add_row(name, f"{rates.lookups:,}", *(f"{share:.2%}" for share in shares))
    return table
